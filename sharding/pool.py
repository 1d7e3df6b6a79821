"""The whole pool of devices, `tp` and `dcp` together, seen from inside a `shard_map` body."""

import jax

from dcpjax.sharding.rules import WHOLE_POOL


def pool_rank() -> jax.Array:
    """This device's index among all of them, in the order in which arrays over the whole pool are cut."""
    return jax.lax.axis_index(WHOLE_POOL)


def sum_over_pool(x: jax.Array) -> jax.Array:
    """Add up every device's part; all devices get the sum."""
    return jax.lax.psum(x, WHOLE_POOL)
