"""Reads the config of a model to plan: of a preset, a folder, a config.json, a .gguf file or a hub id.

No weights are read; for a hub id only config.json is fetched.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dcpjax.checkpoint.hub import ALIASES, HUB_ID, hub_error, hub_library, read_json
from dcpjax.checkpoint.model_config import overridden
from dcpjax.checkpoint.model_files import open_model
from dcpjax.checkpoint.presets import PRESETS
from dcpjax.models.config import ModelConfig, from_hf
from dcpjax.planning.options import PlanOptions

Model = str | os.PathLike[str] | Mapping[str, Any]


def read_config(model: Model, choice: PlanOptions) -> ModelConfig:
    """The model's config with `hf_overrides` applied. Raises ValueError if there is no such model."""
    config = overridden(_raw_config(model), choice.hf_overrides or {})
    for holder in (config, config.get("text_config")):
        if isinstance(holder, dict) and isinstance(holder.get("quantization_config"), Mapping):
            _remove_quantisation(holder, choice.dtype)
    return from_hf(config)


def _remove_quantisation(config: dict[str, Any], dtype: str) -> None:
    """An explicit dtype replaces the checkpoint's quantisation; "auto" accepts only fp8, which the engine reads."""
    method = config["quantization_config"].get("quant_method")
    if dtype != "auto":
        del config["quantization_config"]
    elif method != "fp8":
        raise ValueError(
            f"dtype must be named where the checkpoint is quantised with {method!r}, which the engine cannot run, "
            'but is "auto"; use dtype=nvfp4, dtype=fp8 or dtype=bfloat16'
        )


def _raw_config(model: Model) -> Mapping[str, Any]:
    if isinstance(model, Mapping):
        return {key: dict(value) if isinstance(value, Mapping) else value for key, value in model.items()}
    name = os.fspath(model)
    if name.endswith(".json"):
        return read_json(Path(name))
    if HUB_ID.fullmatch(name) and not os.path.exists(name):
        return read_json(_fetched_config(name))
    if not os.path.exists(os.path.expanduser(name)) and name not in {*PRESETS, *ALIASES}:
        raise ValueError(
            f"model must be a preset ({', '.join(PRESETS)}), a folder with config.json, a .gguf file or a hub id, "
            f"but is {name!r}, which is none"
        )
    return open_model(model).config


def _fetched_config(name: str) -> Path:
    hub = hub_library(name)
    try:
        return Path(hub.hf_hub_download(name, "config.json"))
    except Exception as error:
        kinds = f"a preset ({', '.join(PRESETS)}), a local path or a model on the hub"
        raise hub_error(name, error, what="its config.json", kinds=kinds) from error
