"""The config of a GGUF file in the form of Hugging Face's config.json."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from dcpjax.checkpoint.gguf_header import ARCHITECTURES, ROPE_FACTORS, GGUFHeader, read_header
from dcpjax.models.config_values import shown

MOST_FACTORS = 2**20


def gguf_config(path: Path) -> dict[str, Any]:
    """The entries of config.json. Floats keep the float32 values that the file holds."""
    header = read_header(path)
    family = header.architecture
    if header.fields.get(f"{family}.expert_count"):
        raise ValueError(f"{path} must be a dense model, but has experts; use the model's safetensors instead")
    return _sizes(header, family) | _rope(header, family) | _end_tokens(header)


def _sizes(header: GGUFHeader, family: str) -> dict[str, Any]:
    heads = header.require(f"{family}.attention.head_count")
    table = header.tensor("token_embd.weight").shape
    config = {
        "model_type": family,
        "architectures": [ARCHITECTURES[family]],
        "hidden_act": "silu",
        "hidden_size": header.require(f"{family}.embedding_length"),
        "intermediate_size": header.require(f"{family}.feed_forward_length"),
        "num_hidden_layers": header.require(f"{family}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": header.fields.get(f"{family}.attention.head_count_kv", heads),
        "max_position_embeddings": header.require(f"{family}.context_length"),
        "rms_norm_eps": header.require(f"{family}.attention.layer_norm_rms_epsilon"),
    }
    for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
        if not isinstance(config[key], int) or config[key] < 1:
            raise ValueError(f"{key} of {header.path} must be one number for all layers, but is {shown(config[key])}")
    return config | {
        "head_dim": header.fields.get(f"{family}.attention.key_length", config["hidden_size"] // heads),
        "vocab_size": table[0],
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
    """Divisors of the rotary frequencies, one per pair of features: Llama 3's scaling, computed by the converter."""
    tensor = header.tensor(ROPE_FACTORS)
    if tensor.type != 0:
        raise ValueError(f"{ROPE_FACTORS} of {header.path} must be float32, but is of type {tensor.type}")
    count = math.prod(tensor.shape)
    if count > MOST_FACTORS or tensor.begin + 4 * count > header.path.stat().st_size:
        raise ValueError(
            f"{header.path} must hold {ROPE_FACTORS} of shape {tensor.shape}, but does not; fetch it again"
        )
    return np.fromfile(header.path, np.float32, count, offset=tensor.begin).tolist()


def _end_tokens(header: GGUFHeader) -> dict[str, Any]:
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    ends = list(dict.fromkeys(_token_id(header, key) for key in keys if key in header.fields))
    begin = header.fields.get("tokenizer.ggml.bos_token_id")
    config = {} if begin is None else {"bos_token_id": begin}
    return config | ({"eos_token_id": ends[0] if len(ends) == 1 else ends} if ends else {})


def _token_id(header: GGUFHeader, key: str) -> int:
    value = header.fields[key]
    if not isinstance(value, int):
        raise ValueError(f"{key} of {header.path} must be a token id, but is {shown(value)}; convert the model again")
    return value
