"""What a model consists of, from its configs and the headers of its files. No weight is read, no device is used."""

import difflib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dcpjax.api.sampling_params import SamplingParams
from dcpjax.checkpoint.gguf_header import GGUFHeader, read_header
from dcpjax.checkpoint.hub import ALIASES, HUB_ID, hub_error, hub_library, read_json
from dcpjax.checkpoint.model_config import resolve_dtype
from dcpjax.checkpoint.model_files import ModelFiles, open_model
from dcpjax.checkpoint.presets import PRESETS
from dcpjax.checkpoint.weight_files import SafetensorsSource
from dcpjax.models.config import ModelConfig, from_hf
from dcpjax.planning.sizes import ONE, block_bytes, weight_parts
from dcpjax.sharding.mesh import Layout, legal_layouts

BLOCK = 256  # tokens over which the cache's bytes are counted


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Number and bytes of the tensors of one dtype in the files."""

    tensors: int = 0
    bytes: int = 0

    def __add__(self, other: "Stored") -> "Stored":
        return Stored(tensors=self.tensors + other.tensors, bytes=self.bytes + other.bytes)


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    kind: str  # the file's own name for it, such as BPE
    size: int  # number of tokens, added tokens included
    chat_template: bool


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What is known about a model without reading its weights."""

    model: str
    config: ModelConfig
    stored: Mapping[str, Stored] | None  # by dtype; None: there are no weight files
    quantisation: str | None
    vocabulary: Vocabulary | None  # None: the model has no tokenizer
    generation: Mapping[str, Any]  # sampling parameters of generation_config.json
    end_tokens: Sequence[int]
    parameters: int
    parameters_per_token: int  # those that one token uses: of the experts, only those it is routed to
    kv_dtype: str  # what the engine would choose
    kv_bytes_per_token: int  # of all layers, for a single copy
    layouts: Mapping[int, Sequence[Layout]]  # number of devices -> legal layouts, by rising dcp


def inspect_model(model: str, devices: Sequence[int] = (1, 2, 4, 8)) -> Inspection:
    """Inspect a folder, a .gguf file, an alias, a preset or a hub id. Raises ValueError if there is no such model.

    For a hub id only JSON files, chat templates and the headers of the weight files are fetched.
    """
    is_hub = bool(HUB_ID.fullmatch(model)) and not os.path.exists(model)
    _check_known(model, is_hub)
    files = open_model(_hub_folder(model) if is_hub else model)
    raw, quantisation = _unquantised(files.config)
    config = from_hf(raw)
    header = read_header(files.path) if files.path.is_file() else None
    stored = _stored(files.path, header, model if is_hub else None)
    parameters, per_token = count_parameters(config)
    kv_dtype = resolve_dtype("auto", config)
    return Inspection(
        model=model,
        config=config,
        stored=stored,
        quantisation=quantisation or _gguf_quantisation(header, stored),
        vocabulary=_folder_vocabulary(files.path) if header is None else _gguf_vocabulary(header),
        generation=_generation(files),
        end_tokens=files.end_token_ids(_folder_eos(files.path) if header is None else None),
        parameters=parameters,
        parameters_per_token=per_token,
        kv_dtype=kv_dtype,
        kv_bytes_per_token=block_bytes(config, ONE, BLOCK, kv_dtype) // BLOCK,
        layouts={count: _layouts(count, config) for count in devices},
    )


def count_parameters(config: ModelConfig) -> tuple[int, int]:
    """(all parameters, those that one token uses)."""
    total, unused = 0, 0
    for (kind, spec), count in weight_parts(config, ONE, "bfloat16").items():
        size = count * math.prod(spec.checkpoint_shape)
        total += size
        if kind == "experts" and config.moe is not None:
            unused += size // config.moe.experts * (config.moe.experts - config.moe.experts_per_token)
    return total, total - unused


def _check_known(model: str, is_hub: bool) -> None:
    names = [*ALIASES, *PRESETS]
    if is_hub or model in names or os.path.exists(os.path.expanduser(model)):
        return
    near = difflib.get_close_matches(model.lower(), names, n=1)
    raise ValueError(
        f"the model must be a folder, a .gguf file, a hub id or one of {', '.join(names)}, but is {model!r}, which is "
        f"none; " + (f"did you mean {near[0]}?" if near else "check the path")
    )


def _layouts(devices: int, config: ModelConfig) -> list[Layout]:
    if config.mla is not None and config.num_heads % devices:  # latent attention needs whole heads on each device
        return []
    return legal_layouts(devices, config.num_heads, config.cache_heads)


def _unquantised(config: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """(config without its quantisation, description of the quantisation or None).

    Whether the engine can run the quantised weights is not checked.
    """
    text = config.get("text_config")
    if isinstance(text, dict):
        plain, found = _unquantised(text)
        config = config | {"text_config": plain}
    else:
        found = None
    quantised = config.get("quantization_config")
    if not isinstance(quantised, Mapping):
        return config, found
    parts = [str(quantised.get("quant_method", "unknown"))]
    if "bits" in quantised:
        parts.append(f"{quantised['bits']} bits")
    if "weight_block_size" in quantised:
        parts.append(f"a scale per {' x '.join(map(str, quantised['weight_block_size']))}")
    return {key: value for key, value in config.items() if key != "quantization_config"}, ", ".join(parts)


def _stored(path: Path, header: GGUFHeader | None, hub_id: str | None) -> dict[str, Stored] | None:
    if header is not None:
        return _total(_gguf_tensors(header))
    if any(path.glob("*.safetensors")):
        return _total(_safetensors(path))
    return _total(_hub_tensors(hub_id)) if hub_id else None


def _total(tensors: Iterable[tuple[str, int]]) -> dict[str, Stored]:
    """Sum up (dtype, bytes) of all tensors by dtype, the most bytes first."""
    found: dict[str, Stored] = {}
    for dtype, size in tensors:
        found[dtype] = found.get(dtype, Stored()) + Stored(tensors=1, bytes=size)
    return dict(sorted(found.items(), key=lambda entry: -entry[1].bytes))


def _safetensors(folder: Path) -> Iterable[tuple[str, int]]:
    source = SafetensorsSource(folder)
    for name in source.names():
        dtype = source.dtype(name)
        yield dtype.name, math.prod(source.shape(name)) * dtype.itemsize


def _gguf_tensors(header: GGUFHeader) -> Iterable[tuple[str, int]]:
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError as error:
        raise ValueError("a .gguf file's sizes need the gguf package; pip install 'dcpjax[gguf]'") from error
    known = {kind.value: kind for kind in GGMLQuantizationType}
    for tensor in header.tensors.values():
        if tensor.type not in known:
            raise ValueError(
                f"tensor {tensor.name} must be of a type that the gguf package knows, but is of type {tensor.type}; "
                "pip install --upgrade gguf"
            )
        kind = known[tensor.type]
        values, size = GGML_QUANT_SIZES[kind]
        yield kind.name, math.prod(tensor.shape) // values * size


def _gguf_quantisation(header: GGUFHeader | None, stored: Mapping[str, Stored] | None) -> str | None:
    """The type of most of the bytes, unless it is an ordinary float."""
    most = next(iter(stored or {}), "")
    return None if header is None or most in ("", "F32", "F16", "BF16", "F64") else most


def _hub_folder(name: str) -> str:
    """A local folder with a hub id's configs and tokenizer, and any weights that were fetched before."""
    hub = hub_library(name)
    try:
        return hub.snapshot_download(
            name, allow_patterns=["*.json", "*.jinja"], ignore_patterns=["*/*", "consolidated*"]
        )
    except Exception as error:
        raise hub_error(name, error) from error


def _hub_tensors(name: str) -> Iterable[tuple[str, int]]:
    """(dtype, bytes) of each tensor, from the headers alone, which the hub sends on their own."""
    hub = hub_library(name)
    try:
        metadata = hub.get_safetensors_metadata(name)
    except Exception as error:
        raise hub_error(name, error) from error
    for file in metadata.files_metadata.values():
        for tensor in file.tensors.values():
            yield tensor.dtype, tensor.data_offsets[1] - tensor.data_offsets[0]


def _folder_vocabulary(folder: Path) -> Vocabulary | None:
    path, names = folder / "tokenizer.json", folder / "tokenizer_config.json"
    if not path.exists():
        return None
    written, config = read_json(path), read_json(names) if names.exists() else {}
    model = written.get("model") or {}
    known = model.get("vocab") or ()
    pieces = {entry[0] for entry in known} if isinstance(known, list) else set(known)
    pieces |= {token.get("content") for token in written.get("added_tokens") or ()}
    template = bool(config.get("chat_template")) or (folder / "chat_template.jinja").exists()
    return Vocabulary(kind=model.get("type") or "BPE", size=len(pieces), chat_template=template)


def _gguf_vocabulary(header: GGUFHeader) -> Vocabulary | None:
    tokens = header.fields.get("tokenizer.ggml.tokens")
    if tokens is None:
        return None
    kind, pre_tokenizer = header.fields.get("tokenizer.ggml.model", "unknown"), header.fields.get("tokenizer.ggml.pre")
    return Vocabulary(
        kind=f"{kind}, {pre_tokenizer}" if pre_tokenizer else kind,
        size=len(tokens),
        chat_template="tokenizer.chat_template" in header.fields,
    )


def _generation(files: ModelFiles) -> dict[str, Any]:
    names = [field.name for field in fields(SamplingParams)]
    return {name: files.generation_config[name] for name in names if files.generation_config.get(name) is not None}


def _folder_eos(folder: Path) -> int | None:
    """The id of the end token that tokenizer_config.json names; a GGUF file's is in its config."""
    written = _optional_json(folder / "tokenizer.json")
    token = _optional_json(folder / "tokenizer_config.json").get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    added = {entry.get("content"): entry.get("id") for entry in written.get("added_tokens") or ()}
    known = (written.get("model") or {}).get("vocab")
    return added.get(token, known.get(token) if isinstance(known, dict) else None)


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}
