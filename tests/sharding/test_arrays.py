from typing import Any

import jax
import numpy as np
import pytest
from abstract_arrays import abstract_tree
from hypothesis import given
from hypothesis import strategies as st

from dcpjax.sharding.arrays import ArraySpec, Axis, dummy, load, zeros
from dcpjax.sharding.mesh import Layout, make_mesh
from dcpjax.sharding.rules import Placement

AXES = st.builds(
    lambda run, groups, multiple, repeat: Axis(run * groups, None, groups, multiple, repeat),
    st.integers(1, 7),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 3),
)


def place(devices: int, dcp: int) -> Placement:
    return Placement(make_mesh(Layout(tensor_parallel_size=devices, decode_context_parallel_size=dcp)))


def naive_source(axis: Axis) -> list[int]:
    """Group by group: its entries, padding up to a multiple, and all of that `repeat` times."""
    source: list[int] = []
    run = axis.size // axis.groups
    for group in range(axis.groups):
        entries = list(range(group * run, (group + 1) * run))
        while len(entries) % axis.multiple:
            entries.append(-1)
        source += entries * axis.repeat
    return source


@given(AXES)
def test_source_names_the_entry_behind_each_place(axis):
    assert axis.source.tolist() == naive_source(axis)
    assert axis.padded == len(naive_source(axis))


@given(AXES)
def test_an_axis_has_its_size_and_one_copy_exactly_when_nothing_moves(axis):
    assert (axis.padded == axis.size and axis.repeat == 1) == (naive_source(axis) == list(range(axis.size)))


def test_axis_looks_like_its_drawing():
    assert Axis(6, groups=2, multiple=2).source.tolist() == [0, 1, 2, -1, 3, 4, 5, -1]
    assert Axis(4, groups=2, repeat=2).source.tolist() == [0, 1, 0, 1, 2, 3, 2, 3]


def test_a_size_that_does_not_fall_into_groups_is_refused():
    with pytest.raises(ValueError, match="size must divide into groups=3, but is 8"):
        Axis(8, groups=3)


def test_specs_know_their_shapes_names_and_bytes():
    spec = ArraySpec(axes=(Axis(6, "heads", groups=2, multiple=4), Axis(5)), dtype="bfloat16")
    assert spec.checkpoint_shape == (6, 5)
    assert spec.shape == (8, 5)
    assert spec.names == ("heads", None)
    assert spec.bytes_per_device(place(4, 2)) == 2 * 5 * 2
    assert ArraySpec(axes=(Axis(8, "kv_heads"), Axis(5)), dtype="float32").bytes_per_device(place(4, 2)) == 4 * 5 * 4


def test_abstract_tree_carries_shapes_dtypes_and_shardings():
    pool = place(8, 4)
    spec = ArraySpec(axes=(Axis(6, "heads", groups=2, multiple=4), Axis(5)), dtype="bfloat16")
    tree = abstract_tree({"weight": spec, "none": None}, pool)
    assert tree["none"] is None
    assert tree["weight"].shape == (8, 5)
    assert tree["weight"].dtype == jax.numpy.bfloat16
    assert tree["weight"].sharding == pool.sharding("heads", None)


def test_zeros_are_made_where_they_belong():
    pool = place(8, 4)
    spec = ArraySpec(axes=(Axis(3), Axis(4, "kv_context"), Axis(2, "kv_heads")), dtype="uint16", init="zeros")
    array = zeros(spec, pool)
    assert array.sharding.is_equivalent_to(pool.sharding(None, "kv_context", "kv_heads"), 3)
    assert {shard.data.shape for shard in array.addressable_shards} == {(3, 1, 1)}
    assert array.dtype == np.uint16
    assert not np.asarray(array).any()


LOADS = [
    pytest.param(8, 8, (Axis(16, "ffn"), Axis(3)), id="plain"),
    pytest.param(8, 8, (Axis(3), Axis(18, "ffn", multiple=8)), id="padded at the end"),
    pytest.param(8, 4, (Axis(12, "heads", groups=2, multiple=4), Axis(3)), id="each group padded"),
    pytest.param(8, 2, (Axis(6, "kv_heads", groups=2, repeat=2), Axis(2)), id="KV heads stored twice"),
    pytest.param(8, 1, (Axis(3, "kv_heads", groups=1, repeat=8),), id="one KV head on every device"),
    pytest.param(8, 8, (Axis(3, "vocab", multiple=8), Axis(2)), id="devices that hold only padding"),
    pytest.param(4, 2, (Axis(2), Axis(2, "kv_context"), Axis(4, "kv_heads"), Axis(2)), id="two sharded axes"),
    pytest.param(2, 2, (Axis(5), Axis(4)), id="replicated"),
]


class RecordingReader:
    """A checkpoint's array that records which slices are read."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.values = np.arange(1, np.prod(shape) + 1, dtype=np.float32).reshape(shape)
        self.asked: list[tuple[slice, ...]] = []

    def __call__(self, index: tuple[slice, ...]) -> np.ndarray:
        self.asked.append(index)
        return self.values[index]


def padded(values: np.ndarray, axes: tuple[Axis, ...]) -> np.ndarray:
    """The whole array as it should be on the mesh."""
    for dim, axis in enumerate(axes):
        extended = np.concatenate([values, np.zeros_like(values).take([0], dim)], dim)
        values = extended.take(naive_source(axis), dim)  # -1 takes the zeros at the end
    return values


def held(axes: tuple[Axis, ...], index: tuple[slice, ...]) -> tuple[tuple[int, int], ...]:
    """First and last checkpoint entry, per dimension, that a device holding `index` needs; (0, 0) for none."""
    spans = []
    for axis, part in zip(axes, index, strict=True):
        entries = [entry for entry in naive_source(axis)[part] if entry >= 0]
        spans.append((min(entries), max(entries) + 1) if entries else (0, 0))
    return tuple(spans)


@pytest.mark.parametrize(("devices", "dcp", "axes"), LOADS)
def test_load_gives_each_device_exactly_its_entries(devices, dcp, axes):
    spec, pool = ArraySpec(axes=axes, dtype="float32"), place(devices, dcp)
    reader = RecordingReader(spec.checkpoint_shape)
    array = load(spec, pool, reader)
    expected = padded(reader.values, axes)
    assert array.sharding == spec.sharding(pool)
    assert len(array.addressable_shards) == devices
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(shard.data, expected[shard.index])


@pytest.mark.parametrize(("devices", "dcp", "axes"), LOADS)
def test_load_asks_for_the_slices_that_devices_hold_and_nothing_more(devices, dcp, axes):
    spec, pool = ArraySpec(axes=axes, dtype="float32"), place(devices, dcp)
    reader = RecordingReader(spec.checkpoint_shape)
    array = load(spec, pool, reader)
    asked = {tuple((part.start, part.stop) for part in index) for index in reader.asked}
    assert asked == {held(axes, shard.index) for shard in array.addressable_shards}


def test_devices_that_split_an_array_read_each_entry_once():
    spec, pool = ArraySpec(axes=(Axis(18, "ffn", multiple=8), Axis(4)), dtype="float32"), place(8, 2)
    reader = RecordingReader(spec.checkpoint_shape)
    load(spec, pool, reader)
    assert sum(reader.values[index].size for index in reader.asked) == reader.values.size


def test_load_converts_to_the_declared_dtype():
    spec, pool = ArraySpec(axes=(Axis(8, "ffn"),), dtype="bfloat16"), place(8, 8)
    array = load(spec, pool, RecordingReader((8,)))
    assert array.dtype == jax.numpy.bfloat16
    np.testing.assert_array_equal(np.asarray(array, np.float32), np.arange(1, 9, dtype=np.float32))


LAYOUTS = [(1, 1), (2, 2), (4, 2), (8, 1), (8, 4), (8, 8)]


def query_spec(pool: Placement, init: Any = "normal") -> ArraySpec:
    """Like a query projection of 8 heads of 3 features, whose groups are padded differently on every layout."""
    return ArraySpec(axes=(Axis(24, "query", groups=pool.tp, multiple=pool.dcp), Axis(5)), dtype="float32", init=init)


def entries(array: jax.Array, spec: ArraySpec) -> np.ndarray:
    """The checkpoint's entries without padding and copies; asserts that padding is zero and copies are equal."""
    values = np.asarray(array)
    for dim, axis in enumerate(spec.axes):
        source = np.array(naive_source(axis))
        assert not values.take(np.flatnonzero(source < 0), dim).any()
        first = [int(np.flatnonzero(source == entry)[0]) for entry in range(axis.size)]
        np.testing.assert_array_equal(
            values.take(np.flatnonzero(source >= 0), dim), values.take(first, dim).take(source[source >= 0], dim)
        )
        values = values.take(first, dim)
    return values


@pytest.mark.parametrize(("devices", "dcp"), LAYOUTS)
def test_dummy_weights_are_the_same_on_every_layout(devices, dcp):
    one, pool = place(1, 1), place(devices, dcp)
    array = dummy(query_spec(pool), pool, seed=7)
    assert array.sharding == query_spec(pool).sharding(pool)
    np.testing.assert_array_equal(entries(array, query_spec(pool)), np.asarray(dummy(query_spec(one), one, seed=7)))


def test_copied_dummy_heads_are_equal_on_every_layout():
    axes = (Axis(6, "kv_heads", groups=2, repeat=4), Axis(5))
    spec, pool = ArraySpec(axes=axes, dtype="float32"), place(8, 1)
    once, one = ArraySpec(axes=(Axis(6, "kv_heads"), Axis(5)), dtype="float32"), place(1, 1)
    np.testing.assert_array_equal(entries(dummy(spec, pool, seed=3), spec), np.asarray(dummy(once, one, seed=3)))


def test_dummy_weights_depend_on_the_seed_and_are_of_a_plausible_size():
    one = place(1, 1)
    spec = ArraySpec(axes=(Axis(64), Axis(16)), dtype="float32")
    first, second = np.asarray(dummy(spec, one, seed=1)), np.asarray(dummy(spec, one, seed=2))
    assert not np.array_equal(first, second)
    assert 0.2 < first.std() < 0.3  # 1 / sqrt(16)


@pytest.mark.parametrize(("init", "value"), [("ones", 1.0), ("zeros", 0.0)])
def test_dummy_norms_and_biases_are_constant(init, value):
    pool = place(8, 4)
    spec = query_spec(pool, init)
    assert (entries(dummy(spec, pool, seed=0), spec) == value).all()
