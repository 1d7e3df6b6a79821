"""Matrix products with kernels for CPUs, which read weights as fast as memory gives them.

XLA's CPU backend packs the weights anew in each call and gets a third of that. bfloat16 weights meet any number of
rows on the CPU's matrix units if it has them (`numba_matrix`), else a few rows on its vector units, as float32 weights
do (`numba_product`). Needs Numba and one device that has the CPU to itself.
"""

from collections.abc import Callable
from functools import cache as once

import jax
import jax.numpy as jnp
import numpy as np

from dcpjax.models import numba_here
from dcpjax.models.numba_here import LANES

MOST_ROWS = {jnp.dtype(jnp.bfloat16): 8, jnp.dtype(jnp.float32): 32}  # on vector units: from there on XLA is faster


def suits_matrix_units(*weights: jax.Array) -> bool:
    """Whether kernels can be called here, on matrix units, and `fused_dots` takes weights like these."""
    whole = all(weight.shape[1] % (2 * LANES) == 0 and weight.shape[0] >= LANES for weight in weights)
    return whole and all(weight.dtype == jnp.bfloat16 for weight in weights) and numba_here.matrix_units()


def suits(x: jax.Array, *weights: jax.Array) -> bool:
    """Whether kernels can be called here and `few_rows_dot` takes arrays like these."""
    few = all(x.shape[0] <= MOST_ROWS.get(weight.dtype, 0) for weight in weights)
    return few and x.shape[1] % LANES == 0 and numba_here.available()


def fused_dots(
    x: jax.Array,
    *weights: jax.Array,
    norm: tuple[jax.Array, float] | None = None,
    onto: jax.Array | None = None,
    gated: bool = False,
) -> list[jax.Array]:
    """x [N, I] float32, each weight [O, I] bfloat16 -> [N, O] float32, on matrix units; x is rounded to bfloat16.

    In one call with what comes before and after:
    `norm`: weight [I] bfloat16 and epsilon of a root-mean-square norm of x. `gated`: the first two weights are gate and
    up [F, I]; the others, [O, F], meet silu(x gate) * (x up), which is rounded as well. `onto` [N, O] float32: what the
    only result is added to.
    """
    name, threads, workspace_size = _matrix_target()
    made, width = (weights[2:], weights[0].shape[0]) if gated else (weights, 0)
    settings = jnp.array([gated, norm is not None, onto is not None, 0.0 if norm is None else norm[1]], jnp.float32)
    workspace = workspace_size(*x.shape, width, threads)
    shapes = [*((x.shape[0], weight.shape[0]) for weight in made), (workspace,)]
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    besides = settings if norm is None else norm[0], x if onto is None else onto  # there to be passed over
    return list(jax.ffi.ffi_call(name, results)(x, settings, *besides, *weights)[:-1])


def few_rows_dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [N, I] float32, weight [O, I] -> [N, O] float32; x is rounded to the dtype of the weight."""
    if weight.dtype == jnp.bfloat16:
        x = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)  # two conversions would be optimised away
    result = jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), jnp.float32)
    return jax.ffi.ffi_call(_vector_target(weight.dtype == jnp.bfloat16), result)(x, weight)


@once
def _vector_target(bfloat16: bool) -> str:
    """Name of the custom call for weights of this dtype, compiled and registered at its first use."""
    from dcpjax.models import numba_call, numba_product  # take a second

    stored = np.dtype(np.uint16 if bfloat16 else np.float32)
    return numba_call.register(f"dcpjax_product_{stored}", numba_product.kernel(stored), numba_call.threads() > 1)


@once
def _matrix_target() -> tuple[str, int, Callable[..., int]]:
    """The same for the matrix units: also the threads that it uses and the size of the workspace they need."""
    from dcpjax.models import numba_call, numba_matrix

    threads = numba_call.threads()
    name = numba_call.register("dcpjax_products", numba_matrix.kernel(threads), threads > 1)
    return name, threads, numba_matrix.workspace_size
