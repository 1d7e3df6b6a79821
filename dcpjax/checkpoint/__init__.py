"""Models on disk: configs, tensors and tokenizers, from folders, GGUF files, presets and hubs.

Files are data: no code from a checkpoint is run, nothing is unpickled. Knows nothing about requests or steps.
"""
