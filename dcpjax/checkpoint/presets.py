"""Published configs of well-known models by name, in the form of their config.json.

For runs with random weights (`load_format="dummy"`) and for planning.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

Json = Mapping[str, Any]


def _deepseek_yarn(*, factor: float, mscale: float = 1.0, **betas: float) -> Json:
    return {
        "type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": 4096,
        "mscale": mscale,
        "mscale_all_dim": mscale,
        **betas,
    }


_LATENT = {  # what all DeepSeek models and their successors share
    "hidden_act": "silu",
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_layer_freq": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

_DEEPSEEK_V2_LITE = {
    **_LATENT,
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "first_k_dense_replace": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": _deepseek_yarn(factor=40, mscale=0.707, beta_fast=32, beta_slow=1),
    "max_position_embeddings": 163840,
}

_SIGMOID = {  # DeepSeek-V3 and its successors route by sigmoid
    **_LATENT,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "q_lora_rank": 1536,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
}

_DEEPSEEK_V3 = {
    **_SIGMOID,
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": _deepseek_yarn(factor=40, beta_fast=32, beta_slow=1),
    "max_position_embeddings": 163840,
}

_KIMI_K2 = {
    **_SIGMOID,
    "model_type": "kimi_k2",
    "vocab_size": 163840,
    "first_k_dense_replace": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "num_nextn_predict_layers": 0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 50000.0,
    "rope_scaling": _deepseek_yarn(factor=32, beta_fast=1, beta_slow=1),
    "max_position_embeddings": 131072,
}

_KIMI_K2_6 = {  # the text model alone; its yarn betas were not found published and are left at their defaults
    **_KIMI_K2,
    "rms_norm_eps": 1e-5,
    "rope_scaling": _deepseek_yarn(factor=64),
    "max_position_embeddings": 262144,
}

_QWEN3 = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
}

_QWEN3_0_6B = {
    **_QWEN3,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}

_QWEN3_32B = {
    **_QWEN3,
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "tie_word_embeddings": False,
}

_QWEN3_235B = {
    **_QWEN3,
    "model_type": "qwen3_moe",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": (),
    "tie_word_embeddings": False,
}


def _llama(hidden: int, ffn: int, layers: int, heads: int) -> Json:
    """Llama 3.1 in one of its sizes."""
    return {
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": 128256,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


PRESETS: Mapping[str, Json] = MappingProxyType(
    {
        "deepseek-v2-lite": _DEEPSEEK_V2_LITE,
        "deepseek-v3": _DEEPSEEK_V3,
        "deepseek-r1": _DEEPSEEK_V3,
        "kimi-k2": _KIMI_K2,
        "kimi-k2.6": _KIMI_K2_6,
        "qwen3-0.6b": _QWEN3_0_6B,
        "qwen3-32b": _QWEN3_32B,
        "qwen3-235b-a22b": _QWEN3_235B,
        "llama-3.1-8b": _llama(4096, 14336, 32, 32),
        "llama-3.1-70b": _llama(8192, 28672, 80, 64),
        "llama-3.1-405b": _llama(16384, 53248, 126, 128),
    }
)
