"""Matrix products by kernels for CPUs, which read weights as fast as memory gives them.

XLA's CPU backend packs the weights anew in each call, and widens bfloat16 to float32 where there are no matrix units.
The kernels multiply bfloat16 weights on the CPU's matrix units if it has them (`product_on_tiles`), else on its vector
units, as they do float32 weights (`product`). They need one device that has the CPU to itself.
"""

from functools import cache as once
from functools import partial as bind

import jax
import jax.numpy as jnp
import numpy as np

from dcpjax.models.kernels.cpu import support
from dcpjax.models.kernels.cpu.support import GRAIN, WIDEST, Target

MOST_ROWS = 64  # of float32: from there on XLA is as fast or faster


def suits(rows: int, *weights: jax.Array) -> bool:
    """Whether kernels can be used here and `fused_dots` takes weights like these, for so many rows."""
    (dtype, *others), whole = {weight.dtype for weight in weights}, all(w.shape[1] % WIDEST == 0 for w in weights)
    taken = dtype == jnp.bfloat16 or (dtype == jnp.float32 and rows <= MOST_ROWS)
    return not others and taken and whole and support.available()


def suits_matrix_units(*weights: jax.Array) -> bool:
    """Whether the CPU has matrix units and they take weights like these."""
    whole = all(weight.shape[1] % GRAIN == 0 and weight.shape[0] >= WIDEST for weight in weights)
    return whole and weights[0].dtype == jnp.bfloat16 and support.matrix_units()


def fused_dots(
    x: jax.Array,
    *weights: jax.Array,
    norm: tuple[jax.Array, float] | None = None,
    residual: jax.Array | None = None,
    gated: bool = False,
) -> list[jax.Array]:
    """x [rows, inner] float32, each weight [columns, inner] -> [rows, columns] float32, where `suits` allows it; x is
    rounded to the weights' dtype.

    In the same call:
    `norm`: x goes through a root-mean-square norm first; its weight [inner], of the weights' dtype, and epsilon.
    `gated`: the first two weights are gate and up [width, inner]; the others, [columns, width], meet
    silu(x gate) * (x up) instead of x, rounded as well. `residual` [rows, columns] float32: added to the only result.
    """
    dtype = np.dtype(np.uint16 if weights[0].dtype == jnp.bfloat16 else np.float32)
    target = _product_kernel(dtype, suits_matrix_units(*weights))
    multiplied, width = (weights[2:], weights[0].shape[0]) if gated else (weights, 0)
    settings = jnp.array([gated, norm is not None, residual is not None, 0.0 if norm is None else norm[1]], jnp.float32)
    workspace = target.workspace_size(*x.shape, width, target.threads)
    shapes = [*((x.shape[0], weight.shape[0]) for weight in multiplied), (workspace,)]
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    # the call has a norm weight and an addend in any case; without them the kernel reads neither
    norm_weight, addend = settings if norm is None else norm[0], x if residual is None else residual
    return list(jax.ffi.ffi_call(target.name, results)(x, settings, norm_weight, addend, *weights)[:-1])


@once
def _product_kernel(dtype: np.dtype, matrix_units: bool) -> Target:
    """The kernel for weights of this dtype, compiled and registered at its first use."""
    from dcpjax.models.kernels.cpu import xla_call  # here, not above: it takes a second

    threads = xla_call.threads()
    if matrix_units:
        from dcpjax.models.kernels.cpu import product_on_tiles

        name, kernel = "dcpjax_products_on_tiles", bind(product_on_tiles.kernel, threads)
        size = product_on_tiles.workspace_size
    else:
        from dcpjax.models.kernels.cpu import product

        name, kernel, size = f"dcpjax_products_{dtype}", bind(product.kernel, dtype, threads), product.workspace_size
    return Target(xla_call.register(name, kernel, threads), threads, size)
