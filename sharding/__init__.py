"""Reached only as `dcpjax.sharding`, so that a user's own `sharding` package never collides with this one."""

if __name__ != "dcpjax.sharding":
    raise ImportError("import dcpjax.sharding, not sharding: the top-level folder is source, not a package")
