"""Writes small GGUF files for tests."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")

HEADS, KV_HEADS, HIDDEN = 4, 2, 32


def sizes(family: str = "llama") -> dict[str, Any]:
    return {
        f"{family}.block_count": 1,
        f"{family}.context_length": 64,
        f"{family}.embedding_length": HIDDEN,
        f"{family}.feed_forward_length": 48,
        f"{family}.attention.head_count": HEADS,
        f"{family}.attention.head_count_kv": KV_HEADS,
        f"{family}.attention.layer_norm_rms_epsilon": 1e-5,
    }


def add_field(writer: Any, key: str, value: Any) -> None:
    by_type = {
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    by_type[type(value)](key, value)


def write_gguf(
    path: Path, tensors: dict[str, Any], family: str = "llama", fields: dict[str, Any] | None = None
) -> Path:
    """`tensors`: an array as it is, or (bytes of rows, quantised type)."""
    writer = gguf.GGUFWriter(path, family)
    for key, value in (sizes(family) if fields is None else fields).items():
        add_field(writer, key, value)
    for name, tensor in tensors.items():
        data, raw_type = tensor if isinstance(tensor, tuple) else (tensor, None)
        writer.add_tensor(name, data, raw_dtype=raw_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def embedding(**more: Any) -> dict[str, Any]:
    return {"token_embd.weight": random(10, HIDDEN), **more}
