"""Models on disk: configs, tensors and tokenizers, from folders, GGUF files, presets and the Hugging Face hub.

Files are data: no code from a checkpoint is run, nothing is unpickled. Requests and steps play no part here.
"""
