"""The device mesh, how arrays are placed on it, and collectives over it with their cost.

Knows sizes, axes and arrays; does not know models, requests or files. Reached only as `dcpjax.sharding`, so that a
user's own `sharding` package never collides with this one.
"""

if __name__ != "dcpjax.sharding":
    raise ImportError("import dcpjax.sharding, not sharding: the top-level folder is source, not a package")
