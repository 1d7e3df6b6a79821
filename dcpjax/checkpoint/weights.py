"""Fills a model's declared weights from a checkpoint, of which each device reads only its slice, or at random."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from dcpjax.api.progress import bar
from dcpjax.checkpoint.weight_files import TensorSource
from dcpjax.models.checkpoint_names import HeadRows, Name, Stack
from dcpjax.sharding import arrays
from dcpjax.sharding.arrays import ArraySpec, is_spec
from dcpjax.sharding.rules import Placement


def load_weights(specs: Any, names: Any, source: TensorSource, place: Placement, *, progress: bool = False) -> Any:
    """Arrays of tree `specs`, read by the tensor names in the equal tree `names`.

    Raises ValueError naming the first tensor that is missing or has another shape, before anything is read.
    """
    leaves, structure = jax.tree.flatten(specs, is_leaf=is_spec)
    tensors = structure.flatten_up_to(names)
    for spec, name in zip(leaves, tensors, strict=True):
        _check(spec, name, source)
    pairs = bar(list(zip(leaves, tensors, strict=True)), description="loading weights", shown=progress)
    return structure.unflatten([_load(spec, name, source, place) for spec, name in pairs])


def _check(spec: ArraySpec, name: Name, source: TensorSource) -> None:
    for tensor, shape in _tensors(spec, name):
        found = tuple(source.shape(tensor))  # raises for a missing tensor
        if found != shape:
            raise ValueError(f"tensor {tensor} must have shape {shape} by config.json, but has {found}")


def _tensors(spec: ArraySpec, name: Name) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors that an array is read from, and the shape each must have."""
    shape = spec.checkpoint_shape
    match name:
        case str():
            yield name, shape
        case Stack(tensors):
            yield from ((tensor, shape[1:]) for tensor in tensors)
        case HeadRows(tensor, rows):
            yield tensor, (shape[0] * rows, shape[2])


def _load(spec: ArraySpec, name: Name, source: TensorSource, place: Placement) -> jax.Array:
    return arrays.load(spec, place, lambda index: read(source, name, index))


def read(source: TensorSource, name: Name, index: tuple[slice, ...]) -> np.ndarray:
    """The part `index` of an array, wherever it lies in the checkpoint. Slices have a start and a stop."""
    match name:
        case str():
            return source.read(name, index)
        case Stack(tensors):
            parts = [source.read(tensor, index[1:]) for tensor in tensors[index[0]]]
            return np.stack(parts) if parts else np.zeros((0, *_lengths(index[1:])), np.float32)
        case HeadRows(tensor, rows, start, _):
            heads, own, columns = index
            whole = source.read(tensor, (slice(heads.start * rows, heads.stop * rows), columns))
            return whole.reshape(-1, rows, whole.shape[-1])[:, start + own.start : start + own.stop]


def _lengths(index: tuple[slice, ...]) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in index)


def dummy_weights(specs: Any, place: Placement, seed: int) -> Any:
    """Random arrays of tree `specs`, the same for every layout."""
    leaves, structure = jax.tree.flatten(specs, is_leaf=is_spec)
    seeds = np.random.SeedSequence(seed % 2**64).generate_state(len(leaves))
    return structure.unflatten([arrays.dummy(spec, place, int(own)) for spec, own in zip(leaves, seeds, strict=True)])
