"""The real SmolLM2-135M-Instruct on eight virtual devices, against transformers on the same dequantised weights.

float32 throughout: in bfloat16 the first token of the France prompt is a near tie, so only logits are compared.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import GOLDENS, Stepper

from dcpjax import LLM, SamplingParams, run_batch
from dcpjax.checkpoint.model_files import open_model

GOLDEN = dict(np.load(GOLDENS / "smollm2-135m.npz"))
ASSETS = Path(__file__).parent / "assets"
RUNS = ("france", "sky", "fibonacci")
QUESTIONS = {
    "france": "What is the capital of France?",
    "sky": "Explain in two sentences why the sky is blue.",
}
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)


@pytest.fixture(scope="module")
def eight_ranks(smollm2_path: Path) -> LLM:
    return LLM(
        smollm2_path,
        progress=False,
        dtype="float32",
        tensor_parallel_size=8,
        decode_context_parallel_size=8,
        max_num_seqs=4,
        max_model_len=4096,
        kv_cache_memory_bytes=48 * 2**20,
    )


def test_the_prompts_are_tokenised_as_by_the_models_own_template(eight_ranks: LLM) -> None:
    assert eight_ranks.tokenizer is not None
    for name, question in QUESTIONS.items():
        ids = eight_ranks.tokenizer.apply_chat_template([{"role": "user", "content": question}])
        assert ids == GOLDEN[f"{name}_prompt"].tolist()
    assert eight_ranks.tokenizer.encode("The Fibonacci numbers are") == GOLDEN["fibonacci_prompt"].tolist()


def test_sixty_four_greedy_tokens_equal_transformers(eight_ranks: LLM) -> None:
    results = eight_ranks.generate([GOLDEN[f"{name}_prompt"].tolist() for name in RUNS], GREEDY)
    for name, result in zip(RUNS, results, strict=True):
        assert result.outputs[0].token_ids == GOLDEN[f"{name}_greedy"].tolist(), name


def conversations() -> list[list[dict[str, str]]]:
    """As many as the runs above, so that the same programs serve."""
    return [[{"role": "user", "content": QUESTIONS[name]}] for name in ("france", "sky", "france")]


def test_chat_stops_at_the_end_of_the_turn(eight_ranks: LLM) -> None:
    results = eight_ranks.chat(conversations(), SamplingParams(temperature=0, max_tokens=16))
    for result in (results[0], results[2]):
        assert result.outputs[0].text == "The capital of France is Paris."
        assert result.outputs[0].finish_reason == "stop"
    assert results[1].outputs[0].finish_reason == "length"


def test_a_stream_gives_the_same_text_piece_by_piece(eight_ranks: LLM) -> None:
    events = [
        event
        for event in eight_ranks.stream_chat(conversations(), SamplingParams(temperature=0, max_tokens=16))
        if event.prompt_index == 0
    ]
    assert "".join(event.text for event in events) == "The capital of France is Paris."
    assert len(events) > 5
    assert events[-1].finish_reason == "stop"


@pytest.mark.sweep
def test_a_key_hidden_in_three_thousand_tokens_is_found_on_eight_ranks(eight_ranks: LLM) -> None:
    (result,) = eight_ranks.generate(
        [GOLDEN["needle_prompt"].tolist()], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    )
    assert "48213" in result.outputs[0].text
    assert result.outputs[0].token_ids == GOLDEN["needle_greedy"].tolist()


@pytest.mark.sweep
def test_each_turn_of_an_agent_finds_the_turns_before_it_in_the_cache(smollm2_path: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    options = {"dtype": "float32", "max_num_seqs": 1, "max_num_batched_tokens": 32, "max_model_len": 1024}
    tally = run_batch(
        ASSETS / "agent_turns.jsonl", output, smollm2_path, progress=False, max_in_flight=1, block_size=64, **options
    )
    assert (tally.done, tally.errors) == (4, 0)
    usages = [json.loads(line)["response"]["body"]["usage"] for line in output.read_text().splitlines()]
    prompts = [usage["prompt_tokens"] for usage in usages]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert cached[0] == 0
    for before, found in zip(prompts, cached[1:], strict=False):
        assert found >= (before - 8) // 64 * 64  # whole blocks of all that both have, but for the cue to answer
    assert prompts == sorted(prompts)


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "dcp"), [(1, 1), (1, 2), (1, 4), (3, 1), (3, 2), (1, 8)])
def test_the_key_is_found_with_the_same_tokens_on_every_legal_layout(smollm2_path: Path, tp: int, dcp: int) -> None:
    llm = LLM(
        smollm2_path,
        progress=False,
        dtype="float32",
        tensor_parallel_size=tp * dcp,
        decode_context_parallel_size=dcp,
        max_model_len=4096,
        kv_cache_memory_bytes=2**30 // (tp * dcp),
    )
    (result,) = llm.generate(
        [GOLDEN["needle_prompt"].tolist()], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    )
    assert result.outputs[0].token_ids == GOLDEN["needle_greedy"].tolist()


@pytest.mark.slow
def test_the_logits_of_the_first_answer_equal_transformers(smollm2_path: Path) -> None:
    scores = first_logits(smollm2_path, "float32")
    expected = GOLDEN["france_top_logits"][0]
    np.testing.assert_allclose(scores[GOLDEN["france_top_ids"][0]], expected, rtol=0, atol=2e-4)


@pytest.mark.sweep
def test_bfloat16_logits_are_as_near_to_float32_as_those_of_transformers(smollm2_path: Path) -> None:
    scores = first_logits(smollm2_path, "bfloat16")
    exact = dict(zip(GOLDEN["france_top_ids"][0], GOLDEN["france_top_logits"][0], strict=True))
    theirs = dict(zip(GOLDEN["france_bfloat16_top_ids"], GOLDEN["france_bfloat16_top_logits"], strict=True))
    assert set(np.argsort(-scores)[:5]) == set(exact)
    assert max(abs(scores[i] - exact[i]) for i in exact) <= max(abs(theirs[i] - exact[i]) for i in exact)


@cache
def first_logits(path: Path, dtype: str) -> Any:
    """float32 [V] after the France prompt, on one device."""
    stepper = Stepper(path, dtype=dtype, max_num_seqs=1, max_num_batched_tokens=64, kv_cache_memory_bytes=2**26)
    (trace,) = stepper.greedy([GOLDEN["france_prompt"].tolist()], 1)
    return trace.logits[0]


def test_the_config_in_the_file_is_that_of_the_published_model(smollm2_path: Path) -> None:
    config = open_model(smollm2_path).config
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (9, 3)
    assert (config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]) == (576, 30, 49152)
    assert config["tie_word_embeddings"] is True
