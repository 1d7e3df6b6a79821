import pytest

from dcpjax.models.config import ModelConfig, from_hf
from dcpjax.models.config_rope import RopeConfig

LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 5000.0,
}
LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


def parsed(**changes) -> ModelConfig:
    return from_hf({**LLAMA, **changes})


def without(*names: str) -> dict:
    return {name: value for name, value in LLAMA.items() if name not in names}


def test_a_llama_config_becomes_its_numbers():
    assert parsed() == ModelConfig(
        family="llama",
        vocab_size=100,
        hidden_size=48,
        intermediate_size=96,
        num_layers=2,
        num_heads=6,
        num_kv_heads=3,
        head_dim=8,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=5000.0, original_max_position_embeddings=512),
        max_position_embeddings=512,
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5000.0}, {"rope_theta": 5000.0, "rope_type": "default"}),
        ({"rope_theta": 5000.0, "rope_scaling": None}, {"rope_theta": 5000.0}),
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 4.0}},
            {"rope_theta": 1e6, "rope_type": "linear", "factor": 4.0},
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3_SCALING}},
            {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3_SCALING},
        ),
    ],
    ids=["default", "null", "linear", "llama3"],
)
def test_the_older_and_the_present_form_of_rope_are_equal(old, new):
    present = from_hf({**without("rope_theta"), "rope_parameters": new})
    assert present == parsed(**old)
    assert present.rope.theta == old["rope_theta"]


def test_llama3_rope_keeps_all_its_numbers():
    rope = parsed(rope_scaling={"rope_type": "llama3", **LLAMA3_SCALING}).rope
    assert rope == RopeConfig(
        theta=5000.0,
        kind="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=256,
    )


def test_families_differ_in_biases_and_head_norms():
    shown = {
        family: (config.qkv_bias, config.o_bias, config.qk_norm, config.head_dim)
        for family in ("llama", "qwen2", "qwen3")
        for config in [parsed(model_type=family)]
    }
    assert shown == {
        "llama": (False, False, False, 8),
        "qwen2": (True, False, False, 8),
        "qwen3": (False, False, True, 128),
    }


def test_attention_bias_is_read_where_the_family_has_the_choice():
    assert (parsed(attention_bias=True).qkv_bias, parsed(attention_bias=True).o_bias) == (True, True)


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"head_dim": 16}, "head_dim", 16),
        ({"head_dim": None}, "head_dim", 8),
        ({"tie_word_embeddings": True}, "tie_word_embeddings", True),
        ({"dtype": "bfloat16"}, "dtype", "bfloat16"),
        ({"torch_dtype": "float16"}, "dtype", "float16"),
        ({"dtype": "bfloat16", "torch_dtype": "float32"}, "dtype", "bfloat16"),
        ({"num_key_value_heads": None}, "num_kv_heads", 6),
    ],
    ids=str,
)
def test_an_optional_key_is_read_or_takes_its_default(changes, field, value):
    assert getattr(parsed(**changes), field) == value


def test_unknown_keys_are_ignored():
    assert parsed(auto_map={"AutoModel": "evil.py"}, some_future_key=[1]) == parsed()


UNSUPPORTED = [
    (
        {"model_type": "gpt2"},
        "model_type must be one of deepseek_v2, deepseek_v3, kimi_k2, llama, qwen2, qwen3, qwen3_moe, but is 'gpt2'",
    ),
    (
        {"model_type": None},
        "model_type must be one of deepseek_v2, deepseek_v3, kimi_k2, llama, qwen2, qwen3, qwen3_moe, but is None",
    ),
    ({"hidden_act": "gelu"}, "hidden_act must be 'silu' here, but is 'gelu'"),
    ({"mlp_bias": True}, "mlp_bias must be False here, but is True"),
    ({"use_sliding_window": True}, "use_sliding_window must be False here, but is True"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1.0 here, but is 0.5"),
    (
        {"quantization_config": {"quant_method": "gptq"}},
        "except block-scaled fp8, but has quant_method 'gptq'; use the unquantised checkpoint",
    ),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "but hold ['sliding_attention']"),
    (
        {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}},
        "rope_type must be default, linear, llama3 or yarn, but is 'longrope'",
    ),
    ({"hidden_size": 0}, "hidden_size must be a positive integer, but is 0"),
    ({"num_hidden_layers": 2.0}, "num_hidden_layers must be a positive integer, but is 2.0"),
    ({"vocab_size": "100"}, "vocab_size must be a positive integer, but is '100'"),
]


@pytest.mark.parametrize(("changes", "sentence"), UNSUPPORTED, ids=[str(changes) for changes, _ in UNSUPPORTED])
def test_a_setting_that_is_not_supported_is_refused_by_name(changes, sentence):
    with pytest.raises(ValueError) as refusal:
        parsed(**changes)
    assert str(refusal.value).endswith(sentence)


@pytest.mark.parametrize(
    "name", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
)
def test_a_missing_key_is_refused_by_name(name):
    with pytest.raises(ValueError, match=f"config.json: {name} must be a positive integer, but is None"):
        from_hf(without(name))


def test_query_heads_that_do_not_fall_into_groups_of_a_kv_head_are_refused():
    with pytest.raises(ValueError, match="num_attention_heads"):
        parsed(num_attention_heads=6, num_key_value_heads=4)


def test_settings_that_change_nothing_are_accepted():
    harmless = {"hidden_act": "silu", "mlp_bias": False, "use_sliding_window": None, "pretraining_tp": 2}
    assert parsed(**harmless, layer_types=["full_attention"] * 2) == parsed()
