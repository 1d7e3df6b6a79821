"""Matrix products with kernels for CPUs, which read weights as fast as memory gives them.

XLA's CPU backend packs the weights anew in each call, and raises bfloat16 to float32 where there are no matrix units.
bfloat16 weights meet the rows on the CPU's matrix units if it has them (`numba_matrix`), else on its vector units, as
float32 weights do (`numba_product`). Needs Numba and one device that has the CPU to itself.
"""

from collections.abc import Callable
from functools import cache as once

import jax
import jax.numpy as jnp
import numpy as np

from dcpjax.models.kernels.cpu import support
from dcpjax.models.kernels.cpu.support import GRAIN, WIDEST

MOST_ROWS = 64  # of float32: from there on XLA is as fast or faster


def suits(rows: int, *weights: jax.Array) -> bool:
    """Whether kernels can be called here and `fused_dots` takes weights like these, for so many rows."""
    (dtype, *others), whole = {weight.dtype for weight in weights}, all(w.shape[1] % WIDEST == 0 for w in weights)
    taken = dtype == jnp.bfloat16 or (dtype == jnp.float32 and rows <= MOST_ROWS)
    return not others and taken and whole and support.available()


def suits_matrix_units(*weights: jax.Array) -> bool:
    """Whether matrix units, if there are any, take weights like these."""
    whole = all(weight.shape[1] % GRAIN == 0 and weight.shape[0] >= WIDEST for weight in weights)
    return whole and weights[0].dtype == jnp.bfloat16 and support.matrix_units()


def fused_dots(
    x: jax.Array,
    *weights: jax.Array,
    norm: tuple[jax.Array, float] | None = None,
    onto: jax.Array | None = None,
    gated: bool = False,
) -> list[jax.Array]:
    """x [N, I] float32, each weight [O, I] -> [N, O] float32, where `suits` allows it; x is rounded to their dtype.

    In one call with what comes before and after:
    `norm`: of x, a root-mean-square norm: its weight [I], of the weights' dtype, and epsilon. `gated`: the first two
    weights are gate and up [F, I]; the others, [O, F], meet silu(x gate) * (x up), which is rounded as well. `onto`
    [N, O] float32: what the only result is added to.
    """
    stored = np.dtype(np.uint16 if weights[0].dtype == jnp.bfloat16 else np.float32)
    name, threads, workspace_size = _target(stored, suits_matrix_units(*weights))
    made, width = (weights[2:], weights[0].shape[0]) if gated else (weights, 0)
    settings = jnp.array([gated, norm is not None, onto is not None, 0.0 if norm is None else norm[1]], jnp.float32)
    workspace = workspace_size(*x.shape, width, threads)
    shapes = [*((x.shape[0], weight.shape[0]) for weight in made), (workspace,)]
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    besides = settings if norm is None else norm[0], x if onto is None else onto  # there to be passed over
    return list(jax.ffi.ffi_call(name, results)(x, settings, *besides, *weights)[:-1])


@once
def _target(stored: np.dtype, matrix_units: bool) -> tuple[str, int, Callable[..., int]]:
    """The custom call for weights of this dtype, compiled and registered at its first use: its name, the threads that
    it uses and the size of the workspace they need."""
    from dcpjax.models.kernels.cpu import xla_call  # takes a second

    threads = xla_call.threads()
    if matrix_units:
        from dcpjax.models.kernels.cpu import product_on_tiles

        name, run, size = "dcpjax_products_by_tiles", product_on_tiles.kernel(threads), product_on_tiles.workspace_size
    else:
        from dcpjax.models.kernels.cpu import product

        name, run = f"dcpjax_products_{stored}", product.kernel(stored, threads)
        size = product.workspace_size
    return xla_call.register(name, run, threads > 1), threads, size
