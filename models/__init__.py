"""Reached only as `dcpjax.models`, so that a user's own `models` package never collides with this one."""

if __name__ != "dcpjax.models":
    raise ImportError("import dcpjax.models, not models: the top-level folder is source, not a package")
