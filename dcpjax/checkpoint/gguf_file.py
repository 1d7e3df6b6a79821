"""Reads a GGUF file as if it were a Hugging Face checkpoint: config, tensor names and tensor values.

Knows the file format and llama.cpp's conventions for the dense Llama and Qwen families; knows nothing about
devices. The header is read here, because the `gguf` package takes seconds over a large vocabulary; it only
dequantises.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dcpjax.checkpoint.weight_files import missing_tensor

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
ROPE_FACTORS = "rope_freqs.weight"

# Value types of the metadata, by their number in the file, as struct codes; 8 is a string, 9 an array.
SCALARS = dict(enumerate(("B", "b", "H", "h", "I", "i", "f", "?"))) | {10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MAX_DIMENSIONS = 8

# Tensor types that need no dequantising, by their number in the file.
PLAIN_TYPES = {
    0: np.dtype(np.float32),
    1: np.dtype(np.float16),
    24: np.dtype(np.int8),
    25: np.dtype(np.int16),
    26: np.dtype(np.int32),
    27: np.dtype(np.int64),
    28: np.dtype(np.float64),
    30: np.dtype(ml_dtypes.bfloat16),
}

MODULES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True, kw_only=True)
class GGUFTensor:
    """One line of the tensor table."""

    name: str
    # Outermost dimension first, as in numpy; the file has it last.
    shape: tuple[int, ...]
    type: int
    # Bytes from the start of the file.
    begin: int


@dataclass(frozen=True, kw_only=True)
class GGUFHeader:
    """Everything in a GGUF file except the values of its tensors."""

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    def require(self, key: str) -> Any:
        if key not in self.fields:
            raise ValueError(f"{self.path} must hold the metadata key {key}, but does not; convert the model again")
        return self.fields[key]

    @property
    def architecture(self) -> str:
        name = self.require("general.architecture")
        if name not in ARCHITECTURES:
            raise ValueError(
                f"the architecture of {self.path} must be one of {', '.join(ARCHITECTURES)}, but is "
                f"{name!r}; use the model's safetensors instead"
            )
        return name


def read_header(path: Path) -> GGUFHeader:
    """Metadata and tensor table. Raises ValueError if the file is no GGUF file or ends too early."""
    try:
        return _Cursor(path).header()
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError, struct.error) as error:
        raise ValueError(f"{path} must be a whole GGUF file, but is not: {error}; fetch it again") from error


class _Cursor:
    """Walks the header once, from front to back; every length is checked against the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 0

    def header(self) -> GGUFHeader:
        if self._take(4) != b"GGUF":
            raise ValueError("it does not begin with the letters GGUF")
        if (version := self._scalar("I")) not in (2, 3):
            raise ValueError(f"its version is {version}, and only little-endian 2 and 3 are known")
        tensor_count, field_count = self._scalar("Q"), self._scalar("Q")
        fields = {self._text(): self._value(self._scalar("I")) for _ in range(field_count)}
        table = [(self._text(), self._shape(), self._scalar("I"), self._scalar("Q")) for _ in range(tensor_count)]
        alignment = fields.get("general.alignment", 32)
        start = math.ceil(self._at / alignment) * alignment
        tensors = {
            name: GGUFTensor(name=name, shape=shape, type=kind, begin=start + offset)
            for name, shape, kind, offset in table
        }
        return GGUFHeader(path=self._path, fields=fields, tensors=tensors)

    def _take(self, count: int) -> bytes:
        if count > len(self._bytes) - self._at:
            raise ValueError(f"its header ends early, at byte {len(self._bytes)}")
        self._at += count
        return self._bytes[self._at - count : self._at]

    def _scalar(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))[0]

    def _text(self) -> str:
        return self._take(self._scalar("Q")).decode("utf-8")

    def _shape(self) -> tuple[int, ...]:
        if (count := self._scalar("I")) > MAX_DIMENSIONS:
            raise ValueError(f"a tensor has {count} dimensions")
        return tuple(self._scalar("Q") for _ in range(count))[::-1]

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._text()
        if kind == ARRAY:
            return self._array(self._scalar("I"), self._scalar("Q"))
        return self._scalar(SCALARS[kind])

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind in SCALARS:
            dtype = np.dtype(SCALARS[kind]).newbyteorder("<")
            return np.frombuffer(self._take(count * dtype.itemsize), dtype).tolist()
        return [self._value(kind) for _ in range(count)]


def gguf_config(path: Path) -> dict[str, Any]:
    """What config.json would say. Floats stay the float32 values that the file holds."""
    header = read_header(path)
    family = header.architecture
    if header.fields.get(f"{family}.expert_count"):
        raise ValueError(f"{path} must be a dense model, but has experts; use the model's safetensors instead")
    return _sizes(header, family) | _rope(header, family) | _end_tokens(header)


def _sizes(header: GGUFHeader, family: str) -> dict[str, Any]:
    heads = header.require(f"{family}.attention.head_count")
    hidden = header.require(f"{family}.embedding_length")
    config = {
        "model_type": family,
        "architectures": [ARCHITECTURES[family]],
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": header.require(f"{family}.feed_forward_length"),
        "num_hidden_layers": header.require(f"{family}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": header.fields.get(f"{family}.attention.head_count_kv", heads),
        "max_position_embeddings": header.require(f"{family}.context_length"),
        "rms_norm_eps": header.require(f"{family}.attention.layer_norm_rms_epsilon"),
    }
    for key in ("intermediate_size", "num_attention_heads", "num_key_value_heads"):
        if not isinstance(config[key], int):
            raise ValueError(f"{key} of {header.path} must be one number for all layers, but is {config[key]}")
    return config | {
        "head_dim": header.fields.get(f"{family}.attention.key_length", hidden // heads),
        "vocab_size": _tensor(header, "token_embd.weight").shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
    }


def _rope(header: GGUFHeader, family: str) -> dict[str, Any]:
    return {
        "rope_theta": header.fields.get(f"{family}.rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(header, f"{family}.rope.scaling"),
    }


def _rope_scaling(header: GGUFHeader, prefix: str) -> dict[str, Any] | None:
    if ROPE_FACTORS in header.tensors:
        return {"rope_type": "factors", "factors": _rope_factors(header)}
    kind = header.fields.get(f"{prefix}.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ValueError(f"{prefix}.type of {header.path} must be none, linear or yarn, but is {kind!r}")
    scaling = {"rope_type": kind, "factor": header.require(f"{prefix}.factor")}
    original = header.fields.get(f"{prefix}.original_context_length")
    return scaling | ({"original_max_position_embeddings": original} if original else {})


def _rope_factors(header: GGUFHeader) -> list[float]:
    """Divisors of the rotary frequencies, one per pair of features: Llama 3's scaling, already worked out."""
    tensor = _tensor(header, ROPE_FACTORS)
    if tensor.type != 0:
        raise ValueError(f"{ROPE_FACTORS} of {header.path} must be float32, but is of type {tensor.type}")
    values = np.fromfile(header.path, np.float32, math.prod(tensor.shape), offset=tensor.begin)
    return values.tolist()


def _end_tokens(header: GGUFHeader) -> dict[str, Any]:
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    ends = list(dict.fromkeys(header.fields[key] for key in keys if key in header.fields))
    begin = header.fields.get("tokenizer.ggml.bos_token_id")
    config = {} if begin is None else {"bos_token_id": begin}
    return config | ({"eos_token_id": ends[0] if len(ends) == 1 else ends} if ends else {})


def _tensor(header: GGUFHeader, name: str) -> GGUFTensor:
    if name not in header.tensors:
        raise ValueError(missing_tensor(name, header.tensors, header.path))
    return header.tensors[name]


def has_tokenizer(path: Path) -> bool:
    return "tokenizer.ggml.tokens" in read_header(path).fields


class GGUFSource:
    """The tensors of a GGUF file under Hugging Face names, dequantised to float32 row by row.

    Rows are quantised along their last axis: leading axes are sliced first, and only those rows dequantised.
    """

    def __init__(self, path: Path) -> None:
        self._gguf = _gguf_package()
        self._header = read_header(path)
        self._family = self._header.architecture
        self._tensors = {hf_name(name): tensor for name, tensor in self._header.tensors.items()}
        self._tensors.pop(ROPE_FACTORS, None)
        self._file = np.memmap(path, dtype=np.uint8, mode="r")
        self._last_rows: tuple[object, np.ndarray] | None = None
        for tensor in self._tensors.values():
            self._check(tensor)

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def dtype(self, name: str) -> np.dtype:
        return PLAIN_TYPES.get(self._entry(name).type, np.dtype(np.float32))

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A copy of `tensor[index]`; the rows last dequantised are kept for the next device that asks."""
        tensor = self._entry(name)
        full = (*index, *[slice(None)] * (len(tensor.shape) - len(index)))
        order = self._row_order(name, tensor)
        if len(tensor.shape) == 1:
            values = self._values(tensor, ())
            return np.array(values[order][full] if order is not None else values[full])
        rows = (*full[:-1],) if order is None else (order[full[0]], *full[1:-1])
        return np.array(self._kept_values(tensor, full[:-1], rows)[..., full[-1]], order="C")

    def _entry(self, name: str) -> GGUFTensor:
        if name not in self._tensors:
            raise ValueError(missing_tensor(name, self._tensors, self._header.path))
        return self._tensors[name]

    def _row_order(self, name: str, tensor: GGUFTensor) -> np.ndarray | None:
        """The stored row of each Hugging Face row, where llama.cpp permuted them (q and k of `llama`)."""
        head_keys = {"q_proj": "head_count", "k_proj": "head_count_kv"}
        module = name.split(".")[-2]
        if self._family != "llama" or module not in head_keys:
            return None
        every = self._header.require("llama.attention.head_count")
        heads = self._header.fields.get(f"llama.attention.{head_keys[module]}", every)
        return unpermuted_rows(tensor.shape[0], heads)

    def _kept_values(self, tensor: GGUFTensor, asked: tuple[slice, ...], rows: tuple[Any, ...]) -> np.ndarray:
        if tensor.type in PLAIN_TYPES:
            return self._values(tensor, rows)
        key = (tensor.name, *((part.start, part.stop, part.step) for part in asked))
        last = self._last_rows
        if last is None or last[0] != key:
            last = self._last_rows = None  # Freed before its successor is made: at most one is held.
            last = self._last_rows = (key, self._values(tensor, rows))
        return last[1]

    def _values(self, tensor: GGUFTensor, rows: tuple[Any, ...]) -> np.ndarray:
        raw = self._raw(tensor)[rows]
        if tensor.type in PLAIN_TYPES:
            return np.ascontiguousarray(raw).view(PLAIN_TYPES[tensor.type])
        return self._gguf.quants.dequantize(np.ascontiguousarray(raw), self._quant_type(tensor))

    def _raw(self, tensor: GGUFTensor) -> np.ndarray:
        """Bytes, with the last axis counted in bytes."""
        row_bytes = self._row_bytes(tensor)
        count = math.prod(tensor.shape[:-1]) * row_bytes
        return self._file[tensor.begin : tensor.begin + count].reshape(*tensor.shape[:-1], row_bytes)

    def _row_bytes(self, tensor: GGUFTensor) -> int:
        block, block_bytes = self._gguf.GGML_QUANT_SIZES[self._quant_type(tensor)]
        if tensor.shape[-1] % block:
            raise ValueError(
                f"the rows of {tensor.name} must be whole blocks of {block}, but have {tensor.shape[-1]} "
                "values; convert the model again"
            )
        return tensor.shape[-1] // block * block_bytes

    def _quant_type(self, tensor: GGUFTensor) -> Any:
        try:
            return self._gguf.GGMLQuantizationType(tensor.type)
        except ValueError as error:
            raise ValueError(
                f"tensor {tensor.name} must be of a type that the gguf package knows, but is of type "
                f"{tensor.type}; pip install --upgrade gguf, or use another quantisation"
            ) from error

    def _check(self, tensor: GGUFTensor) -> None:
        end = tensor.begin + math.prod(tensor.shape[:-1]) * self._row_bytes(tensor)
        if end > len(self._file):
            raise ValueError(
                f"{self._header.path} must be {end} bytes long to hold {tensor.name}, but is "
                f"{len(self._file)}; fetch it again"
            )
        if tensor.type not in PLAIN_TYPES and not _can_dequantise(self._gguf, self._quant_type(tensor)):
            raise ValueError(
                f"tensor {tensor.name} must be of a type that can be dequantised, but is "
                f"{self._quant_type(tensor).name}; use another quantisation, such as Q4_K_M or Q8_0"
            )


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; names without a counterpart stay."""
    module, _, leaf = name.rpartition(".")
    if module in MODULES:
        return f"{MODULES[module]}.{leaf}"
    block, _, part = module.removeprefix("blk.").partition(".")
    if module.startswith("blk.") and part in LAYER_MODULES:
        return f"model.layers.{block}.{LAYER_MODULES[part]}.{leaf}"
    return name


def unpermuted_rows(rows: int, heads: int) -> np.ndarray:
    """For each row of a rotate-half (Hugging Face) projection, the row llama.cpp stores it in.

    Within a head of D rows, Hugging Face pairs i with i + D/2 for the rotation, llama.cpp 2i with 2i + 1.
    """
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(rows)


def _can_dequantise(gguf: Any, quant_type: Any) -> bool:
    block_bytes = gguf.GGML_QUANT_SIZES[quant_type][1]
    try:
        gguf.quants.dequantize(np.zeros((1, block_bytes), np.uint8), quant_type)
    except NotImplementedError:
        return False
    return True


def _gguf_package() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ValueError(
            "reading the weights of a .gguf file needs the gguf package; pip install 'dcpjax[gguf]'"
        ) from error
    return gguf
