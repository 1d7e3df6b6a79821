"""Operations counted in traced programs, of small models."""

from typing import Any

import numpy as np

from dcpjax.checkpoint.presets import PRESETS
from dcpjax.models.config import ModelConfig, from_hf

SMALL = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "vocab_size": 64}
MODELS = {
    "gqa": PRESETS["llama-3.1-8b"] | SMALL | {"num_key_value_heads": 2, "head_dim": 16},
    "mla": PRESETS["deepseek-v3"]
    | SMALL
    | {"num_key_value_heads": 8, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16}
    | {"qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": None, "first_k_dense_replace": 1},
}


def config_of(kind: str) -> ModelConfig:
    return from_hf(MODELS[kind])


def flops(equation: Any) -> int:
    """Of one dot_general: multiplications and additions."""
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return 2 * int(np.prod(equation.outvars[0].aval.shape)) * int(np.prod([left[axis] for axis in contracted]))
