"""Which entries of a config.json each family reads, and at which values all others change nothing.

Entries that no model library gives a meaning for the result (token ids, dropout, initialisers, versions ...) are in
neither table and pass unread.
"""

from typing import Any

from dcpjax.models.config_values import Json, entries, items, shown

# by model_type: without experts; with latent attention (MLA), with or without experts
DENSE = ("llama", "qwen2", "qwen3")
LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2")
FAMILIES = (*DENSE, "qwen3_moe", *LATENT)

_EVERY = {
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "rms_norm_eps",
    "max_position_embeddings",
    "original_max_position_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "tie_word_embeddings",
    "layer_types",
    "sliding_window",
    "use_sliding_window",
    "quantization_config",
    "dtype",
    "torch_dtype",
}
_GROUPED_QUERIES = {"num_key_value_heads", "head_dim", "attention_bias"}
_EXPERTS = {"n_routed_experts", "num_experts", "num_local_experts", "moe_intermediate_size", "num_experts_per_tok"}
_LATENT_QUERIES = {"q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"}
_LATENT_EXPERTS = _EXPERTS | {
    "n_shared_experts",
    "first_k_dense_replace",
    "moe_layer_freq",
    "n_group",
    "topk_group",
    "topk_method",
    "routed_scaling_factor",
}
_DEEPSEEK_V2 = _EVERY | _LATENT_QUERIES | _LATENT_EXPERTS
_DEEPSEEK_V3 = _DEEPSEEK_V2 | {"norm_topk_prob"}

READ = {
    "llama": _EVERY | _GROUPED_QUERIES,
    "qwen2": _EVERY | _GROUPED_QUERIES,
    "qwen3": _EVERY | _GROUPED_QUERIES,
    "qwen3_moe": _EVERY | _GROUPED_QUERIES | _EXPERTS | {"norm_topk_prob", "mlp_only_layers", "decoder_sparse_step"},
    "deepseek_v2": _DEEPSEEK_V2,
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
}

# What transformers takes where an entry is missing, in families that differ.
_DEEPSEEK_V3_DEFAULTS: Json = {
    "max_position_embeddings": 4096,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "topk_method": "noaux_tc",
}
DEFAULTS: dict[str, Json] = {
    "llama": {"max_position_embeddings": 2048},
    "qwen2": {"max_position_embeddings": 32768},
    "qwen3": {"max_position_embeddings": 32768, "head_dim": 128},
    "qwen3_moe": {"max_position_embeddings": 32768},
    "deepseek_v2": {"max_position_embeddings": 2048, "n_shared_experts": 2, "topk_method": "greedy"},
    "deepseek_v3": _DEEPSEEK_V3_DEFAULTS,
    "kimi_k2": _DEEPSEEK_V3_DEFAULTS,
}

# Entries that change the mathematics of some family of transformers or vLLM, and the values at which they do not.
_NONE: tuple[Any, ...] = ()  # only null and absence
_OFF = (False,)
_NOT = (0, False)
NEUTRAL: dict[str, tuple[Any, ...]] = {
    # feed-forward
    "hidden_act": ("silu", "swish"),
    "hidden_activation": ("silu", "swish"),
    "activation_function": ("silu", "swish"),
    "mlp_bias": _OFF,
    "use_bias": _OFF,
    "bias": _OFF,
    "swiglu_limit": _NONE,
    "swiglu_limits": _NONE,
    "activation_sparsity_pattern": _NONE,
    "use_double_wide_mlp": _OFF,
    "hidden_size_per_layer_input": _NOT,
    # experts
    "num_experts": _NOT,
    "num_local_experts": _NOT,
    "n_routed_experts": _NOT,
    "moe_num_experts": _NOT,
    "n_shared_experts": _NOT,
    "num_shared_experts": _NOT,
    "moe_num_shared_experts": _NOT,
    "shared_expert_intermediate_size": _NOT,
    "zero_expert_num": _NOT,
    "mlp_layer_types": _NONE,
    "mlp_only_layers": ([], ()),
    "decoder_sparse_step": (1,),
    "moe_layer_freq": (1,),
    "first_k_dense_replace": (0,),
    "n_group": (0, 1),
    "topk_group": (0, 1),
    "topk_method": ("greedy",),
    "scoring_func": ("softmax",),
    # DeepSeek-V2: with weights that are normalised, the published code does not scale them, vLLM does, and transformers
    # ignores it
    "norm_topk_prob": _OFF,
    "routed_scaling_factor": (1.0,),
    "router_bias": _OFF,
    # attention
    "attention_bias": _OFF,
    "qkv_bias": _OFF,
    "use_qkv_bias": _OFF,
    "use_attention_bias": _OFF,
    "attention_out_bias": _OFF,
    "qk_layernorm": _OFF,
    "use_qk_norm": _OFF,
    "qk_norm": _OFF,
    "clip_qkv": _NONE,
    "query_pre_attn_scalar": _NONE,
    "attention_multiplier": _NONE,
    "attn_logit_softcapping": _NONE,
    "attn_logit_softcap": _NONE,
    "attention_chunk_size": _NONE,
    "attention_sink": _OFF,
    "use_attention_sinks": _OFF,
    "add_full_attention_sink_bias": _OFF,
    "add_swa_attention_sink_bias": _OFF,
    "attn_temperature_tuning": _NOT,
    "attention_k_eq_v": _OFF,
    "attn_output_gate": _OFF,
    "num_kv_shared_layers": _NOT,
    "sliding_window_pattern": _NONE,
    "interleaved_sliding_window": _NONE,
    "is_causal": (True,),
    "use_bidirectional_attention": _OFF,
    "add_cross_attention": _OFF,
    "is_encoder_decoder": _OFF,
    "index_topk": _NONE,
    "index_n_heads": _NONE,
    "index_head_dim": _NONE,
    "linear_attn_config": _NONE,
    "full_attention_interval": (1,),
    # positions
    "position_embedding_type": ("rope", "rotary"),
    "alibi": _OFF,
    "partial_rotary_factor": (1.0,),
    "rotary_pct": (1.0,),
    "rotary_percentage": (1.0,),
    "rotary_dim": _NONE,
    "rope_ratio": (1.0,),
    "rope_interleave": _OFF,
    "rope_interleaved": _OFF,
    "rope_local_base_freq": _NONE,
    "use_mem_rope": _OFF,
    "use_mrope": _OFF,
    "mrope_section": _NONE,
    "no_rope_layers": ([], ()),
    "no_rope_layer_interval": _NONE,
    # the residual stream, norms and logits
    "embedding_multiplier": (1.0,),
    "scale_emb": (1.0,),
    "scale_embedding": _OFF,
    "normalize_embedding": _OFF,
    "residual_multiplier": (1.0,),
    "scale_depth": _NONE,
    "dim_model_base": _NONE,
    "hc_mult": _NONE,
    "parallel_attn": _OFF,
    "use_parallel_residual": _OFF,
    "norm_type": ("rmsnorm", "rms_norm", "RMSNorm"),
    "norm_after": _OFF,
    "use_post_norm": _OFF,
    "use_sandwich_norm": _OFF,
    "sandwich_norm": _OFF,
    "logits_scaling": (1.0,),
    "logit_scale": (1.0,),
    "final_logit_softcapping": _NONE,
    "output_multiplier": (1.0,),
    "lm_head_bias": _OFF,
    # not in the mathematics of the model, but in how its weights are stored
    "compression_config": _NONE,
}

# The same where a family has what others lack.
_OF_LATENT: dict[str, tuple[Any, ...]] = {"rope_interleave": (True,)}
_OF_DEEPSEEK_V3 = _OF_LATENT | {"scoring_func": ("sigmoid",)}
_OF_QWEN3: dict[str, tuple[Any, ...]] = {"use_qk_norm": (True,), "qk_norm": (True,), "qk_layernorm": (True,)}
NEUTRAL_IN: dict[str, dict[str, tuple[Any, ...]]] = {
    "llama": {},
    "qwen2": {"qkv_bias": (True,), "use_qkv_bias": (True,)},
    "qwen3": _OF_QWEN3,
    "qwen3_moe": _OF_QWEN3,
    "deepseek_v2": _OF_LATENT,
    "deepseek_v3": _OF_DEEPSEEK_V3,
    "kimi_k2": _OF_DEEPSEEK_V3,
}


def check_unread_fields(config: Json, family: str) -> None:
    """Refuse, by name, an entry that the family does not read, at a value that changes the mathematics elsewhere."""
    for key, allowed in (NEUTRAL | NEUTRAL_IN[family]).items():
        if key not in READ[family]:
            check_neutral(config, key, allowed)


def check_neutral(config: Json, key: str, allowed: tuple[Any, ...]) -> None:
    value = config.get(key)
    if value is None or any(_is_same(value, neutral) for neutral in allowed):
        return
    wanted = f"{allowed[0]!r} here" if allowed else "null or absent"
    raise ValueError(f"config.json: {key} must be {wanted}, but is {shown(value)}")


def _is_same(value: Any, neutral: Any) -> bool:
    """Equal, and true is not 1."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def check_attention(config: Json, family: str) -> None:
    """Refuse attention that does not reach over the whole context in every layer."""
    check_neutral(config, "use_sliding_window", _OFF)
    # Qwen's configs give the width of a window that only `use_sliding_window` opens
    if not family.startswith("qwen") and config.get("use_sliding_window") is None:
        check_neutral(config, "sliding_window", _NONE)
    kinds = set(items(config, "layer_types", str)) - {"full_attention"}
    if kinds:
        raise ValueError(f"config.json: layer_types must all be 'full_attention', but hold {shown(sorted(kinds))}")


def check_quantisation(config: Json) -> None:
    quantised = entries(config, "quantization_config")
    if quantised and quantised.get("quant_method") != "fp8":
        raise ValueError(
            "config.json: quantization_config is not supported, except block-scaled fp8, but has quant_method "
            f"{shown(quantised.get('quant_method'))}; use the unquantised checkpoint"
        )
