"""Dataclasses of arrays that JAX's transformations take and give as trees."""

import dataclasses
from typing import Any, TypeVar, dataclass_transform

import jax

Class = TypeVar("Class", bound=type)


def static() -> Any:
    """A field that is no array: part of what a program is compiled for, like a shape."""
    return dataclasses.field(metadata={"static": True})


@dataclass_transform(frozen_default=True, field_specifiers=(static,))
def dataclass(cls: Class) -> Class:
    """Decorator: a frozen dataclass whose fields are arrays, or trees of arrays."""
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))
