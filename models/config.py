"""A model's config, read from a checkpoint's `config.json`.

`from_hf` and the files it uses (`config_fields`, `config_rope`) are the only places that know Hugging Face key names.
No code from the checkpoint is run. Every entry that changes the mathematics is understood or refused by name; entries
that change nothing are ignored.
"""

from dataclasses import dataclass, replace
from typing import Literal

from dcpjax.models.config_fields import (
    DEFAULTS,
    DENSE,
    FAMILIES,
    LATENT,
    READ,
    check_attention,
    check_quantisation,
    check_unread_fields,
)
from dcpjax.models.config_rope import RopeConfig, read_rope
from dcpjax.models.config_values import (
    MOST_EXPERTS,
    MOST_EXPERTS_OF_ALL_LAYERS,
    MOST_HEADS,
    MOST_LAYERS,
    MOST_POSITIONS,
    Json,
    entries,
    flag,
    integer,
    items,
    number,
    shown,
    word,
)

LATENT_NORM_EPS = 1e-6  # of the norms of latents, in the published code and in transformers, whatever `rms_norm_eps` is
DTYPES = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2")


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


def from_hf(config: Json) -> ModelConfig:
    """Parse a Hugging Face config.

    Raises ValueError naming an entry that is missing, of a wrong type or size, or that asks for what is not supported.
    """
    if config.get("text_config") is None:
        return _language_model(config)
    # the language model of a multimodal checkpoint, and what the whole says about it
    text = entries(config, "text_config")
    check_quantisation(config)
    if "tie_word_embeddings" in config and flag(config, "tie_word_embeddings") != flag(text, "tie_word_embeddings"):
        raise ValueError("config.json: tie_word_embeddings must be the same in text_config, but is not")
    return replace(_language_model(text), prefix="language_model.")


def _language_model(config: Json) -> ModelConfig:
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ValueError(f"model_type must be one of {', '.join(sorted(FAMILIES))}, but is {shown(family)}")
    check_unread_fields(config, family)
    check_attention(config, family)
    check_quantisation(config)
    config = {**DEFAULTS[family], **{key: value for key, value in config.items() if key in READ[family]}}
    layers = integer(config, "num_hidden_layers", most=MOST_LAYERS)
    latent = _mla(config) if family in LATENT else None
    heads, kv_heads = _heads(config, latent)
    head_dim = _head_dim(config, family, heads) if latent is None else latent.qk_dim
    rope_dim = head_dim if latent is None else latent.rope_dim
    attention_bias = flag(config, "attention_bias")
    return ModelConfig(
        family=family,
        vocab_size=integer(config, "vocab_size"),
        hidden_size=integer(config, "hidden_size"),
        intermediate_size=integer(config, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=number(config, "rms_norm_eps", 1e-6, zero=True),
        rope=read_rope(config, rope_dim, latent=latent is not None),
        max_position_embeddings=integer(config, "max_position_embeddings", most=MOST_POSITIONS),
        tie_word_embeddings=flag(config, "tie_word_embeddings"),
        # Qwen2 has these biases whatever its config says
        qkv_bias=family == "qwen2" or attention_bias,
        o_bias=attention_bias and family != "qwen2",
        qk_norm=family in ("qwen3", "qwen3_moe"),
        dtype=_dtype(config),
        mla=latent,
        moe=None if family in DENSE else _moe(config, family, layers),
    )


def _heads(config: Json, latent: MLAConfig | None) -> tuple[int, int]:
    """Query heads and KV heads."""
    heads = integer(config, "num_attention_heads", most=MOST_HEADS)
    if latent is not None:
        return heads, heads
    kv_heads = integer(config, "num_key_value_heads", heads, most=MOST_HEADS)
    if heads % kv_heads:
        raise ValueError(
            f"config.json: num_attention_heads must be a multiple of num_key_value_heads={kv_heads}, but is {heads}"
        )
    return heads, kv_heads


def _head_dim(config: Json, family: str, heads: int) -> int:
    return _even(config, "head_dim", DEFAULTS[family].get("head_dim", integer(config, "hidden_size") // heads))


def _even(config: Json, key: str, default: int | None = None) -> int:
    """A size with rotary position embedding, which turns pairs."""
    size = integer(config, key, default)
    if size % 2:
        raise ValueError(f"config.json: {key} must be even, but is {size}")
    return size


def _dtype(config: Json) -> str:
    key = "torch_dtype" if config.get("dtype") is None else "dtype"
    return word(config, key, DTYPES, "float32")


def _mla(config: Json) -> MLAConfig:
    return MLAConfig(
        q_rank=None if config.get("q_lora_rank") is None else integer(config, "q_lora_rank"),
        latent_rank=integer(config, "kv_lora_rank"),
        nope_dim=integer(config, "qk_nope_head_dim"),
        rope_dim=_even(config, "qk_rope_head_dim"),
        value_dim=integer(config, "v_head_dim"),
    )


def _moe(config: Json, family: str, layers: int) -> MoEConfig | None:
    experts = _experts(config, layers)
    if not experts:
        return None
    sigmoid = family in ("deepseek_v3", "kimi_k2")
    methods = {"deepseek_v2": ("greedy", "group_limited_greedy"), "qwen3_moe": ("greedy",)}.get(family, ("noaux_tc",))
    method = word(config, "topk_method", methods, methods[0])
    groups = integer(config, "n_group") if method != "greedy" else 1
    width = integer(config, "moe_intermediate_size")
    moe = MoEConfig(
        experts=experts,
        experts_per_token=integer(config, "num_experts_per_tok"),
        intermediate_size=width,
        shared_size=width * integer(config, "n_shared_experts", 0, least=0, most=MOST_EXPERTS),
        scoring="sigmoid" if sigmoid else "softmax",
        correction_bias=sigmoid,
        groups=groups,
        groups_per_token=integer(config, "topk_group") if groups > 1 else 1,
        normalise=flag(config, "norm_topk_prob"),
        scale=number(config, "routed_scaling_factor", 1.0),
        dense_layers=_dense_layers(config, layers),
    )
    _check_routing(moe)
    return moe


def _experts(config: Json, layers: int) -> int:
    """The number of routed experts, under one of its three names; 0 for none."""
    names = [key for key in ("n_routed_experts", "num_local_experts", "num_experts") if config.get(key) is not None]
    counts = [integer(config, key, least=0, most=MOST_EXPERTS) for key in names]
    if any(count != counts[0] for count in counts):
        raise ValueError(f"config.json: {' and '.join(names)} must be equal, but are {' and '.join(map(str, counts))}")
    experts = counts[0] if counts else 0
    if experts * layers > MOST_EXPERTS_OF_ALL_LAYERS:
        raise ValueError(
            f"config.json: num_hidden_layers must be at most {MOST_EXPERTS_OF_ALL_LAYERS // experts} "
            f"with {experts} experts in each layer, but is {layers}"
        )
    return experts


def _check_routing(moe: MoEConfig) -> None:
    if moe.experts % moe.groups or (moe.groups > 1 and moe.experts < 2 * moe.groups):
        raise ValueError(
            f"config.json: n_group must cut the {moe.experts} experts into groups of at least two, but is {moe.groups}"
        )
    if moe.groups_per_token > moe.groups:
        raise ValueError(f"config.json: topk_group must be at most n_group={moe.groups}, but is {moe.groups_per_token}")
    reachable = moe.experts // moe.groups * moe.groups_per_token
    if moe.experts_per_token > reachable:
        raise ValueError(
            f"config.json: num_experts_per_tok must be at most the {reachable} experts that a token may choose from, "
            f"but is {moe.experts_per_token}"
        )


def _dense_layers(config: Json, layers: int) -> frozenset[int]:
    """Layers without experts: the first few (DeepSeek), listed ones, or all but every n-th (Qwen3-MoE)."""
    first, step = integer(config, "first_k_dense_replace", 0, least=0), integer(config, "moe_layer_freq", 1)
    listed, sparse_step = frozenset(items(config, "mlp_only_layers", int)), integer(config, "decoder_sparse_step", 1)
    return frozenset(
        layer
        for layer in range(layers)
        if layer < first or layer % step or layer in listed or (layer + 1) % sparse_step
    )
