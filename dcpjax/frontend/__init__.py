"""From prompts to requests, and from sampled tokens to text and results.

Knows text and options; knows nothing about arrays or scheduling.
"""
