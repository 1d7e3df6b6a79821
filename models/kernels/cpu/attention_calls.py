"""`paged_partial` by kernels for CPUs, and the cache write that goes with it.

XLA's CPU backend runs the loop of `attention` on one core and widens each chunk to float32 before it multiplies; the
kernels keep what they widen in the inner caches and share the work among cores. They make their own tiles.
"""

from functools import cache as once
from functools import partial as bind

import jax
import jax.numpy as jnp
import numpy as np

from dcpjax.models.attention.work import Tiles, Work
from dcpjax.models.kernels.cpu import support
from dcpjax.models.kernels.cpu.support import GRAIN, Target
from dcpjax.models.kv_cache import Cache, CacheGeometry, LatentCache, LayerCache, encode
from dcpjax.sharding.merge import Partial


def suits(cache: Cache, geometry: CacheGeometry) -> bool:
    """Whether kernels can be used here and take a cache like this."""
    dims = [cache.value_dim]
    if isinstance(cache, LayerCache):
        dims += [geometry.slots, cache.keys.shape[3]]
    fits = all(dim % GRAIN == 0 for dim in dims)
    return fits and _arrays(cache)[0].dtype in (jnp.uint16, jnp.float32) and support.available()


def _arrays(cache: Cache) -> tuple[jax.Array, ...]:
    """The cache's arrays as they are: XLA would copy one that is reshaped after it was written."""
    return (cache.keys, cache.values) if isinstance(cache, LayerCache) else (cache.latents,)


def paged_partial_on_cpu(
    q: jax.Array, cache: Cache, work: Work, geometry: CacheGeometry, rank: jax.Array, *, parallel: bool
) -> Partial:
    """Attention of a step's tokens over the slots of this rank, where `suits` allows it.

    Per device: q [T, H, D] (scaled) and a cache of values of Y dimensions -> out [T, H, Y], lse [T, H].
    `parallel` shares one device's work among all cores: not for several devices that share them already.
    """
    tokens, heads, _ = q.shape
    grouped, arrays = (tokens, cache.kv_heads, heads // cache.kv_heads), _arrays(cache)
    step = work.positions, work.rows, work.block_table, _ownership(geometry, rank)
    target = _attention_kernel(np.dtype(arrays[0].dtype), isinstance(cache, LatentCache), parallel)
    workspace = target.threads, target.workspace_size(geometry.slots, grouped[2], cache.value_dim)
    shapes = (*grouped, cache.value_dim), grouped, workspace
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    out, lse, _ = jax.ffi.ffi_call(target.name, results)(q.reshape(*grouped, -1), *arrays, *step)
    return Partial(out.reshape(tokens, heads, -1), lse.reshape(tokens, heads))


def suits_prompts(cache: LatentCache, geometry: CacheGeometry, w_uk: jax.Array, w_uv: jax.Array) -> bool:
    """Whether kernels can be used here and `prompt_partial_on_cpu` takes these."""
    nope, rank, width = w_uk.shape[1], w_uk.shape[2], w_uv.shape[1]
    fits = all(dim % GRAIN == 0 for dim in (nope, rank, width))
    return fits and suits(cache, geometry)


def prompt_partial_on_cpu(
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
    """Attention of some tiles over latents, where `suits_prompts` allows it. Tiles of at least `fewest` tokens are
    computed with up-projected keys and values, the others with absorbed queries.

    Per device: q [T, H, X + R] (scaled), w_uk [H, X, C] and w_uv [H, Y, C] float32 -> out [T, H, Y], lse [T, H]; tokens
    of no tile get 0 and -inf.
    """
    tokens, heads, depth = q.shape
    width, most_tokens = w_uv.shape[1], min(tiles.size, tokens)
    step = work.positions, work.rows, work.block_table, _ownership(geometry, rank)
    limits = jnp.stack([tiles.count, jnp.int32(most_tokens), jnp.int32(fewest)])
    target = _prompt_kernel(np.dtype(cache.latents.dtype), parallel)
    workspace = target.threads, target.workspace_size(most_tokens, fewest, cache.value_dim, depth, width)
    shapes = (tokens, heads, width), (tokens, heads), workspace
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    call = jax.ffi.ffi_call(target.name, results)
    out, lse, _ = call(q, cache.latents, w_uk, w_uv.swapaxes(1, 2), *step, tiles.start, tiles.row, limits)
    return Partial(out, lse)


def _ownership(geometry: CacheGeometry, rank: jax.Array) -> jax.Array:
    """int32 [3]: which positions this rank holds, as dcp, interleave and rank."""
    return jnp.stack([jnp.int32(geometry.dcp), jnp.int32(geometry.interleave), rank])


def write_on_cpu(
    cache: LayerCache, new: tuple[jax.Array, ...], block: jax.Array, slot: jax.Array, *, parallel: bool
) -> LayerCache:
    """`LayerCache.write`, where `suits` allows it."""
    dtype = np.dtype(cache.keys.dtype)
    k, v = (encode(values, dtype) for values in new)
    results = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (cache.keys, cache.values)]
    call = jax.ffi.ffi_call(_write_kernel(dtype, parallel).name, results, input_output_aliases={0: 0, 1: 1})
    return LayerCache(*call(cache.keys, cache.values, k, v, block, slot))


# The kernels for caches of some dtype, compiled and registered at their first use


@once
def _attention_kernel(dtype: np.dtype, latent: bool, parallel: bool) -> Target:
    from dcpjax.models.kernels.cpu import paged_attention, xla_call  # here, not above: they take a second

    threads = xla_call.threads() if parallel else 1
    if latent:
        name, kernel = f"dcpjax_latent_attention_{dtype}", bind(paged_attention.latent_kernel, dtype)
    else:
        units = dtype == np.uint16 and support.matrix_units()
        name, kernel = f"dcpjax_attention_{dtype}", bind(paged_attention.kernel, dtype, units)
    return Target(xla_call.register(name, kernel, threads), threads, paged_attention.workspace_size)


@once
def _prompt_kernel(dtype: np.dtype, parallel: bool) -> Target:
    from dcpjax.models.kernels.cpu import latent_prompts, xla_call  # here, not above: they take a second

    threads = xla_call.threads() if parallel else 1
    name = xla_call.register(f"dcpjax_prompt_attention_{dtype}", bind(latent_prompts.kernel, dtype), threads)
    return Target(name, threads, latent_prompts.workspace_size)


@once
def _write_kernel(dtype: np.dtype, parallel: bool) -> Target:
    from dcpjax.models.kernels.cpu import cache_write, xla_call  # here, not above: they take a second

    threads = xla_call.threads() if parallel else 1
    name = xla_call.register(f"dcpjax_cache_write_{dtype}", bind(cache_write.kernel, dtype), threads)
    return Target(name, threads)
