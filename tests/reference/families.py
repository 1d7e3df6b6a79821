"""Tiny random models of every supported family, as transformers configs with a seed.

The sizes are odd on purpose: vocabularies, inner widths and expert counts that no rank count divides, head widths
that differ from hidden / heads. Knows transformers and torch; knows nothing of dcpjax.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

# A wide initialiser keeps the two best tokens apart, so that greedy tokens do not hang on rounding.
SHARED = {
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# The plain implementations: grouped matrix products refuse row strides that are no multiple of 16 bytes.
EAGER = {"dtype": torch.float32, "attn_implementation": "eager", "experts_implementation": "eager"}
# Head widths of multi-head latent attention; the value width differs from the key width.
LATENT = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 52,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One tiny model: `seed` draws its weights and its prompts, `max_shard_size` is that of `save_pretrained`."""

    model: type[PreTrainedModel]
    config: PreTrainedConfig
    seed: int
    max_shard_size: str = "1GB"

    def build(self) -> PreTrainedModel:
        """The float32 model with eager attention, every weight random, in evaluation mode."""
        torch.manual_seed(self.seed)
        model = self.model._from_config(self.config, **EAGER)
        randomise_constants(model)
        return model.eval()

    def load(self, folder: Path) -> PreTrainedModel:
        """The model saved in `folder`; raises ValueError where a weight is missing, unknown or misshapen."""
        model, loading = self.model.from_pretrained(folder, **EAGER, output_loading_info=True)
        if any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")):
            raise ValueError(f"{folder} must hold exactly the weights of the model, but: {loading}")
        return model.eval()


@torch.no_grad()
def randomise_constants(model: PreTrainedModel) -> None:
    """Overwrite what transformers initialises to zeros or ones, so that a forgotten bias or norm shows."""
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.uniform_(0.5, 1.5)
        elif name.endswith(".bias"):
            parameter.normal_(0.0, 0.3)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.2)


def llama(**sizes: object) -> LlamaConfig:
    return LlamaConfig(**{**SHARED, "vocab_size": 97, "hidden_size": 64, **sizes})


def yarn(**values: float) -> dict[str, object]:
    """YaRN whose original length is short enough that the prompts reach beyond it."""
    return {"rope_type": "yarn", "rope_theta": 10000.0, "original_max_position_embeddings": 64, **values}


FAMILIES = {
    "llama2": Family(
        model=LlamaForCausalLM,
        config=llama(num_attention_heads=8, num_key_value_heads=8, intermediate_size=28),
        seed=2,
        max_shard_size="150KB",
    ),
    "llama3": Family(
        model=LlamaForCausalLM,
        config=llama(
            num_attention_heads=8,
            num_key_value_heads=2,
            intermediate_size=36,
            rms_norm_eps=1e-5,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        ),
        seed=1,
    ),
    "llama-linear": Family(
        model=LlamaForCausalLM,
        config=llama(
            num_attention_heads=8,
            num_key_value_heads=4,
            intermediate_size=28,
            rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
        ),
        seed=1,
    ),
    "smollm2": Family(
        model=LlamaForCausalLM,
        config=llama(
            vocab_size=101,
            hidden_size=72,
            num_attention_heads=9,
            num_key_value_heads=3,
            intermediate_size=28,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        ),
        seed=0,
    ),
    "llama-bias": Family(
        model=LlamaForCausalLM,
        config=llama(
            hidden_size=60,
            num_attention_heads=6,
            num_key_value_heads=3,
            intermediate_size=36,
            attention_bias=True,
        ),
        seed=4,
    ),
    "qwen2": Family(
        model=Qwen2ForCausalLM,
        config=Qwen2Config(
            **SHARED,
            vocab_size=101,
            hidden_size=96,
            num_attention_heads=12,
            num_key_value_heads=2,
            intermediate_size=20,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        ),
        seed=1,
    ),
    "qwen3": Family(
        model=Qwen3ForCausalLM,
        config=Qwen3Config(
            **SHARED,
            vocab_size=101,
            hidden_size=48,
            head_dim=16,
            num_attention_heads=8,
            num_key_value_heads=1,
            intermediate_size=36,
            rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        ),
        seed=5,
    ),
    "qwen3-tied": Family(
        model=Qwen3ForCausalLM,
        config=Qwen3Config(
            **SHARED,
            vocab_size=97,
            hidden_size=54,
            head_dim=12,
            num_attention_heads=6,
            num_key_value_heads=2,
            intermediate_size=42,
            tie_word_embeddings=True,
        ),
        seed=3,
    ),
    "qwen3-moe": Family(
        model=Qwen3MoeForCausalLM,
        config=Qwen3MoeConfig(
            **SHARED,
            vocab_size=101,
            hidden_size=48,
            head_dim=12,
            num_attention_heads=6,
            num_key_value_heads=2,
            intermediate_size=44,
            moe_intermediate_size=14,
            num_experts=7,
            num_experts_per_tok=3,
            norm_topk_prob=True,
            mlp_only_layers=[0],
        ),
        seed=5,
    ),
    "deepseek-v2-lite": Family(
        model=DeepseekV2ForCausalLM,
        config=DeepseekV2Config(
            **SHARED,
            **LATENT,
            num_attention_heads=4,
            num_key_value_heads=4,
            q_lora_rank=None,
            topk_method="greedy",
            moe_intermediate_size=14,
            n_routed_experts=7,
            num_experts_per_tok=3,
            n_shared_experts=2,
            rope_parameters=yarn(factor=8.0, beta_fast=32, beta_slow=1, mscale=0.707, mscale_all_dim=0.707),
        ),
        seed=0,
    ),
    # The two mscales differ here, so that both their quotient (on cos and sin) and their square (on scores) show.
    "deepseek-v2": Family(
        model=DeepseekV2ForCausalLM,
        config=DeepseekV2Config(
            **SHARED,
            **LATENT,
            num_attention_heads=6,
            num_key_value_heads=6,
            q_lora_rank=26,
            topk_method="group_limited_greedy",
            n_group=3,
            topk_group=2,
            moe_intermediate_size=14,
            n_routed_experts=6,
            num_experts_per_tok=3,
            n_shared_experts=2,
            routed_scaling_factor=1.6,
            rope_parameters=yarn(factor=8.0, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=0.707),
        ),
        seed=3,
    ),
    "deepseek-v3": Family(
        model=DeepseekV3ForCausalLM,
        config=DeepseekV3Config(
            **SHARED,
            **LATENT,
            num_attention_heads=8,
            num_key_value_heads=8,
            q_lora_rank=26,
            n_group=3,
            topk_group=2,
            moe_intermediate_size=10,
            n_routed_experts=9,
            num_experts_per_tok=4,
            n_shared_experts=1,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
            num_mtp_layers=0,
            rope_parameters=yarn(factor=8.0, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0),
        ),
        seed=0,
    ),
    "kimi-k2": Family(
        model=DeepseekV3ForCausalLM,
        config=DeepseekV3Config(
            **SHARED,
            **LATENT,
            num_attention_heads=4,
            num_key_value_heads=4,
            q_lora_rank=26,
            n_group=1,
            topk_group=1,
            moe_intermediate_size=14,
            n_routed_experts=7,
            num_experts_per_tok=3,
            n_shared_experts=1,
            norm_topk_prob=True,
            routed_scaling_factor=2.827,
            num_mtp_layers=0,
            rope_parameters=yarn(factor=8.0, beta_fast=1, beta_slow=1, mscale=1.0, mscale_all_dim=1.0),
        ),
        seed=6,
    ),
}

# Latents as wide as the published ones. Its weights are too large to commit: made and compared on the spot.
# With the wide initialiser the scores grow so large that transformers itself is 2e-4 away from its float64 result.
WIDE = Family(
    model=DeepseekV3ForCausalLM,
    config=DeepseekV3Config(
        **{**SHARED, "initializer_range": 0.1},
        vocab_size=101,
        hidden_size=64,
        intermediate_size=52,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=96,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=20,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_shared_experts=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        num_mtp_layers=0,
        rope_parameters=yarn(factor=8.0, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0),
    ),
    seed=0,
)
