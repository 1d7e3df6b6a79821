"""`dot` of a few rows with a kernel for CPUs, which reads weights as fast as memory gives them.

XLA's CPU backend packs the weights anew in each call and gets a third of that. Needs Numba and one device that has
the CPU to itself.
"""

from functools import cache as once

import jax
import jax.numpy as jnp
import numpy as np

from dcpjax.models import numba_here
from dcpjax.models.numba_here import LANES

# from there on XLA is faster, in bfloat16 by the CPU's matrix units
MOST_ROWS = {jnp.dtype(jnp.bfloat16): 8, jnp.dtype(jnp.float32): 32}


def suits(x: jax.Array, weight: jax.Array) -> bool:
    """Whether kernels can be called here and this one takes arrays like these."""
    few = x.shape[0] <= MOST_ROWS.get(weight.dtype, 0)
    return few and x.shape[1] % LANES == 0 and numba_here.available()


def few_rows_dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [N, I] float32, weight [O, I] -> [N, O] float32; x is rounded to the dtype of the weight, as in `dot`."""
    if weight.dtype == jnp.bfloat16:
        x = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)  # two conversions would be optimised away
    result = jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), jnp.float32)
    return jax.ffi.ffi_call(_target(weight.dtype == jnp.bfloat16), result)(x, weight)


@once
def _target(bfloat16: bool) -> str:
    """Name of the custom call for weights of this dtype, compiled and registered at its first use."""
    from dcpjax.models import numba_call, numba_product  # take a second

    name = f"dcpjax_product_{'bfloat16' if bfloat16 else 'float32'}"
    stored = np.dtype(np.uint16 if bfloat16 else np.float32)
    numba_call.register(name, numba_product.kernel(stored, numba_call.threads_are_safe()))
    return name
