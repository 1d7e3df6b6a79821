"""Decoder models as pure functions over trees of arrays: weights, KV cache and the tokens of a step.

Names logical axes, never mesh axes; does not know requests, sampling, text or files. Reached only as `dcpjax.models`,
so that a user's own `models` package never collides with this one.
"""

if __name__ != "dcpjax.models":
    raise ImportError("import dcpjax.models, not models: the top-level folder is source, not a package")
