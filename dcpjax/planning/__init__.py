"""Which layouts a model can run on and how fast: planned from its config, inspected in its files, or measured.

Knows configs, layouts and published peak rates; `measure` also runs the engine's `Runner`. Knows nothing about text or
command-line flags.
"""
