"""A model on its mesh: memory, compiled programs, and the steps that run on it.

Knows arrays and devices; knows nothing about text or about which request should run.
"""
