"""Filling a model's declared weights from a checkpoint, each device reading only its slice, or at random.

Knows specs and tensor sources; knows nothing about file formats or families.
"""

from typing import Any

import jax
import numpy as np

from dcpjax.progress import bar
from dcpjax.sharding import arrays
from dcpjax.sharding.arrays import ArraySpec, is_spec
from dcpjax.sharding.rules import Placement
from dcpjax.weight_files import TensorSource


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


def _check(spec: ArraySpec, name: str, source: TensorSource) -> None:
    found = source.shape(name)  # raises for a missing tensor
    if tuple(found) != spec.checkpoint_shape:
        raise ValueError(
            f"tensor {name} must have shape {spec.checkpoint_shape} by config.json, but has {tuple(found)}"
        )


def _load(spec: ArraySpec, name: str, source: TensorSource, place: Placement) -> jax.Array:
    return arrays.load(spec, place, lambda index: source.read(name, index))


def dummy_weights(specs: Any, place: Placement, seed: int) -> Any:
    """Random arrays of tree `specs`, the same for every layout."""
    leaves, structure = jax.tree.flatten(specs, is_leaf=is_spec)
    seeds = np.random.SeedSequence(seed).generate_state(len(leaves))
    return structure.unflatten([arrays.dummy(spec, place, int(own)) for spec, own in zip(leaves, seeds, strict=True)])
