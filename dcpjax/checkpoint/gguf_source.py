"""The tensors of a GGUF file under Hugging Face names and in Hugging Face's order of rows.

Names and orders are llama.cpp's for the dense Llama and Qwen families. The `gguf` package dequantises.
"""

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dcpjax.checkpoint.gguf_header import ROPE_FACTORS, GGUFTensor, read_header
from dcpjax.checkpoint.weight_files import missing_tensor_message

# Tensor types that need no dequantising, by GGML's number.
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
        """A copy of `tensor[index]`. The rows dequantised last are cached for the next device that reads them."""
        tensor = self._entry(name)
        full = (*index, *[slice(None)] * (len(tensor.shape) - len(index)))
        order = self._row_order(name, tensor)
        if len(tensor.shape) == 1:
            values = self._values(tensor, ())
            return np.array(values[order][full] if order is not None else values[full])
        rows = (*full[:-1],) if order is None else (order[full[0]], *full[1:-1])
        return np.array(self._cached_values(tensor, full[:-1], rows)[..., full[-1]], order="C")

    def _entry(self, name: str) -> GGUFTensor:
        if name not in self._tensors:
            raise ValueError(missing_tensor_message(name, self._tensors, self._header.path))
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

    def _cached_values(self, tensor: GGUFTensor, asked: tuple[slice, ...], rows: tuple[Any, ...]) -> np.ndarray:
        if tensor.type in PLAIN_TYPES:
            return self._values(tensor, rows)
        key = (tensor.name, *((part.start, part.stop, part.step) for part in asked))
        last = self._last_rows
        if last is None or last[0] != key:
            last = self._last_rows = None  # Freed first, so that at most one is held.
            last = self._last_rows = (key, self._values(tensor, rows))
        return last[1]

    def _values(self, tensor: GGUFTensor, rows: tuple[Any, ...]) -> np.ndarray:
        raw = self._raw(tensor)[rows]
        if tensor.type in PLAIN_TYPES:
            return np.ascontiguousarray(raw).view(PLAIN_TYPES[tensor.type])
        return self._gguf.quants.dequantize(np.ascontiguousarray(raw), self._quant_type(tensor))

    def _raw(self, tensor: GGUFTensor) -> np.ndarray:
        """[..., bytes of a row] uint8: the stored bytes, leading axes as in the tensor's shape."""
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
