"""Exact decode context parallelism for long-context language models in JAX."""
