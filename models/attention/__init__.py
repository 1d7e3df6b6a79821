"""Attention over the paged cache, split by token position across `dcp`.

Works on token positions, block tables and slots; does not know requests, model families or weights, except the
up-projection of latent attention.
"""
