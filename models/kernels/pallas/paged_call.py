"""`paged_partial` as a kernel for GPUs and TPUs, with the same arguments and results; the XLA loop is its reference.

Operands of products have the dtype of the cache, so that a bfloat16 cache uses the matrix units, and sums are float32.
The loop converts the cache to float32 instead. The softmax is float32 in both.
"""

import jax
import jax.numpy as jnp

from dcpjax.models.attention.work import Work
from dcpjax.models.kernels.pallas import gpu, tpu
from dcpjax.models.kernels.pallas.blocks import scatter, split
from dcpjax.models.kv_cache import Cache, CacheGeometry
from dcpjax.sharding.merge import Partial

KERNELS = {"gpu": gpu, "tpu": tpu}


def suits(cache: Cache, work: Work, geometry: CacheGeometry, platform: str) -> bool:
    """Whether there is a kernel for this platform and it accepts arrays of these shapes."""
    return platform in KERNELS and KERNELS[platform].suits(cache, work, geometry)


def paged_partial_kernel(
    q: jax.Array,
    cache: Cache,
    work: Work,
    geometry: CacheGeometry,
    rank: jax.Array,
    *,
    platform: str,
    interpret: bool = False,
) -> Partial:
    """Attention of a step's tokens over the slots of this rank, for arrays that `suits` accepts.

    Per device: q [T, H, D] (scaled) and a cache of values of Y dimensions -> out [T, H, Y], lse [T, H].
    `interpret` runs the kernel as plain XLA operations, on any device.
    """
    kernel, (tokens, heads, _) = KERNELS[platform], q.shape
    out = jnp.zeros((tokens, heads, cache.value_dim), jnp.float32)
    lse = jnp.full((tokens, heads), -jnp.inf, jnp.float32)
    for tiles in work.tiles:
        rows = kernel.rows_per_block(tiles.size * heads // cache.kv_heads, cache)
        blocks = split(q, cache, work, tiles, geometry, rows, kernel.slots_per_iteration(cache, geometry))
        part = kernel.attend(blocks, cache, work.block_table, geometry, rank, interpret)
        out = scatter(out, part.out, blocks.tokens, cache.kv_heads)
        lse = scatter(lse[..., None], part.lse[..., None], blocks.tokens, cache.kv_heads)[..., 0]
    return Partial(out, lse)
