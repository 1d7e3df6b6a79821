"""Programs compiled before the first request are those that requests need, and all that greedy ones need."""

import random
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from entries import entry
from harness import GOLDENS, compilations
from hypothesis import given
from hypothesis import strategies as st

from dcpjax import LLM, SamplingParams
from dcpjax.api.config import EngineConfig
from dcpjax.models.kv_cache import CacheGeometry
from dcpjax.runtime import warmup
from dcpjax.runtime.batch import ShapeBuckets, build
from dcpjax.runtime.compiling import run_all
from dcpjax.runtime.logit_rows import SampledRows
from dcpjax.runtime.warmup import Step, decode_steps, prompt_steps, steps

OPTIONS = {
    "dtype": "float32",
    "block_size": 128,  # long enough for parts of blocks to be copied
    "max_num_seqs": 9,
    "max_num_batched_tokens": 32,
    "kv_cache_memory_bytes": 2**20,
    "max_model_len": 192,
}
GEOMETRY = CacheGeometry(block_size=16)


def soak(llm: LLM, seed: int, count: int = 40) -> list[list[int]]:
    """Greedy requests of random lengths, many of which begin alike, in batches of random sizes."""
    dice, vocab = random.Random(seed), llm.runner.model.config.vocab_size
    heads = [[dice.randrange(3, vocab) for _ in range(90)] for _ in range(3)]
    said: list[list[int]] = []
    while count > 0:
        prompts, params = [], []
        for _ in range(dice.randint(1, 14)):
            head = dice.choice(heads)[: dice.choice([0, 64, 90])]
            prompts.append(head + [dice.randrange(3, vocab) for _ in range(dice.choice([1, 2, 20, 80]))])
            params.append(SamplingParams(temperature=0, max_tokens=dice.randint(1, 12), ignore_eos=True))
        said += [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        count -= len(prompts)
    return said


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"num_decode_steps": 4},
        {"tensor_parallel_size": 4, "decode_context_parallel_size": 2, "max_num_seqs": 3},
    ],
    ids=["one device", "several decode steps", "four devices"],
)
def test_after_the_whole_warm_up_greedy_requests_compile_nothing(layout: dict[str, Any]) -> None:
    with compilations() as before:
        llm = LLM(GOLDENS / "llama3", progress=False, warmup="all", **(OPTIONS | layout))
    with compilations() as after:
        warm = soak(llm, seed=1)
    assert before
    assert after == []
    assert llm.stats().compile_seconds == 0
    assert llm.stats().prefix_hits > 0
    assert warm == soak(LLM(GOLDENS / "llama3", progress=False, **(OPTIONS | layout)), seed=1)


def test_after_a_warm_up_of_decodes_only_prompts_compile() -> None:
    llm = LLM(GOLDENS / "llama3", progress=False, warmup="decode", **OPTIONS)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = [[5, 6, 7]] * 9
    with compilations() as found:
        stream = llm.stream(prompts, params)
        for _ in prompts:
            next(stream)
        assert found
        found.clear()
        list(stream)
    assert found == []


def test_without_a_warm_up_no_step_is_compiled_before_the_first_request() -> None:
    with compilations() as found:
        LLM(GOLDENS / "llama3", progress=False, **OPTIONS)
    assert not {"jit(forward)", "jit(pick)", "jit(choose)"} & set(found)


@pytest.mark.parametrize("caching", [True, False])
def test_copies_of_blocks_are_compiled_where_prefixes_are_shared(
    caching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warmup, "run_all", lambda jobs, threads: None)
    llm = LLM(GOLDENS / "llama3", progress=False, warmup="all", enable_prefix_caching=caching, **OPTIONS)
    copies = sorted(key for key in llm.runner._compiled if key[0] == "copy")
    assert copies == ([("copy", 1), ("copy", 8), ("copy", 64)] if caching else [])


def test_a_user_who_watches_is_told_how_many_programs_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(warmup, "status", lambda text, shown: told.append(text) or nullcontext())
    llm = LLM(GOLDENS / "llama3", progress=False, warmup="decode", **OPTIONS)
    assert told == [f"compiling {len(llm.runner._compiled)} programs"]


def test_without_a_warm_up_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "status", None)
    LLM(GOLDENS / "llama3", progress=False, **OPTIONS)


def test_an_unknown_extent_is_refused() -> None:
    for wrong in ("everything", True):
        with pytest.raises(ValueError, match=f"^warmup must be one of none, decode, all, but is {wrong!r}$"):
            EngineConfig.from_options({"warmup": wrong})


# --- which steps


def shape(step: Step, shapes: ShapeBuckets) -> tuple[int, int, int]:
    """Tokens, rows and choices of a step's programs."""
    batch = build(step, shapes, GEOMETRY)
    choice = SampledRows.of(step, batch, shapes, 64)
    return len(batch.tokens), len(batch.seats), len(choice.indices) if choice else 0


def programs(step: Step, shapes: ShapeBuckets) -> set[tuple[str | int, ...]]:
    """What tells them apart; steps of single tokens have forward programs of their own."""
    tokens, rows, choices = shape(step, shapes)
    forward = "forward", len(build(step, shapes, GEOMETRY).work.tiles), tokens, rows
    return {forward, ("pick", tokens, choices), ("choose", choices)} if choices else {forward}


@given(
    st.integers(1, 32),
    st.integers(2, 300),
    st.integers(2, 80),
    st.lists(st.tuples(st.integers(1, 80), st.booleans()), min_size=1, max_size=32),
)
def test_every_step_within_the_limits_runs_programs_of_an_example(max_rows, max_tokens, max_model_len, wanted):
    shapes = ShapeBuckets(max_rows=max_rows, max_tokens=max_tokens, table_width=8)
    step, left = [], max_tokens
    for number, (count, samples) in enumerate(wanted[:max_rows]):
        count = min(count, left, max_model_len)
        if count:
            step.append(replace(entry(number, 0, count), samples=samples))
            left -= count
    examples = [programs(each, shapes) for each in steps(shapes, max_model_len, "all")]
    assert programs(sorted(step, key=lambda each: each.count > 1), shapes) <= set.union(*examples)


def test_examples_are_few() -> None:
    shapes = ShapeBuckets(max_rows=256, max_tokens=512, table_width=8)
    decodes, prompts = (
        {shape(step, shapes)[:2] for step in found} for found in (decode_steps(shapes), prompt_steps(shapes, 8192))
    )
    assert decodes == {(1, 1), (8, 8), (16, 16), (32, 32), (64, 64), (128, 128), (256, 256)}
    assert len(prompts) == 24


def test_no_example_has_more_tokens_than_its_rows_can_hold() -> None:
    shapes = ShapeBuckets(max_rows=8, max_tokens=512, table_width=8)
    assert max(shape(step, shapes)[0] for step in prompt_steps(shapes, 20)) == 256  # 8 x 20 = 160 tokens at most
    assert (64, 1) not in {shape(step, shapes)[:2] for step in prompt_steps(shapes, 32)}


# --- running the compilations


@pytest.mark.parametrize("threads", [1, 3])
def test_a_compilation_that_fails_is_raised_and_those_not_begun_are_dropped(threads: int) -> None:
    begun: list[int] = []

    def job(number: int) -> Any:
        def run() -> None:
            begun.append(number)
            if number == 0:
                raise RuntimeError("no memory")

        return run

    with pytest.raises(RuntimeError, match="no memory"):
        run_all([job(number) for number in range(3)], threads)
    assert 0 in begun


def test_all_compilations_run_whatever_the_threads() -> None:
    done: list[int] = []
    run_all([lambda number=number: done.append(number) for number in range(20)], 4)
    assert sorted(done) == list(range(20))
