"""`paged_partial` with a kernel for CPUs.

XLA's CPU backend runs the loop of `attention` on one core and widens each chunk before it multiplies; the kernel
keeps what it widens in registers and shares the work among cores. Larger tiles than prompts have here would stay in
the loop. Needs Numba; without it everything does, the same but for rounding.
"""

from functools import cache as once

import jax
import jax.numpy as jnp
import numpy as np

from dcpjax.models import numba_here
from dcpjax.models.attention import Tiles, Work, paged_partial
from dcpjax.models.kv_cache import Cache, CacheGeometry, LayerCache
from dcpjax.models.numba_here import LANES
from dcpjax.sharding.merge import Partial

MOST_TOKENS = 64  # of a tile that the kernel takes
COLUMNS = 2 * LANES  # that it computes together; slots of a block and dimensions of a head are multiples of it


def suits(cache: Cache, geometry: CacheGeometry) -> bool:
    """Whether kernels can be called here and this one takes a cache like this."""
    if not isinstance(cache, LayerCache) or cache.keys.dtype not in (jnp.uint16, jnp.float32):
        return False
    sizes = (geometry.slots, cache.keys.shape[3], cache.value_dim)
    return all(size % COLUMNS == 0 for size in sizes) and numba_here.available()


def paged_partial_numba(
    q: jax.Array, cache: LayerCache, work: Work, geometry: CacheGeometry, rank: jax.Array, *, parallel: bool
) -> Partial:
    """Attention of a step's tokens over the slots of this rank, where `suits` allows it.

    Per device: q [N, H, D] (scaled) and a cache of values of Y dimensions -> out [N, H, Y], lse [N, H].
    `parallel` shares one device's work among all cores: not for several devices that share them already.
    """
    many = tuple(tiles for tiles in work.tiles if tiles.size > MOST_TOKENS)
    part = paged_partial(q, cache, work.replace(tiles=many), geometry, rank)  # type: ignore[attr-defined]
    for tiles in work.tiles:
        if tiles.size <= MOST_TOKENS:
            part = _call(part, q, cache, work, tiles, geometry, rank, parallel)
    return part


def _call(
    part: Partial,
    q: jax.Array,
    cache: LayerCache,
    work: Work,
    tiles: Tiles,
    geometry: CacheGeometry,
    rank: jax.Array,
    parallel: bool,
) -> Partial:
    """The partial with the tokens of these tiles filled in."""
    tokens, grouped = q.shape[0], (q.shape[0], cache.kv_heads, -1)
    share = jnp.stack([jnp.int32(geometry.dcp), jnp.int32(geometry.interleave), rank])
    arguments = (
        part.out.reshape(*grouped, cache.value_dim),
        part.lse.reshape(grouped),
        q.reshape(*grouped, q.shape[2]),
        cache.keys,  # as they are: XLA would copy a cache that is reshaped after it was written
        cache.values,
        work.positions,
        work.rows,
        work.block_table,
        tiles.start,
        jnp.stack([tiles.count, jnp.int32(tiles.size)]),
        share,
    )
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arguments[:2]]
    call = jax.ffi.ffi_call(_target(np.dtype(cache.keys.dtype), parallel), results, input_output_aliases={0: 0, 1: 1})
    out, lse = call(*arguments)
    return Partial(out.reshape(tokens, -1, cache.value_dim), lse.reshape(tokens, -1))


@once
def _target(stored: np.dtype, parallel: bool) -> str:
    """Name of the custom call for a cache of this dtype, compiled and registered at its first use."""
    from dcpjax.models import numba_call, numba_kernel  # take a second

    parallel = parallel and numba_call.threads_are_safe()
    name = f"dcpjax_attention_{stored}_{'parallel' if parallel else 'in_turn'}"
    numba_call.register(name, numba_kernel.kernel(stored, parallel))
    return name
