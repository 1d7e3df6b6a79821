"""What users pass in and get back: options that check themselves, results, progress on a terminal.

Plain data under vLLM's names: no JAX arrays, no models, no files.
"""
