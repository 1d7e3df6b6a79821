"""Attention over the paged cache, split by token position across `dcp`.

Knows token positions, block tables and slots; knows nothing about requests or model families.
"""
