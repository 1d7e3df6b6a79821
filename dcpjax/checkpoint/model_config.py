"""From a checkpoint's config.json and the user's changes to it to the model's numbers."""

from collections.abc import Mapping
from typing import Any

from dcpjax.models.config import ModelConfig, from_hf


def read_model_config(config: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> ModelConfig:
    """Parse a config with `hf_overrides` applied. Raises ValueError naming a key that is missing or not supported."""
    return from_hf(overridden(config, overrides or {}))


def overridden(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with entries replaced; a mapping changes only the entries it names."""
    merged = dict(config)
    for key, value in changes.items():
        old = merged.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            value = overridden(old, value)
        merged[key] = value
    return merged


def resolve_dtype(choice: str, config: ModelConfig) -> str:
    """The weights' dtype: the user's choice, or the checkpoint's with float16 read as bfloat16."""
    if choice != "auto":
        return choice
    return "float32" if config.dtype == "float32" else "bfloat16"
