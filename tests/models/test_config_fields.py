"""Entries of config.json that a family does not read: refused by name where they would change the results."""

import json
from typing import Any

import pytest
from harness import GOLDENS

from dcpjax.checkpoint.presets import PRESETS
from dcpjax.models.config import from_hf
from dcpjax.models.config_fields import DEFAULTS, FAMILIES, NEUTRAL, NEUTRAL_IN, READ

OF_FAMILY = {
    "llama": "llama3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3-moe",
    "deepseek_v2": "deepseek-v2",
    "deepseek_v3": "deepseek-v3",
    "kimi_k2": "kimi-k2",
}


def config_of(family: str) -> dict[str, Any]:
    return json.loads((GOLDENS / OF_FAMILY[family] / "config.json").read_text()) | {"model_type": family}


def without(family: str, *fields: str) -> dict[str, Any]:
    return {key: value for key, value in config_of(family).items() if key not in fields}


def test_every_family_has_its_tables():
    assert set(FAMILIES) == READ.keys() == DEFAULTS.keys() == NEUTRAL_IN.keys() == OF_FAMILY.keys()


REFUSED = [
    ("deepseek_v3", "attention_bias", True),
    ("deepseek_v2", "attention_bias", True),
    ("kimi_k2", "attention_bias", True),
    ("deepseek_v3", "rope_interleave", False),
    ("deepseek_v2", "rope_interleave", False),
    ("llama", "rope_interleave", True),
    *((family, "partial_rotary_factor", 0.5) for family in FAMILIES),
    *((family, "hidden_act", "gelu") for family in FAMILIES),
    *((family, "mlp_bias", True) for family in FAMILIES),
    *((family, "query_pre_attn_scalar", 256) for family in FAMILIES),
    *((family, "attn_logit_softcapping", 50.0) for family in FAMILIES),
    *((family, "final_logit_softcapping", 30.0) for family in FAMILIES),
    *((family, "use_sliding_window", True) for family in FAMILIES),
    ("llama", "sliding_window", 4096),
    ("deepseek_v3", "sliding_window", 4096),
    ("llama", "attention_multiplier", 0.1),
    ("llama", "residual_multiplier", 0.2),
    ("llama", "embedding_multiplier", 12.0),
    ("llama", "logits_scaling", 8.0),
    ("llama", "logit_scale", 0.06),
    ("llama", "scale_emb", 12),
    ("llama", "scale_depth", 1.4),
    ("llama", "no_rope_layers", [1, 1, 0]),
    ("llama", "attention_chunk_size", 8192),
    ("llama", "attn_temperature_tuning", 4),
    ("llama", "qk_layernorm", True),
    ("llama", "use_qk_norm", True),
    ("qwen3", "use_qk_norm", False),
    ("llama", "clip_qkv", 8.0),
    ("llama", "bias", True),
    ("llama", "qkv_bias", True),
    ("qwen2", "qkv_bias", False),
    ("llama", "num_local_experts", 8),
    ("llama", "is_causal", False),
    ("qwen2", "is_causal", False),
    ("qwen2", "use_mrope", True),
    ("llama", "compression_config", {"quant_method": "sparseml"}),
    ("qwen3_moe", "scoring_func", "sigmoid"),
    ("qwen3_moe", "routed_scaling_factor", 2.5),
    ("qwen3_moe", "n_shared_experts", 1),
    ("qwen3_moe", "shared_expert_intermediate_size", 512),
    ("qwen3_moe", "first_k_dense_replace", 1),
    ("qwen3_moe", "topk_method", "noaux_tc"),
    ("deepseek_v2", "scoring_func", "sigmoid"),
    ("deepseek_v3", "scoring_func", "softmax"),
    ("deepseek_v2", "topk_method", "noaux_tc"),
    ("deepseek_v3", "topk_method", "greedy"),
    ("deepseek_v2", "norm_topk_prob", True),
    ("deepseek_v3", "mlp_only_layers", [0]),
    ("deepseek_v3", "decoder_sparse_step", 2),
    ("deepseek_v3", "index_topk", 2048),
]


@pytest.mark.parametrize(("family", "field", "value"), REFUSED)
def test_what_would_change_the_results_is_refused_by_name(family, field, value):
    with pytest.raises(ValueError, match=f"config.json: {field} must be "):
        from_hf({**config_of(family), field: value})


@pytest.mark.parametrize("family", FAMILIES)
def test_neutral_values_change_nothing(family):
    base, neutral = config_of(family), NEUTRAL | NEUTRAL_IN[family]
    for field in neutral.keys() - READ[family]:
        for value in (None, *neutral[field]):
            assert from_hf({**base, field: value}) == from_hf(base), (field, value)


PUBLISHED = [  # entries that published configs hold beside the sizes
    ("llama", {"is_llama_config": True, "rope_interleaved": False, "pretraining_tp": 1, "rope_scaling": None}),
    ("qwen2", {"use_mrope": False, "sliding_window": 131072, "use_sliding_window": False, "max_window_layers": 28}),
    ("qwen3", {"sliding_window": None, "max_window_layers": 36, "rope_scaling": None, "attention_bias": False}),
    ("qwen3_moe", {"router_aux_loss_coef": 0.001, "output_router_logits": False, "mlp_only_layers": [0]}),
    ("deepseek_v2", {"aux_loss_alpha": 0.001, "ep_size": 1, "moe_layer_freq": 1, "scoring_func": "softmax"}),
    ("deepseek_v3", {"ep_size": 1, "moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}),
    ("kimi_k2", {"auto_map": {"AutoModel": "x.Y"}, "seq_aux": True, "num_nextn_predict_layers": 0, "qk_head_dim": 3}),
    ("kimi_k2", {"is_encoder_decoder": False, "add_cross_attention": False, "is_decoder": False, "use_cache": True}),
]


@pytest.mark.parametrize(("family", "entries"), PUBLISHED)
def test_entries_of_published_configs_change_nothing(family, entries):
    assert from_hf({**config_of(family), **entries}) == from_hf(config_of(family))


def test_a_window_that_is_switched_off_is_accepted():
    for family in ("qwen2", "qwen3", "qwen3_moe"):
        assert from_hf({**config_of(family), "sliding_window": 4096}) == from_hf(config_of(family))
    off = {**config_of("llama"), "sliding_window": 4096, "use_sliding_window": False}
    assert from_hf(off) == from_hf(config_of("llama"))


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("deepseek_v3", "norm_topk_prob", True),
        ("deepseek_v3", "routed_scaling_factor", 2.5),
        ("deepseek_v3", "n_shared_experts", 1),
        ("deepseek_v3", "first_k_dense_replace", 3),
        ("deepseek_v2", "n_shared_experts", 2),
        ("qwen3_moe", "norm_topk_prob", False),
        ("qwen3_moe", "head_dim", 8),
        ("qwen3", "head_dim", 128),
        ("qwen2", "max_position_embeddings", 32768),
        ("llama", "max_position_embeddings", 2048),
    ],
)
def test_a_missing_entry_has_the_default_of_its_family(family, field, value):
    rest = without(family, field)
    assert from_hf(rest) == from_hf({**rest, field: value})


def test_groups_of_experts_have_the_default_of_their_family():
    rest = {key: value for key, value in PRESETS["deepseek-v3"].items() if key not in ("n_group", "topk_group")}
    assert from_hf(rest) == from_hf(PRESETS["deepseek-v3"])


# --- rope


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("scaling", "field"),
    [
        ({"rope_type": "default", "factor": 8.0}, "factor"),
        ({"rope_type": "default", "mrope_section": [2, 1, 1]}, "mrope_section"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}, "mscale_all_dim"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "high_freq_factor"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4}, "high_freq_factor"),
        ({**YARN, "extrapolation_factor": 2.0}, "extrapolation_factor"),
        ({**YARN, "attn_factor": 2.0}, "attn_factor"),
        ({**YARN, "some_future_entry": 2.0}, "some_future_entry"),
        ({**YARN, "type": "linear"}, "type"),
        ({**YARN, "rope_theta": 1.0}, "rope_theta"),
        ({"full_attention": {"rope_type": "yarn", "factor": 4.0}}, "full_attention"),
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_type"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}, "rope_type"),
        ({"rope_type": "proportional", "partial_rotary_factor": 0.5}, "rope_type"),
    ],
)
@pytest.mark.parametrize("form", ["rope_parameters", "rope_scaling"])
def test_rope_of_other_kinds_is_refused_by_name(form, scaling, field):
    with pytest.raises(ValueError, match=f"config.json: {field} must be "):
        from_hf({**without("llama", "rope_parameters"), form: scaling})


def test_rope_scaling_beside_rope_parameters_must_say_the_same():
    base = config_of("qwen3")
    with pytest.raises(ValueError, match="rope_scaling must say the same as rope_parameters"):
        from_hf({**base, "rope_scaling": YARN})
    same = {**base["rope_parameters"], "type": "default"}
    assert from_hf({**base, "rope_scaling": same}) == from_hf(base)


def test_two_bases_must_be_equal():
    base = config_of("qwen3")
    with pytest.raises(ValueError, match="rope_theta must be the same inside and outside"):
        from_hf({**base, "rope_theta": 5.0})
    assert from_hf({**base, "rope_theta": base["rope_parameters"]["rope_theta"]}) == from_hf(base)


def test_an_original_length_beside_the_rope_comes_first():
    base = {**without("llama", "rope_parameters"), "rope_parameters": YARN}
    beside = from_hf({**base, "original_max_position_embeddings": 32}).rope
    assert beside == from_hf({**base, "rope_parameters": {**YARN, "original_max_position_embeddings": 32}}).rope


# --- experts and multimodal checkpoints


def test_two_names_of_the_number_of_experts_must_agree():
    base = config_of("qwen3_moe")
    with pytest.raises(ValueError, match="num_local_experts and num_experts must be equal, but are 7 and 8"):
        from_hf({**base, "num_experts": 8})
    assert from_hf({**base, "num_experts": 7}) == from_hf(base)


@pytest.mark.parametrize("field", ["head_dim", "qk_rope_head_dim"])
def test_an_odd_number_of_rotated_dimensions_is_refused(field):
    family = "llama" if field == "head_dim" else "deepseek_v3"
    with pytest.raises(ValueError, match=f"config.json: {field} must be even, but is 7"):
        from_hf({**config_of(family), field: 7})


def test_what_a_multimodal_config_says_of_the_whole_counts():
    whole = {"model_type": "kimi_k25", "text_config": config_of("kimi_k2")}
    with pytest.raises(ValueError, match="quantization_config is not supported"):
        from_hf({**whole, "quantization_config": {"quant_method": "compressed-tensors"}})
    with pytest.raises(ValueError, match="tie_word_embeddings must be the same in text_config"):
        from_hf({**whole, "tie_word_embeddings": True})
    with pytest.raises(ValueError, match="text_config must be an object, but is 3"):
        from_hf({**config_of("llama"), "text_config": 3})
