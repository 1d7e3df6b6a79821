"""What users get wrong is refused in a sentence that names the option, the numbers and what is legal.

Runs under `python -O` too: no refusal rests on an assert statement.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from harness import GOLDENS

from dcpjax import LLM, SamplingParams, generate

SMOLLM2 = GOLDENS / "smollm2"  # 9 query heads, 3 KV heads, vocabulary 101, 512 positions

OPTIONS: list[tuple[dict[str, Any], str]] = [
    (
        {"tensor_parallel_size": 8, "decode_context_parallel_size": 1},
        "decode_context_parallel_size must suit tensor_parallel_size=8 and this model (9 query heads, 3 KV heads), "
        "but is 1: 9 query heads do not divide into 8/1 = 8 head groups; "
        "legal decode_context_parallel_size on 8 devices: 8 (cache stored 1x)",
    ),
    (
        {"tensor_parallel_size": 9, "decode_context_parallel_size": 3, "block_size": 255},
        "tensor_parallel_size must be at most the 8 cpu devices that JAX sees, but is 9; use 8",
    ),
    (
        {"tensor_parallel_size": 8, "decode_context_parallel_size": 3},
        "decode_context_parallel_size must divide tensor_parallel_size=8, but is 3; use one of 1, 2, 4, 8",
    ),
    ({"tensor_parallel_size": 0}, "tensor_parallel_size must be an integer of at least 1, but is 0"),
    ({"tensor_parallel_size": "8"}, "tensor_parallel_size must be an integer of at least 1, but is '8'"),
    (
        {"tensor_parallel_size": 8, "decode_context_parallel_size": 8, "block_size": 100},
        "block_size must be a multiple of decode_context_parallel_size * cp_kv_cache_interleave_size "
        "= 8 * 1 = 8, but is 100; use 96",
    ),
    (
        {"block_size": 24, "cp_kv_cache_interleave_size": 16},
        "= 1 * 16 = 16, but is 24; use 32",
    ),
    ({"dtype": "int8"}, "dtype must be one of auto, float32, bfloat16, but is 'int8'"),
    ({"dcp_comm_backend": "nccl"}, "dcp_comm_backend must be one of ag_rs, a2a, psum, auto, but is 'nccl'"),
    ({"tensor_paralel_size": 8}, "unknown option 'tensor_paralel_size'; did you mean tensor_parallel_size?"),
    (
        {"trust_remote_code": True},
        "trust_remote_code must be None or False, but is True; no code from a checkpoint is run",
    ),
    ({"max_model_len": 513}, "max_model_len must be at most the model's 512 positions, but is 513; use 512"),
    (
        {"kv_cache_memory_bytes": 1000, "dtype": "float32"},
        "kv_cache_memory_bytes must hold at least one block of 256 tokens (98304 bytes per device), "
        "but is 1000; use 98304 or a smaller block_size",
    ),
    (
        {"kv_cache_memory_bytes": 98304, "max_model_len": 512, "dtype": "float32"},
        "max_model_len must be at most the KV cache of 256 tokens (98304 bytes per device; raise "
        "kv_cache_memory_bytes), but is 512; use 256",
    ),
    ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization must be in (0, 1], but is 1.5; use 0.9"),
    ({"seed": 1.5}, "seed must be an integer, but is 1.5"),
    ({"temprature": None}, "unknown option 'temprature'"),
    ({"load_format": "pt"}, "load_format must be one of auto, dummy, but is 'pt'"),
]


@pytest.mark.parametrize(("options", "sentence"), OPTIONS)
def test_engine_options(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        LLM(SMOLLM2, progress=False, **options)


def test_an_illegal_layout_is_refused_before_any_weight_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((SMOLLM2 / "config.json").read_text())
    with pytest.raises(ValueError, match="legal decode_context_parallel_size on 8 devices: 8"):
        LLM(tmp_path, progress=False, tensor_parallel_size=8, decode_context_parallel_size=2)


SAMPLING: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens must be at least 1, but is 0; use 1"),
    ({"temperature": -0.1}, "temperature must be in [0, 3.4e+38], but is -0.1; use 0"),
    ({"top_p": 0.0}, "top_p must be in (0, 1], but is 0.0"),
    ({"top_p": 1.5}, "top_p must be in (0, 1], but is 1.5; use 1"),
    ({"min_p": 2}, "min_p must be in [0, 1], but is 2; use 1"),
    ({"top_k": -2}, "top_k must be at least -1, but is -2; use -1"),
    ({"n": 0}, "n must be at least 1, but is 0; use 1"),
    ({"stop": ""}, "stop must hold non-empty strings, but holds ''"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens must be at most max_tokens=4, but is 5; use 4"),
    ({"seed": 1.5}, "seed must be an integer, but is 1.5"),
]


@pytest.mark.parametrize(("options", "sentence"), SAMPLING)
def test_sampling_options(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        SamplingParams(**options)


def test_an_unknown_option_of_generate_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown option 'temprature'; did you mean temperature\?"):
        generate(SMOLLM2, [[1, 2]], temprature=0)


CONFIGS: list[tuple[dict[str, Any], str]] = [
    (
        {"model_type": "gpt2"},
        "model_type must be one of deepseek_v2, deepseek_v3, kimi_k2, llama, qwen2, qwen3, qwen3_moe, but is 'gpt2'",
    ),
    ({"hidden_act": "gelu"}, "hidden_act must be 'silu' here, but is 'gelu'"),
    (
        {"rope_parameters": {"rope_type": "longrope"}},
        "rope_type must be default, linear, llama3 or yarn, but is 'longrope'",
    ),
    ({"use_sliding_window": True}, "use_sliding_window must be False here, but is True"),
    ({"num_hidden_layers": "two"}, "num_hidden_layers must be a positive integer, but is 'two'"),
    ({"quantization_config": {"bits": 4}}, "quantization_config is not supported"),
]


@pytest.mark.parametrize(("changes", "sentence"), CONFIGS)
def test_configs_that_would_change_the_mathematics(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    config = json.loads((SMOLLM2 / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=re.escape(sentence)):
        LLM(tmp_path, progress=False, load_format="dummy")
