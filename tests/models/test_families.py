"""Every family against logits and greedy tokens that transformers gave for the same tiny checkpoint."""

from typing import Any

import numpy as np
import pytest
from harness import golden, loaded, sample

DENSE = ["llama2", "llama3", "llama-linear", "llama-bias", "smollm2", "qwen2", "qwen3", "qwen3-tied"]
EXPERTS = ["deepseek-v2-lite", "deepseek-v2", "deepseek-v3", "kimi-k2", "qwen3-moe"]
TOLERANCE = 2e-4
SEVERAL_PROGRAMS = ("llama3", "deepseek-v3")  # these decode in a program of their own, the others in one for all


@pytest.mark.parametrize("family", [*DENSE, *EXPERTS])
def test_logits_and_greedy_tokens_equal_transformers(family: str) -> None:
    assert_equal_to_transformers(family)


@pytest.mark.parametrize(
    ("family", "devices", "dcp"),
    sample(
        [
            ("llama2", 8, 2),
            ("llama3", 8, 4),
            ("llama-bias", 6, 2),
            ("smollm2", 8, 8),
            ("qwen2", 4, 2),
            ("qwen3", 8, 2),
            ("qwen3-tied", 4, 4),
            ("deepseek-v2-lite", 4, 2),
            ("deepseek-v2", 6, 3),
            ("deepseek-v3", 8, 8),
            ("kimi-k2", 4, 4),
            ("qwen3-moe", 6, 3),
        ],
        ("llama3", 8, 4),
        ("deepseek-v3", 8, 8),
        ("qwen3-moe", 6, 3),
    ),
)
def test_families_on_a_mesh_equal_transformers(family: str, devices: int, dcp: int) -> None:
    assert_equal_to_transformers(family, tensor_parallel_size=devices, decode_context_parallel_size=dcp, block_size=24)


def assert_equal_to_transformers(family: str, **options: Any) -> None:
    expected = golden(family)
    prompts = [expected["prompt"], expected["short_prompt"], expected["long_prompt"]]
    options["one_shape"] = family not in SEVERAL_PROGRAMS
    first, short, long = loaded(family, max_num_batched_tokens=64, **options).greedy(prompts, 24)
    np.testing.assert_allclose(first.prompt_logits, expected["logits"], rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(first.tokens, expected["greedy"])
    np.testing.assert_allclose(first.logits, expected["greedy_logits"], rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(short.tokens[:8], expected["short_greedy"])
    np.testing.assert_array_equal(long.tokens[:16], expected["long_greedy"])
