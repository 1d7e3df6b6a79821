"""What a checkpoint's `config.json` says, as numbers.

`from_hf` is the only place that knows Hugging Face key names. The file is data: unknown keys are ignored,
nothing in it is run, and a setting that would change the mathematics and is not supported is refused by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Json = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021) and how its frequencies are stretched."""

    theta: float
    kind: Literal["default", "linear", "llama3", "factors"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3: wavelengths above original/low are divided by `factor`
    high_freq_factor: float = 4.0  # llama3: wavelengths below original/high are left alone
    original_max_position_embeddings: int = 0
    factors: tuple[float, ...] = ()  # one divisor per frequency


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A dense decoder with grouped-query attention: Llama, Qwen2, Qwen3 and their kin."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    dtype: str = "float32"


FAMILIES = {"llama": "llama", "qwen2": "llama", "qwen3": "llama"}  # model_type -> module in this folder


def from_hf(config: Json) -> ModelConfig:
    """Parse a Hugging Face config. Raises ValueError naming a key that is missing or not supported."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"model_type must be one of {', '.join(sorted(FAMILIES))}, but is {family!r}")
    _refuse_unsupported(config)
    hidden, heads = _integer(config, "hidden_size"), _integer(config, "num_attention_heads")
    kv_heads = _integer(config, "num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ValueError(
            f"config.json: num_attention_heads must be a multiple of num_key_value_heads={kv_heads}, but is {heads}"
        )
    head_dim = _integer(config, "head_dim", default=128 if family == "qwen3" else hidden // heads)
    attention_bias = bool(config.get("attention_bias", False))
    return ModelConfig(
        family=family,
        vocab_size=_integer(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_integer(config, "intermediate_size"),
        num_layers=_integer(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_rope(config, head_dim),
        max_position_embeddings=_integer(config, "max_position_embeddings", default=2048),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or attention_bias,
        o_bias=attention_bias and family != "qwen2",
        qk_norm=family == "qwen3",
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
    )


def _integer(config: Json, key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"config.json: {key} must be a positive integer, but is {value!r}")
    return value


_REQUIRED = {
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "partial_rotary_factor": (1.0,),
    "pretraining_tp": (1,),
}


def _refuse_unsupported(config: Json) -> None:
    for key, allowed in _REQUIRED.items():
        value = config.get(key)
        if value is not None and value not in allowed:
            raise ValueError(f"config.json: {key} must be {allowed[0]!r} here, but is {value!r}")
    if config.get("quantization_config") is not None:
        raise ValueError("config.json: quantization_config is not supported; use the unquantised checkpoint")
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        raise ValueError(f"config.json: layer_types must all be 'full_attention', but hold {sorted(kinds)}")


def _rope(config: Json, head_dim: int) -> RopeConfig:
    """Both the present form (`rope_parameters`) and the older one (`rope_theta`, `rope_scaling`)."""
    scaling: Json = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta", config.get("rope_theta") or 10000.0))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "linear", "llama3", "factors"):
        raise ValueError(f"config.json: rope_type must be default, linear or llama3, but is {kind!r}")
    factors = tuple(float(factor) for factor in scaling.get("factors", ()))
    if kind == "factors" and len(factors) != head_dim // 2:
        raise ValueError(f"rope factors must be {head_dim // 2}, one per pair of dimensions, but are {len(factors)}")
    original = scaling.get("original_max_position_embeddings", config.get("max_position_embeddings", 0))
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=float(scaling.get("factor", 1.0)),
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        original_max_position_embeddings=int(original),
        factors=factors,
    )
