import pytest

from dcpjax.api.config import EngineConfig

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


@pytest.mark.parametrize("value", [1, 8, "auto"])
def test_decode_steps_are_a_number_or_auto(value):
    assert EngineConfig(num_decode_steps=value).num_decode_steps == value
    for wrong in (0, "8", True):
        with pytest.raises(ValueError, match=f"^num_decode_steps must be an integer of at least 1, but is {wrong!r}"):
            EngineConfig(num_decode_steps=wrong)


@pytest.mark.parametrize(
    ("name", "legal"),
    [
        ("dtype", "auto, float32, bfloat16"),
        ("kv_cache_dtype", "auto, float32, bfloat16"),
        ("dcp_comm_backend", "ag_rs, a2a, psum, auto"),
        ("attention_body", "auto, loop, pallas"),
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
