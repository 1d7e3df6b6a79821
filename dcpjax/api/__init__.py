"""What a user may ask for and what comes back: options that check themselves, results, progress on a terminal.

Plain data under vLLM's names. Knows no arrays, no models and no files.
"""
