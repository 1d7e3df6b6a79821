"""A model's config, read from a checkpoint's `config.json`.

`from_hf` is the only place that knows Hugging Face key names. Unknown keys are ignored, no code from the checkpoint is
run, and a setting that would change the computation and is not supported is refused by name.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Json = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021) and the scaling of its frequencies."""

    theta: float
    kind: Literal["default", "linear", "llama3", "yarn", "factors"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3: frequencies of wavelengths above original/low are divided by `factor`
    high_freq_factor: float = 4.0  # llama3: wavelengths below original/high are kept
    original_max_position_embeddings: int = 0
    factors: tuple[float, ...] = ()  # one divisor per frequency
    beta_fast: float = 32.0  # yarn: pairs with more rotations than this within the original length are kept
    beta_slow: float = 1.0  # yarn: frequencies of pairs with fewer rotations are divided by `factor`
    truncate: bool = True  # yarn: round the two bounds outwards to whole pairs
    angle_scale: float = 1.0  # yarn: cosine and sine are multiplied by this
    softmax_mscale: float = 1.0  # yarn with mscale_all_dim: the softmax scale is multiplied by its square


@dataclass(frozen=True, kw_only=True)
class MLAConfig:
    """Sizes of multi-head latent attention."""

    q_rank: int | None  # None: queries read the hidden state itself
    latent_rank: int  # C
    nope_dim: int  # X
    rope_dim: int  # R
    value_dim: int  # Y

    @property
    def qk_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def cached_dim(self) -> int:
        """C + R: values per token and layer in the cache."""
        return self.latent_rank + self.rope_dim


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Sizes of a mixture of experts and the rules of its router."""

    experts: int
    experts_per_token: int
    intermediate_size: int
    shared_size: int  # width of the experts that every token goes to, 0 for none
    scoring: Literal["softmax", "sigmoid"]
    correction_bias: bool
    groups: int  # 1: experts compete with all others
    groups_per_token: int
    normalise: bool
    scale: float
    dense_layers: frozenset[int]  # layers with an ordinary feed-forward block


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder: Llama, Qwen2, Qwen3, Qwen3-MoE, DeepSeek-V2, V3 and Kimi-K2."""

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
    mla: MLAConfig | None = None  # None: grouped-query attention
    moe: MoEConfig | None = None  # None: every layer is dense
    prefix: str = ""  # before every tensor name in the checkpoint

    @property
    def cache_heads(self) -> int:
        """KV heads of the cache: with latent attention, one latent serves every head."""
        return self.num_kv_heads if self.mla is None else 1

    @property
    def rope_dim(self) -> int:
        """Dimensions of a head with rotary position embedding."""
        return self.head_dim if self.mla is None else self.mla.rope_dim

    def is_moe(self, layer: int) -> bool:
        return self.moe is not None and layer not in self.moe.dense_layers


# by model_type: without experts; with latent attention (MLA), with or without experts
DENSE = ("llama", "qwen2", "qwen3")
LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2")
FAMILIES = (*DENSE, "qwen3_moe", *LATENT)


def from_hf(config: Json) -> ModelConfig:
    """Parse a Hugging Face config. Raises ValueError naming a key that is missing or not supported."""
    if isinstance(config.get("text_config"), Mapping):  # the language model of a multimodal checkpoint
        return replace(from_hf(config["text_config"]), prefix="language_model.")
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"model_type must be one of {', '.join(sorted(FAMILIES))}, but is {family!r}")
    _refuse_unsupported(config)
    hidden, heads = _integer(config, "hidden_size"), _integer(config, "num_attention_heads")
    latent = _mla(config) if family in LATENT else None
    kv_heads = _integer(config, "num_key_value_heads", default=heads) if latent is None else heads
    if heads % kv_heads:
        raise ValueError(
            f"config.json: num_attention_heads must be a multiple of num_key_value_heads={kv_heads}, but is {heads}"
        )
    default_dim = 128 if family.startswith("qwen3") else hidden // heads
    head_dim = _integer(config, "head_dim", default=default_dim) if latent is None else latent.qk_dim
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
        rope=_rope(config, head_dim if latent is None else latent.rope_dim),
        max_position_embeddings=_integer(config, "max_position_embeddings", default=2048),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or attention_bias,
        o_bias=attention_bias and family != "qwen2",
        qk_norm=family in ("qwen3", "qwen3_moe"),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        mla=latent,
        moe=_moe(config, family),
    )


def _mla(config: Json) -> MLAConfig:
    return MLAConfig(
        q_rank=None if config.get("q_lora_rank") is None else _integer(config, "q_lora_rank"),
        latent_rank=_integer(config, "kv_lora_rank"),
        nope_dim=_integer(config, "qk_nope_head_dim"),
        rope_dim=_integer(config, "qk_rope_head_dim"),
        value_dim=_integer(config, "v_head_dim"),
    )


def _moe(config: Json, family: str) -> MoEConfig | None:
    if family in DENSE:
        return None
    experts = config.get("n_routed_experts") or config.get("num_local_experts") or config.get("num_experts")
    if experts is None:
        return None
    width = _integer(config, "moe_intermediate_size")
    sigmoid = family in ("deepseek_v3", "kimi_k2")
    grouped = sigmoid or config.get("topk_method") == "group_limited_greedy"
    groups = _integer(config, "n_group", default=1) if grouped else 1
    moe = MoEConfig(
        experts=_integer({"n_routed_experts": experts}, "n_routed_experts"),
        experts_per_token=_integer(config, "num_experts_per_tok"),
        intermediate_size=width,
        shared_size=width * int(config.get("n_shared_experts") or 0),
        scoring="sigmoid" if sigmoid else "softmax",
        correction_bias=sigmoid,
        groups=groups,
        groups_per_token=_integer(config, "topk_group", default=1) if groups > 1 else 1,
        normalise=bool(config.get("norm_topk_prob", False)),
        scale=float(config.get("routed_scaling_factor", 1.0)),
        dense_layers=_dense_layers(config),
    )
    _check_routing(moe)
    return moe


def _check_routing(moe: MoEConfig) -> None:
    if moe.experts % moe.groups or (moe.groups > 1 and moe.experts < 2 * moe.groups):
        raise ValueError(
            f"config.json: n_group must cut the {moe.experts} experts into groups of at least two, but is {moe.groups}"
        )
    reachable = moe.experts // moe.groups * moe.groups_per_token
    if moe.experts_per_token > reachable:
        raise ValueError(
            f"config.json: num_experts_per_tok must be at most the {reachable} experts that a token may choose from, "
            f"but is {moe.experts_per_token}"
        )


def _dense_layers(config: Json) -> frozenset[int]:
    """Layers without experts: the first few (DeepSeek), listed ones, or all but every n-th (Qwen3-MoE)."""
    first, step = int(config.get("first_k_dense_replace") or 0), int(config.get("moe_layer_freq") or 1)
    listed, sparse_step = config.get("mlp_only_layers") or (), int(config.get("decoder_sparse_step") or 1)
    return frozenset(
        layer
        for layer in range(_integer(config, "num_hidden_layers"))
        if layer < first or layer % step or layer in listed or (layer + 1) % sparse_step
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
    for key in ("quantization_config", "rope_parameters", "rope_scaling"):
        if not isinstance(config.get(key), Mapping | None):
            raise ValueError(f"config.json: {key} must be an object, but is {config[key]!r}")
    quantised = config.get("quantization_config")
    if quantised is not None and quantised.get("quant_method") != "fp8":
        raise ValueError(
            "config.json: quantization_config is not supported, except block-scaled fp8, but has quant_method "
            f"{quantised.get('quant_method')!r}; use the unquantised checkpoint"
        )
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        raise ValueError(f"config.json: layer_types must all be 'full_attention', but hold {sorted(kinds)}")


def _rope(config: Json, head_dim: int) -> RopeConfig:
    """Read the current keys (`rope_parameters`) or the older ones (`rope_theta`, `rope_scaling`)."""
    scaling: Json = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta", config.get("rope_theta") or 10000.0))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "linear", "llama3", "yarn", "factors"):
        raise ValueError(f"config.json: rope_type must be default, linear, llama3 or yarn, but is {kind!r}")
    factors = tuple(float(factor) for factor in scaling.get("factors", ()))
    if kind == "factors" and len(factors) != head_dim // 2:
        raise ValueError(f"rope factors must be {head_dim // 2}, one per pair of dimensions, but are {len(factors)}")
    original = scaling.get("original_max_position_embeddings", config.get("max_position_embeddings", 0))
    factor = scaling.get("factor")
    factor = float(config["max_position_embeddings"] / original if kind == "yarn" and factor is None else factor or 1.0)
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        original_max_position_embeddings=int(original),
        factors=factors,
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        truncate=bool(scaling.get("truncate", True)),
        **_yarn_scales(scaling, factor, config.get("model_type") in LATENT) if kind == "yarn" else {},
    )


def _yarn_scales(scaling: Json, factor: float, latent: bool) -> dict[str, float]:
    """YaRN's two temperatures (Peng et al. 2023, section 3.4, with DeepSeek's mscale terms).

    Only latent attention multiplies its softmax scale; other families have the whole factor in cosine and sine.
    """
    mscale, all_dim = float(scaling.get("mscale") or 0.0), float(scaling.get("mscale_all_dim") or 0.0)
    angle_scale = scaling.get("attention_factor")
    if angle_scale is None and mscale and all_dim:
        angle_scale = _mscale(factor, mscale) / _mscale(factor, all_dim)
    elif angle_scale is None:
        angle_scale = _mscale(factor, 1.0)
    return {
        "angle_scale": float(angle_scale),
        "softmax_mscale": _mscale(factor, all_dim) if latent and all_dim else 1.0,
    }


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
