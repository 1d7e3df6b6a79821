import pytest

from dcpjax.config import EngineConfig
from dcpjax.models.config import ModelConfig, RopeConfig, from_hf

# --- what a user chooses


POSITIVE = [
    "tensor_parallel_size",
    "decode_context_parallel_size",
    "max_num_seqs",
    "block_size",
    "cp_kv_cache_interleave_size",
    "max_model_len",
    "max_num_batched_tokens",
    "kv_cache_memory_bytes",
]


@pytest.mark.parametrize("name", POSITIVE)
@pytest.mark.parametrize("value", [0, -1, 1.5, "8", True])
def test_a_size_must_be_a_positive_integer(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be an integer of at least 1, but is {value!r}; use 1 or more"):
        EngineConfig(**{name: value})


@pytest.mark.parametrize("name", ["max_model_len", "max_num_batched_tokens", "kv_cache_memory_bytes"])
def test_a_size_that_may_be_left_to_the_engine_may_be_none(name):
    assert getattr(EngineConfig(**{name: None}), name) is None


@pytest.mark.parametrize(
    ("name", "legal"),
    [
        ("dtype", "auto, float32, bfloat16"),
        ("kv_cache_dtype", "auto, float32, bfloat16"),
        ("dcp_comm_backend", "ag_rs, a2a, psum, auto"),
        ("load_format", "auto, dummy"),
    ],
)
def test_a_choice_must_be_one_of_those_listed(name, legal):
    for choice in legal.split(", "):
        assert getattr(EngineConfig(**{name: choice}), name) == choice
    with pytest.raises(ValueError, match=f"^{name} must be one of {legal}, but is 'float12'$"):
        EngineConfig(**{name: "float12"})


REFUSED = [
    (
        {"tensor_parallel_size": 8, "decode_context_parallel_size": 3},
        "decode_context_parallel_size must divide tensor_parallel_size=8, but is 3; use one of 1, 2, 4, 8",
    ),
    (
        {"decode_context_parallel_size": 2},
        "decode_context_parallel_size must divide tensor_parallel_size=1, but is 2; use one of 1",
    ),
    (
        {"tensor_parallel_size": 8, "decode_context_parallel_size": 8, "block_size": 20},
        "block_size must be a multiple of decode_context_parallel_size * cp_kv_cache_interleave_size "
        "= 8 * 1 = 8, but is 20; use 16",
    ),
    (
        {"cp_kv_cache_interleave_size": 48, "block_size": 16},
        "block_size must be a multiple of decode_context_parallel_size * cp_kv_cache_interleave_size "
        "= 1 * 48 = 48, but is 16; use 48",
    ),
    ({"gpu_memory_utilization": 0}, "gpu_memory_utilization must be in (0, 1], but is 0; use 0.9"),
    ({"gpu_memory_utilization": 1.01}, "gpu_memory_utilization must be in (0, 1], but is 1.01; use 0.9"),
    ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization must be in (0, 1], but is nan; use 0.9"),
]


@pytest.mark.parametrize(("options", "sentence"), REFUSED, ids=[str(options) for options, _ in REFUSED])
def test_numbers_that_do_not_go_together_are_refused_with_the_legal_ones(options, sentence):
    with pytest.raises(ValueError) as refusal:
        EngineConfig(**options)
    assert str(refusal.value) == sentence


@pytest.mark.parametrize(
    ("name", "value"),
    [("gpu_memory_utilization", "most"), ("seed", "lucky"), ("seed", 1.5), ("dcp_replicate_q", "yes")],
)
def test_a_value_of_the_wrong_kind_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        EngineConfig(**{name: value})


@pytest.mark.parametrize(
    ("name", "near"),
    [("tensor_parallel", "tensor_parallel_size"), ("max_num_seq", "max_num_seqs"), ("blocksize", "block_size")],
)
def test_an_unknown_option_is_refused_with_the_nearest_valid_one(name, near):
    with pytest.raises(ValueError, match=f"unknown option '{name}'; did you mean {near}"):
        EngineConfig.from_options({name: 1})


def test_valid_options_make_the_same_config():
    options = {"tensor_parallel_size": 8, "decode_context_parallel_size": 4, "cp_kv_cache_interleave_size": 2}
    assert EngineConfig.from_options(options) == EngineConfig(**options)


# --- what a checkpoint says

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
    ({"pretraining_tp": 2}, "pretraining_tp must be 1 here, but is 2"),
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
    harmless = {"hidden_act": "silu", "mlp_bias": False, "use_sliding_window": None, "pretraining_tp": 1}
    assert parsed(**harmless, layer_types=["full_attention"] * 2) == parsed()
