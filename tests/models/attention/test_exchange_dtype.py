"""Queries and partial outputs that cross the links in bfloat16: what that costs in exactness, and what is sent."""

import re
from typing import Any

import numpy as np
import pytest
from compiled_steps import scheduled, with_gathered_queries
from harness import GOLDENS, Stepper, golden_runner, sample

from dcpjax.models.exchange import exchange_dtype
from dcpjax.runtime.batch import build

FAMILIES = ["llama3", "smollm2", "qwen3", "qwen3-moe", "deepseek-v2", "deepseek-v3"]
CASES = [(family, merge) for family in FAMILIES for merge in ("ag_rs", "a2a", "psum")]
BY_DEFAULT = ("smollm2", "a2a"), ("deepseek-v3", "psum")


@pytest.mark.parametrize(("family", "merge"), sample(CASES, *BY_DEFAULT))
def test_logits_are_nearer_to_float32_than_those_of_a_bfloat16_model(family: str, merge: Any) -> None:
    prompts = [np.random.default_rng(2).integers(0, 90, length).tolist() for length in (40, 3, 17)]
    ranks = 3 if family in ("qwen3-moe", "deepseek-v2", "smollm2") else 4

    def logits(**options: Any) -> np.ndarray:
        own = Stepper(
            GOLDENS / family,
            load_format="dummy",
            tensor_parallel_size=ranks,
            decode_context_parallel_size=ranks,
            block_size=12 if ranks == 3 else 16,
            dcp_comm_backend=merge,
            max_num_batched_tokens=64,
            **options,
        )
        with_gathered_queries(own.runner)
        return np.concatenate([trace.prompt_logits for trace in own.greedy(prompts, 1)])

    exact = logits(dcp_exchange_dtype="float32")
    error = typical(logits(dcp_exchange_dtype="bfloat16") - exact)
    assert 0 < error < typical(logits(dtype="bfloat16", dcp_exchange_dtype="float32") - exact)


def typical(error: np.ndarray) -> float:
    """The median: where rounding sends a token to another expert, its logits differ in whole numbers either way."""
    return float(np.median(np.abs(error)))


def test_queries_and_outputs_are_sent_in_bfloat16_and_lse_in_float32() -> None:
    """As traced: XLA's CPU backend widens what it sends, since it cannot add bfloat16 numbers up."""

    def sent(**options: Any) -> set[tuple[str, str]]:
        runner = golden_runner("llama3", 1, 4, dcp_comm_backend="a2a", **options)
        batch = build(scheduled([20, 40]), runner.shapes, runner.geometry)
        text = runner.programs.forward.lower(runner.weights, runner.cache, runner.latest, batch).as_text()
        return set(re.findall(r"stablehlo\.(all_gather|all_to_all)\".*?: \(tensor<[\dx]*(f32|bf16)>", text))

    assert sent(dcp_exchange_dtype="bfloat16") == {
        ("all_gather", "bf16"),
        ("all_to_all", "bf16"),
        ("all_gather", "f32"),
    }
    assert sent() == {("all_gather", "f32"), ("all_to_all", "f32")}


@pytest.mark.parametrize(
    ("choice", "dtype", "platform", "expected"),
    [
        ("auto", "bfloat16", "gpu", "bfloat16"),
        ("auto", "float32", "gpu", "float32"),
        ("auto", "bfloat16", "cpu", "float32"),
        ("bfloat16", "float32", "cpu", "bfloat16"),
        ("float32", "bfloat16", "tpu", "float32"),
    ],
)
def test_auto_is_bfloat16_on_accelerators_unless_the_model_is_float32(
    choice: str, dtype: str, platform: str, expected: str
) -> None:
    assert exchange_dtype(choice, dtype, platform) == expected
