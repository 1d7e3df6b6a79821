"""One declaration per array: sizes, logical axes, dtype and initialiser.

Its padded shape, its sharding and its loader are derived from the `ArraySpec`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from functools import partial as bind
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout

from dcpjax.sharding.rules import Placement

# what a tree of arrays holds: a jax.Array, the ArraySpec that declares it, or its name in a checkpoint
Leaf = Any
Index = tuple[slice, ...]
Read = Callable[[Index], np.ndarray]


@dataclass(frozen=True)
class Axis:
    """One dimension: its size in the checkpoint and how it is padded and repeated to fit the mesh.

    The checkpoint's `size` entries are `groups` groups of equal size. Each group is padded at its end to a
    multiple of `multiple`, then stored `repeat` times:

        size=6 groups=2 multiple=2 repeat=1    0 1 2 -  3 4 5 -
        size=4 groups=2 multiple=1 repeat=2    0 1  0 1  2 3  2 3
    """

    size: int
    name: str | None = None
    groups: int = 1
    multiple: int = 1
    repeat: int = 1

    def __post_init__(self) -> None:
        if self.size % self.groups:
            raise ValueError(f"size must divide into groups={self.groups}, but is {self.size}")

    @property
    def group_size(self) -> int:
        """Entries of one group in the checkpoint."""
        return self.size // self.groups

    @property
    def padded_group_size(self) -> int:
        """Entries of one group on the mesh."""
        return -(-self.group_size // self.multiple) * self.multiple

    @property
    def padded(self) -> int:
        """Entries on the mesh."""
        return self.groups * self.repeat * self.padded_group_size

    @cached_property
    def source(self) -> np.ndarray:
        """int64 [padded]: index in the checkpoint of each entry on the mesh, -1 for padding."""
        entry = np.arange(self.padded)
        offset = entry % self.padded_group_size
        group = entry // (self.padded_group_size * self.repeat)
        return np.where(offset < self.group_size, group * self.group_size + offset, -1)


@dataclass(frozen=True, kw_only=True)
class ArraySpec:
    """An array on the mesh.

    `init`: its values if there is no checkpoint. `tpu_order`: its axes as a TPU's memory holds them, the fastest last.
    """

    axes: tuple[Axis, ...]
    dtype: Any
    init: Literal["normal", "ones", "zeros"] = "normal"
    tpu_order: tuple[int, ...] | None = None

    @property
    def checkpoint_shape(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(axis.padded for axis in self.axes)

    @property
    def names(self) -> tuple[str | None, ...]:
        return tuple(axis.name for axis in self.axes)

    def bytes_per_device(self, place: Placement) -> int:
        """Bytes of this array on each device."""
        shard = self.sharding(place).shard_shape(self.shape)
        return int(np.prod(shard)) * jnp.dtype(self.dtype).itemsize

    def sharding(self, place: Placement) -> jax.sharding.NamedSharding:
        """Raises ValueError when a padded size does not divide by its share of the mesh."""
        for axis in self.axes:
            ways = place.ways(axis.name)
            if axis.padded % ways:
                raise ValueError(
                    f"logical axis {axis.name!r} must divide by the {ways} devices it lies on, "
                    f"but has {axis.padded} entries"
                )
        return place.sharding(*self.names)

    def format(self, place: Placement) -> Format | jax.sharding.NamedSharding:
        """The sharding, with the order of the axes in memory if it is not the usual one. Raises like `sharding`."""
        sharding = self.sharding(place)
        if self.tpu_order is None or place.platform != "tpu":
            return sharding
        return Format(Layout(self.tpu_order), sharding)


def is_spec(leaf: Any) -> bool:
    return isinstance(leaf, ArraySpec)


def bytes_per_device(specs: Any, place: Placement) -> int:
    """Bytes that all arrays of tree `specs` take on each device, copies included."""
    return sum(spec.bytes_per_device(place) for spec in jax.tree.leaves(specs, is_leaf=is_spec))


def zeros(spec: ArraySpec, place: Placement) -> jax.Array:
    return _zeros(spec, spec.format(place))()


@lru_cache(maxsize=256)
def _zeros(spec: ArraySpec, where: Format | jax.sharding.NamedSharding) -> Callable[[], jax.Array]:
    """One program for all equal specs, such as the caches of all layers."""
    return jax.jit(bind(jnp.zeros, spec.shape, spec.dtype), out_shardings=where)


def load(spec: ArraySpec, place: Placement, read: Read) -> jax.Array:
    """Build the array from `read(index of the checkpoint's array) -> np.ndarray`.

    Only the part of each device is read for it; padding is filled with zeros.
    """

    def shard(index: Index | None) -> np.ndarray:
        return _read_padded(spec, index or (slice(None),) * len(spec.shape), read)

    return jax.make_array_from_callback(spec.shape, spec.format(place), shard)


def dummy(spec: ArraySpec, place: Placement, seed: int) -> jax.Array:
    """Random weights of a plausible magnitude, the same for every layout: entries depend on `seed` and position.

    Each device computes its own shard, so no device and no host ever stores more than that.
    """
    return _generator(spec, spec.format(place))(np.uint32(seed))


@lru_cache(maxsize=256)
def _generator(spec: ArraySpec, where: Format | jax.sharding.NamedSharding) -> Callable[[np.uint32], jax.Array]:
    """One program for all equal specs."""
    return jax.jit(bind(_entries, spec), out_shardings=where)


def _entries(spec: ArraySpec, seed: jax.Array) -> jax.Array:
    """Every entry on the mesh, computed from its position in the checkpoint; padding is zero."""
    if spec.init == "normal":
        bits = seed[(None,) * len(spec.axes)]
        for dim, axis in enumerate(spec.axes):
            bits = _mix(bits ^ _broadcast_along(dim, axis.source.astype(np.uint32), spec))
        values = _nearly_normal(bits) * np.float32(1.0 / np.sqrt(spec.checkpoint_shape[-1]))
    else:
        values = jnp.full((1,) * len(spec.axes), 1.0 if spec.init == "ones" else 0.0, jnp.float32)
    for dim, axis in enumerate(spec.axes):
        if (axis.source < 0).any():
            values = jnp.where(_broadcast_along(dim, axis.source >= 0, spec), values, 0.0)
    return jnp.broadcast_to(values, spec.shape).astype(spec.dtype)


def _broadcast_along(dim: int, entries: np.ndarray, spec: ArraySpec) -> jax.Array:
    """A vector of entries along one dimension, with size 1 in all others."""
    return jnp.asarray(entries).reshape([-1 if other == dim else 1 for other in range(len(spec.axes))])


def _mix(bits: jax.Array) -> jax.Array:
    """A 32-bit hash: each input bit changes about half of the output bits (MurmurHash3's finaliser)."""
    bits = (bits ^ (bits >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return bits ^ (bits >> np.uint32(16))


def _nearly_normal(bits: jax.Array) -> jax.Array:
    """32 random bits -> float32, nearly normal with mean 0 and deviation 1: the scaled sum of the four bytes."""
    total = sum((bits >> np.uint32(shift)) & np.uint32(255) for shift in (0, 8, 16, 24))
    deviation = np.sqrt(4 * (256**2 - 1) / 12)
    return (jnp.asarray(total, jnp.float32) - np.float32(510)) * np.float32(1 / deviation)


def _read_padded(spec: ArraySpec, index: Index, read: Read) -> np.ndarray:
    """The part `index` of the padded array, read from the checkpoint."""
    dtype = jnp.dtype(spec.dtype)
    sources = [axis.source[part] for axis, part in zip(spec.axes, index, strict=True)]
    spans = tuple(_span(source) for source in sources)
    values = np.asarray(read(spans)).astype(dtype, copy=False)
    for dim, (source, span) in enumerate(zip(sources, spans, strict=True)):
        if not _is_contiguous(source):
            values = _gather(values, source, span.start, dim)
    return np.ascontiguousarray(values)


def _span(source: np.ndarray) -> slice:
    """The shortest slice of the checkpoint that contains all entries of `source`."""
    real = source[source >= 0]
    return slice(0, 0) if real.size == 0 else slice(int(real.min()), int(real.max()) + 1)


def _is_contiguous(source: np.ndarray) -> bool:
    return source.size > 0 and source[0] >= 0 and bool(np.all(np.diff(source) == 1))


def _gather(values: np.ndarray, source: np.ndarray, start: int, dim: int) -> np.ndarray:
    """Entries `source` (counted from `start`) along `dim`; -1 becomes zero."""
    shape = list(values.shape)
    shape[dim] = source.size
    taken = np.zeros(shape, values.dtype)
    where = [slice(None)] * values.ndim
    where[dim] = np.flatnonzero(source >= 0)  # type: ignore[call-overload]
    taken[tuple(where)] = np.take(values, source[source >= 0] - start, axis=dim)
    return taken
