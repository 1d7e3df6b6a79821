"""The config of a GGUF file in the form of Hugging Face's config.json."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from dcpjax.api.checks import MAX_TOKEN_ID, is_integer
from dcpjax.checkpoint.gguf_header import ARCHITECTURES, ROPE_FACTORS, GGUFHeader, read_header
from dcpjax.models.config_values import shown

MOST_FACTORS = 2**20
# Metadata that llama.cpp gives to families which are not read here, and the values at which they change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.output_scale": (1.0, 0.0),
    "attention.scale": (0.0,),
    "attention.shared_kv_layers": (0,),
    "attention.sliding_window": (0,),
    "attention.temperature_scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "embedding_scale": (1.0, 0.0),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (1.0, 0.0),
    "residual_scale": (1.0, 0.0),
    "rope.scale_linear": (1.0,),
    "rope.scaling.alpha": (1.0, 0.0),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "use_parallel_residual": (False,),
}


def gguf_config(path: Path) -> dict[str, Any]:
    """The entries of config.json. Floats keep the float32 values that the file holds."""
    header = read_header(path)
    family = header.architecture
    if header.fields.get(f"{family}.expert_count"):
        raise ValueError(f"{path} must be a dense model, but has experts; use the model's safetensors instead")
    sizes = _sizes(header, family)
    _check_unread(header, family, sizes["head_dim"])
    return sizes | _rope(header, family) | _end_tokens(header)


def _check_unread(header: GGUFHeader, family: str, head_dim: int) -> None:
    """Refuse metadata that change the mathematics and that are not read."""
    neutral = NEUTRAL | {"rope.dimension_count": (head_dim,), "attention.value_length": (head_dim,)}
    for key, allowed in neutral.items():
        value = header.fields.get(f"{family}.{key}", allowed[0])
        if value not in allowed:
            raise ValueError(
                f"{family}.{key} of {header.path} must be {allowed[0]!r}, but is {shown(value)}; "
                "use the model's safetensors instead"
            )


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
    names = {"original_context_length": "original_max_position_embeddings"}
    if kind == "yarn":
        names |= {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
    values = {name: header.fields.get(f"{prefix}.{key}") for key, name in names.items()}
    return scaling | {name: value for name, value in values.items() if value}


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
    begin = "tokenizer.ggml.bos_token_id"
    config = {"bos_token_id": _token_id(header, begin)} if begin in header.fields else {}
    return config | ({"eos_token_id": ends[0] if len(ends) == 1 else ends} if ends else {})


def _token_id(header: GGUFHeader, key: str) -> int:
    value = header.fields[key]
    if not (is_integer(value) and 0 <= value <= MAX_TOKEN_ID):
        raise ValueError(f"{key} of {header.path} must be a token id, but is {shown(value)}; convert the model again")
    return value
