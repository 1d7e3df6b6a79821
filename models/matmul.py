"""The matrix product of models and attention: operands in their stored dtype, sums in float32."""

import jax
import jax.numpy as jnp


def matmul(left: jax.Array, right: jax.Array, axes: tuple[int, int], *, batched: bool = False) -> jax.Array:
    """Sum over axis `axes[0]` of `left` times axis `axes[1]` of `right`, in float32; both have the same dtype.

    `batched`: the first axis of both counts pairs of matrices. It must be the first: XLA's CPU backend does not
    implement other batch axes for bfloat16. float32 operands are not rounded to tf32 or bfloat16. With
    `preferred_element_type`, bfloat16 operands are not converted to float32 in memory before they are multiplied.
    """
    batch = (0,) if batched else ()
    return jax.lax.dot_general(
        left,
        right,
        (((axes[0],), (axes[1],)), (batch, batch)),
        precision=jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def grouped_matmul(left: jax.Array, right: jax.Array, counts: jax.Array) -> jax.Array:
    """Rows of `left` times the matrix of their group, in float32: left [P, in], right [G, out, in] -> [P, out].

    The first counts[0] rows are of group 0, the next counts[1] of group 1; what comes after all groups is undefined.
    """
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
    )
    return jax.lax.ragged_dot_general(
        left,
        right,
        counts,
        numbers,
        precision=jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
