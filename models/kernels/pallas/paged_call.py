"""`paged_partial` as a kernel for GPUs and TPUs, with the same contract and the XLA loop as its reference.

Products are formed in the dtype of the cache and summed in float32, so that a bfloat16 cache reaches the matrix
units; the loop raises it to float32 instead. The softmax is float32 in both.

Knows a step's tokens and tiles; knows nothing about grids or memories.
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
    """Whether there is a kernel for this platform and it takes arrays of these shapes."""
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
    """Attention of a step's tokens over the slots of this rank, where `suits` allows it.

    Per device: q [N, H, D] (scaled) and a cache of values of Y dimensions -> out [N, H, Y], lse [N, H].
    `interpret` runs the kernel as plain XLA operations, on any device.
    """
    kernel, (tokens, heads, _) = KERNELS[platform], q.shape
    out = jnp.zeros((tokens, heads, cache.value_dim), jnp.float32)
    lse = jnp.full((tokens, heads), -jnp.inf, jnp.float32)
    for tiles in work.tiles:
        rows = kernel.rows_per_block(tiles.size * heads // cache.kv_heads, cache)
        blocks = split(q, cache, work, tiles, geometry, rows, kernel.slots_per_turn(cache, geometry))
        part = kernel.attend(blocks, cache, work.block_table, geometry, rank, interpret)
        out = scatter(out, part.out, blocks.tokens, cache.kv_heads)
        lse = scatter(lse[..., None], part.lse[..., None], blocks.tokens, cache.kv_heads)[..., 0]
    return Partial(out, lse)
