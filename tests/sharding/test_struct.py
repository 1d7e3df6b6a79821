"""Dataclasses of arrays are trees to JAX; their static fields are part of what is compiled."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from dcpjax.sharding import struct


@struct.dataclass
class Window:
    values: jax.Array | None
    start: jax.Array
    size: int = struct.static()


def window(size: int = 2) -> Window:
    return Window(jnp.arange(5.0), jnp.int32(1), size)


def test_the_arrays_are_the_leaves_in_the_order_of_the_fields() -> None:
    leaves, structure = jax.tree.flatten(window())
    assert [leaf.shape for leaf in leaves] == [(5,), ()]
    assert jax.tree.unflatten(structure, [None, 7]) == Window(None, 7, 2)  # type: ignore[arg-type]
    assert len(jax.tree.leaves(dataclasses.replace(window(), values=None))) == 1


def test_another_static_value_is_traced_again_and_other_arrays_are_not() -> None:
    traced = []

    @jax.jit
    def cut(one: Window) -> jax.Array:
        traced.append(one.size)
        assert one.values is not None
        return jax.lax.dynamic_slice_in_dim(one.values, one.start, one.size)

    for size in (2, 2, 3):
        assert cut(window(size)).shape == (size,)
    assert traced == [2, 3]


def test_fields_cannot_be_set() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        window().size = 3  # type: ignore[misc]
