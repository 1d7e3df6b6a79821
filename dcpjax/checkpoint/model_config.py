"""A model's config.json, with the user's changes, as a `ModelConfig`."""

from collections.abc import Mapping
from typing import Any

from dcpjax.models.config import ModelConfig, from_hf


def read_model_config(config: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> ModelConfig:
    """The sizes of a model.

    Args:
        config: the entries of config.json.
        overrides: entries to replace, as the option `hf_overrides`.

    Raises:
        ValueError: a family or an option of one that is not supported.
    """
    return from_hf(overridden(config, overrides or {}))


def overridden(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with entries replaced. Where old and new value are mappings, only the entries of the new one change."""
    merged = dict(config)
    for key, value in changes.items():
        old = merged.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            value = overridden(old, value)
        merged[key] = value
    return merged


def resolve_dtype(choice: str, config: ModelConfig) -> str:
    """The dtype of the weights: the user's choice, or for "auto" the checkpoint's, bfloat16 in place of float16."""
    if choice != "auto":
        return choice
    return "float32" if config.dtype == "float32" else "bfloat16"
