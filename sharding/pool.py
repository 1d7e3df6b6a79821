"""Operations over all devices, `tp` and `dcp` together, inside a `shard_map` body."""

import jax

from dcpjax.sharding.rules import WHOLE_POOL


def pool_rank() -> jax.Array:
    """This device's index among all, in the order of the shards of an array that is split over all devices."""
    return jax.lax.axis_index(WHOLE_POOL)


def sum_over_pool(x: jax.Array) -> jax.Array:
    """The sum of every device's x, on all devices."""
    return jax.lax.psum(x, WHOLE_POOL)
