"""Fills a model's declared weights from a checkpoint, of which each device reads only its slice, or at random."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from dcpjax.api.progress import bar
from dcpjax.checkpoint.weight_files import TensorSource
from dcpjax.models.checkpoint_names import HeadRows, Name, Stack, embedding_name, head_name, known_leftovers
from dcpjax.models.config import ModelConfig
from dcpjax.sharding import arrays
from dcpjax.sharding.arrays import ArraySpec, is_spec
from dcpjax.sharding.rules import Placement

COMPARED_ROWS = 64  # of a stored head with the embedding that it must equal


def load_weights(
    config: ModelConfig, specs: Any, names: Any, source: TensorSource, place: Placement, *, progress: bool = False
) -> Any:
    """Arrays of tree `specs`, read by the tensor names in the equal tree `names`.

    Raises ValueError before anything is loaded, as `check_tensors`.
    """
    check_tensors(config, specs, names, source)
    leaves, structure = jax.tree.flatten(specs, is_leaf=is_spec)
    pairs = list(zip(leaves, structure.flatten_up_to(names), strict=True))
    pairs = bar(pairs, description="loading weights", shown=progress)
    return structure.unflatten([_load(spec, name, source, place) for spec, name in pairs])


def check_tensors(config: ModelConfig, specs: Any, names: Any, source: TensorSource) -> None:
    """Raise ValueError naming the first tensor that is missing, has another shape, or that nothing would read."""
    leaves, structure = jax.tree.flatten(specs, is_leaf=is_spec)
    pairs = zip(leaves, structure.flatten_up_to(names), strict=True)
    wanted = {tensor: shape for spec, name in pairs for tensor, shape in _tensors(spec, name)}
    for tensor, shape in wanted.items():
        found = tuple(source.shape(tensor))  # raises for a missing tensor
        if found != shape:
            raise ValueError(f"tensor {tensor} must have shape {shape} by config.json, but has {found}")
    present = source.names()
    unread = set(present) - wanted.keys() - known_leftovers(present, config)
    if unread:
        raise ValueError(
            f"config.json must describe a model that has every tensor of the weights, but nothing reads {min(unread)}"
            + (f" and {len(unread) - 1} more" if len(unread) > 1 else "")
            + f" ({config.num_layers} layers of {config.family}); use the config.json that belongs to these weights"
        )
    if config.tie_word_embeddings and head_name(config) in present:
        _check_tied(config, source)


def _check_tied(config: ModelConfig, source: TensorSource) -> None:
    """A stored head must be the embedding that takes its place: rows all over it are compared."""
    head, embedding = head_name(config), embedding_name(config)
    rows = source.shape(embedding)[0]
    is_same = source.shape(head) == source.shape(embedding) and all(
        np.array_equal(source.read(head, part), source.read(embedding, part), equal_nan=True)
        for row in range(0, rows, -(-rows // COMPARED_ROWS))
        for part in [(slice(row, row + 1), slice(None))]
    )
    if not is_same:
        raise ValueError(
            f"config.json: tie_word_embeddings must be false where {head} is not {embedding}, but is true; use "
            'hf_overrides with "tie_word_embeddings" false'
        )


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
