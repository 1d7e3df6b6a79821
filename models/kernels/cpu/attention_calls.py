"""`paged_partial` with a kernel for CPUs, and the cache write that goes with it.

XLA's CPU backend runs the loop of `attention` on one core and widens each chunk before it multiplies; the kernel
keeps what it widens in the inner caches and shares the work among cores. It makes its own tiles. Needs Numba; without
it the loop does the same but for rounding.
"""

from collections.abc import Callable
from functools import cache as once

import jax
import jax.numpy as jnp
import numpy as np

from dcpjax.models.attention.work import Tiles, Work
from dcpjax.models.kernels.cpu import support
from dcpjax.models.kernels.cpu.support import GRAIN
from dcpjax.models.kv_cache import Cache, CacheGeometry, LatentCache, LayerCache, encode
from dcpjax.sharding.merge import Partial


def suits(cache: Cache, geometry: CacheGeometry) -> bool:
    """Whether kernels can be called here and this one takes a cache like this."""
    stored = _stored(cache)
    sizes = [cache.value_dim]
    if isinstance(cache, LayerCache):
        sizes += [geometry.slots, cache.keys.shape[3]]
    fits = all(size % GRAIN == 0 for size in sizes)
    return fits and stored[0].dtype in (jnp.uint16, jnp.float32) and support.available()


def _stored(cache: Cache) -> tuple[jax.Array, ...]:
    """Its arrays as they are: XLA would copy one that is reshaped after it was written."""
    return (cache.keys, cache.values) if isinstance(cache, LayerCache) else (cache.latents,)


def paged_partial_numba(
    q: jax.Array, cache: Cache, work: Work, geometry: CacheGeometry, rank: jax.Array, *, parallel: bool
) -> Partial:
    """Attention of a step's tokens over the slots of this rank, where `suits` allows it.

    Per device: q [N, H, D] (scaled) and a cache of values of Y dimensions -> out [N, H, Y], lse [N, H].
    `parallel` shares one device's work among all cores: not for several devices that share them already.
    """
    tokens, heads, _ = q.shape
    shape, stored = (tokens, cache.kv_heads, heads // cache.kv_heads), _stored(cache)
    arguments = (
        q.reshape(*shape, -1),
        *stored,
        work.positions,
        work.rows,
        work.block_table,
        _share(geometry, rank),
    )
    name, threads, workspace = _kernel(np.dtype(stored[0].dtype), len(stored) == 1, parallel)
    workspace = (threads, workspace(geometry.slots, shape[2], cache.value_dim))
    results = [jax.ShapeDtypeStruct(size, jnp.float32) for size in ((*shape, cache.value_dim), shape, workspace)]
    out, lse, _ = jax.ffi.ffi_call(name, results)(*arguments)
    return Partial(out.reshape(tokens, heads, -1), lse.reshape(tokens, heads))


def suits_prompts(cache: LatentCache, geometry: CacheGeometry, w_uk: jax.Array, w_uv: jax.Array) -> bool:
    """Whether kernels can be called here and `prompt_partial_numba` takes these."""
    nope, rank, width = w_uk.shape[1], w_uk.shape[2], w_uv.shape[1]
    whole = all(size % GRAIN == 0 for size in (nope, rank, width))
    return whole and suits(cache, geometry)


def prompt_partial_numba(
    q: jax.Array,
    cache: LatentCache,
    work: Work,
    tiles: Tiles,
    geometry: CacheGeometry,
    rank: jax.Array,
    w_uk: jax.Array,
    w_uv: jax.Array,
    *,
    fewest: int,
    parallel: bool,
) -> Partial:
    """Attention of some tiles over latents, where `suits_prompts` allows it, with keys and values of the heads' own in
    those of at least `fewest` tokens.

    Per device: q [N, H, X + R] (scaled), w_uk [H, X, C] and w_uv [H, Y, C] float32 -> out [N, H, Y], lse [N, H]; tokens
    of no tile get 0 and -inf.
    """
    tokens, heads, depth = q.shape
    width, size = w_uv.shape[1], min(tiles.size, tokens)
    arguments = (
        q,
        cache.latents,
        w_uk,
        w_uv.swapaxes(1, 2),
        work.positions,
        work.rows,
        work.block_table,
        _share(geometry, rank),
        tiles.start,
        tiles.row,
        jnp.stack([tiles.count, jnp.int32(size), jnp.int32(fewest)]),
    )
    name, threads, workspace = _prompt_kernel(np.dtype(cache.latents.dtype), parallel)
    workspace = (threads, workspace(size, fewest, cache.value_dim, depth, width))
    results = [jax.ShapeDtypeStruct(made, jnp.float32) for made in ((tokens, heads, width), (tokens, heads), workspace)]
    out, lse, _ = jax.ffi.ffi_call(name, results)(*arguments)
    return Partial(out, lse)


def _share(geometry: CacheGeometry, rank: jax.Array) -> jax.Array:
    """Which positions this rank holds, as the kernels want to know it."""
    return jnp.stack([jnp.int32(geometry.dcp), jnp.int32(geometry.interleave), rank])


def write_numba(
    cache: LayerCache, new: tuple[jax.Array, ...], block: jax.Array, slot: jax.Array, *, parallel: bool
) -> LayerCache:
    """`LayerCache.write`, where `suits` allows it."""
    stored = np.dtype(cache.keys.dtype)
    k, v = (encode(values, stored) for values in new)
    results = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (cache.keys, cache.values)]
    call = jax.ffi.ffi_call(_write_kernel(stored, parallel), results, input_output_aliases={0: 0, 1: 1})
    return LayerCache(*call(cache.keys, cache.values, k, v, block, slot))


@once
def _write_kernel(stored: np.dtype, parallel: bool) -> str:
    """Name of the custom call for a cache of this dtype, compiled and registered at its first use."""
    from dcpjax.models.kernels.cpu import cache_write, xla_call  # take a second

    parallel = parallel and xla_call.threads() > 1
    return xla_call.register(f"dcpjax_cache_write_{stored}", cache_write.kernel(stored), parallel)


@once
def _kernel(stored: np.dtype, latent: bool, parallel: bool) -> tuple[str, int, Callable[[int, int, int], int]]:
    """The custom call for a cache of this dtype, compiled and registered at its first use: its name, the threads it
    uses, and the size of the workspace that each of them needs."""
    from dcpjax.models.kernels.cpu import paged_attention, xla_call  # take a second

    threads = xla_call.threads() if parallel else 1
    if latent:
        name, run = f"dcpjax_latent_attention_{stored}", paged_attention.latent_kernel(stored)
    else:
        units = stored == np.uint16 and support.matrix_units()
        name, run = f"dcpjax_attention_{stored}", paged_attention.kernel(stored, units)
    return xla_call.register(name, run, threads > 1), threads, paged_attention.workspace_size


@once
def _prompt_kernel(stored: np.dtype, parallel: bool) -> tuple[str, int, Callable[..., int]]:
    """The same for prompts over latents."""
    from dcpjax.models.kernels.cpu import latent_prompts, xla_call  # take a second

    threads = xla_call.threads() if parallel else 1
    name = xla_call.register(f"dcpjax_prompt_attention_{stored}", latent_prompts.kernel(stored), threads > 1)
    return name, threads, latent_prompts.workspace_size
