"""Opens a model: its configs as data, its tensors and its tokenizer on demand.

No code from a checkpoint is run: `auto_map` of a config is ignored.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dcpjax.api.checks import MAX_TOKEN_ID, is_integer
from dcpjax.checkpoint.fp8_source import Block, Fp8Source, fp8_block
from dcpjax.checkpoint.gguf_config import gguf_config
from dcpjax.checkpoint.gguf_source import GGUFSource
from dcpjax.checkpoint.gguf_tokenizer import has_tokenizer
from dcpjax.checkpoint.hub import read_json, resolve_model
from dcpjax.checkpoint.presets import PRESETS
from dcpjax.checkpoint.tokenizer import Tokenizer
from dcpjax.checkpoint.weight_files import SafetensorsSource, TensorSource
from dcpjax.models.config_values import shown


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """One model on disk."""

    # The folder or the .gguf file.
    path: Path
    # config.json as Hugging Face writes it.
    config: dict[str, Any]
    # generation_config.json; empty if there is none.
    generation_config: dict[str, Any]
    # Opens the weights: nothing is read before the call.
    tensors: Callable[[], TensorSource]
    # None where the model comes without a tokenizer.
    tokenizer: Callable[[], Tokenizer | None]

    def end_token_ids(self, tokenizer_eos: int | None) -> list[int]:
        """The tokens that end a text: all that generation_config.json, config.json or the tokenizer name.

        A chat model often keeps the generation_config.json of its base model, which lacks the token that ends a turn.
        """
        sources = [self.generation_config, self.config, _text_config(self.config)]
        named = [token for source in sources for token in _listed(source.get("eos_token_id"))]
        return list(dict.fromkeys(named if tokenizer_eos is None else [*named, tokenizer_eos]))


def open_model(model: str | os.PathLike[str]) -> ModelFiles:
    """The files of a folder, a `.gguf` file, an alias, a hub id or a preset. ValueError if they make no model."""
    name = os.fspath(model)
    if name in PRESETS and not Path(name).exists():
        return _open_preset(name)
    path = resolve_model(model)
    return _open_gguf(path) if path.is_file() else _open_folder(path)


def open_tokenizer(name: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a folder, a `.gguf` file, an alias or a hub id. Raises ValueError if there is none."""
    path = resolve_model(name)
    found = _gguf_tokenizer(path) if path.is_file() else _folder_tokenizer(path)
    if found is None:
        raise ValueError(f"tokenizer must name a folder with tokenizer.json or a .gguf file, but {path} has none")
    return found


def _open_preset(name: str) -> ModelFiles:
    """A published config without files, for random weights and for planning."""

    def tensors() -> TensorSource:
        raise ValueError(
            f'{name} is a preset, numbers without weights: load_format must be "dummy", but is "auto"; '
            "or pass the folder or hub id of a checkpoint"
        )

    return ModelFiles(
        path=Path(name), config=dict(PRESETS[name]), generation_config={}, tensors=tensors, tokenizer=lambda: None
    )


def _open_gguf(path: Path) -> ModelFiles:
    config = gguf_config(path)
    return ModelFiles(
        path=path,
        config=config,
        generation_config={key: config[key] for key in ("bos_token_id", "eos_token_id") if key in config},
        tensors=partial(GGUFSource, path),
        tokenizer=partial(_gguf_tokenizer, path),
    )


def _gguf_tokenizer(path: Path) -> Tokenizer | None:
    return Tokenizer.from_gguf(path) if has_tokenizer(path) else None


def _open_folder(folder: Path) -> ModelFiles:
    config = _config(folder)
    generation_config = _optional_json(folder / "generation_config.json")
    _check_token_ids(config, "config.json")
    _check_token_ids(_text_config(config), "config.json: text_config")
    _check_token_ids(generation_config, "generation_config.json")
    return ModelFiles(
        path=folder,
        config=config,
        generation_config=generation_config,
        tensors=partial(_folder_tensors, folder, fp8_block(config)),
        tokenizer=partial(_folder_tokenizer, folder),
    )


def _folder_tensors(folder: Path, block: Block | None) -> TensorSource:
    source = SafetensorsSource(folder)
    return source if block is None else Fp8Source(source, block)


def _folder_tokenizer(folder: Path) -> Tokenizer | None:
    return Tokenizer.from_folder(folder) if (folder / "tokenizer.json").exists() else None


def _config(folder: Path) -> dict[str, Any]:
    if (folder / "config.json").exists():
        return read_json(folder / "config.json")
    inside = next(iter(sorted(folder.glob("*.gguf"))), None)
    hint = f"pass the file {inside} instead" if inside else "pass the folder that a model was saved to"
    raise ValueError(f"the model folder {folder} must hold config.json, but does not; {hint}")


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a multimodal model's config that is about text."""
    part = config.get("text_config")
    return part if isinstance(part, dict) else {}


def _listed(value: Any) -> list[int]:
    return [] if value is None else value if isinstance(value, list) else [value]


def _check_token_ids(entries: dict[str, Any], file: str) -> None:
    for key in ("bos_token_id", "eos_token_id"):
        value = entries.get(key)
        if not all(is_integer(token_id) and 0 <= token_id <= MAX_TOKEN_ID for token_id in _listed(value)):
            raise ValueError(f"{file}: {key} must be a token id or a list of them, but is {shown(value)}")
