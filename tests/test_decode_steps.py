"""Real models with several decode steps in one call: tokens, texts, ends and log-probabilities stay as they are."""

from functools import cache
from functools import partial as bind
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from compiled_steps import collectives, compiled, compiled_choice, make_runner, run, scheduled
from harness import golden_runner, sample
from small_models import character_model

from dcpjax import LLM, SamplingParams
from dcpjax.api.outputs import RequestOutput
from dcpjax.engine.scheduler import Scheduled
from dcpjax.runtime.runner import Runner

LAYOUTS = {
    "one device": {},
    "tp=3 x dcp=2": {"tensor_parallel_size": 6, "decode_context_parallel_size": 2},
}
KEPT = (("tp=3 x dcp=2", 8),)  # the others run in the sweep
SMALL_POOL = {"kv_cache_memory_bytes": 2**16, "max_model_len": 96}  # preempts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return character_model(tmp_path_factory.mktemp("decode_steps") / "model")


def make(folder: Path, steps: int, **options: Any) -> LLM:
    usual = {"dtype": "float32", "block_size": 16, "max_num_seqs": 32, "kv_cache_memory_bytes": 2**20}
    return LLM(folder, progress=False, num_decode_steps=steps, **(usual | options))


# Kinds of requests, four of each. The last two run one step at a time, and are short.
KINDS: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 19},
    {"temperature": 1, "max_tokens": 14, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.7, "max_tokens": 17, "logprobs": 3},
    {"temperature": 1, "max_tokens": 20, "logit_bias": {0: 5.0, 9: 2.0}},  # 0 ends a request
    {"temperature": 1, "max_tokens": 16, "allowed_token_ids": list(range(3, 60))},
    {"temperature": 1, "max_tokens": 18, "stop": list("bdfhjlnprtvxz"), "logprobs": 0},
    {"temperature": 0, "max_tokens": 3, "frequency_penalty": 0.5},
    {"temperature": 0, "max_tokens": 4, "min_tokens": 3, "bad_words": ["ab"]},
]


def prompts() -> list[list[int]]:
    """32, some of which begin alike."""
    dice = np.random.default_rng(5)
    heads = dice.integers(3, 99, (3, 20)).tolist()
    return [heads[number % 3][: 4 * (number % 6)] + dice.integers(3, 99, 3).tolist() for number in range(32)]


def params(kinds: int = len(KINDS)) -> list[SamplingParams]:
    return [SamplingParams(seed=number, **KINDS[number % kinds]) for number in range(32)]


def seen(result: RequestOutput) -> tuple[Any, ...]:
    (output,) = result.outputs
    listed = [{token: entry.rank for token, entry in each.items()} for each in output.logprobs or []]
    return output.token_ids, output.text, output.finish_reason, output.stop_reason, output.error, listed


def logprobs(result: RequestOutput) -> list[float]:
    return [entry.logprob for each in result.outputs[0].logprobs or [] for entry in each.values()]


@cache
def one_step_at_a_time(folder: Path) -> list[RequestOutput]:
    return make(folder, 1).generate(prompts(), params())


def check_same(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    assert list(map(seen, found)) == list(map(seen, expected))
    for ours, theirs in zip(found, expected, strict=True):
        assert logprobs(ours) == pytest.approx(logprobs(theirs), abs=5e-5)
        assert ours.metrics
        assert theirs.metrics
        assert ours.metrics.num_generated_tokens == theirs.metrics.num_generated_tokens


@pytest.mark.parametrize(
    ("layout", "steps"), sample([(layout, steps) for layout in LAYOUTS for steps in (4, 8)], *KEPT)
)
def test_a_mixed_set_of_32_requests_gets_the_same(folder: Path, layout: str, steps: int) -> None:
    expected, llm = one_step_at_a_time(folder), make(folder, steps, **LAYOUTS[layout])
    check_same(llm.generate(prompts(), params()), expected)
    ends = {(each.outputs[0].finish_reason, each.outputs[0].stop_reason is None) for each in expected}
    assert ends == {("length", True), ("stop", True), ("stop", False)}
    assert llm.stats().fused_steps > 0


@pytest.mark.parametrize("steps", sample([4, 8], 4))
def test_a_small_pool_preempts_and_they_get_the_same(folder: Path, steps: int) -> None:
    """Greedy and random requests in turn, some of which find the beginnings of others in the cache."""
    llm, roomy = make(folder, steps, **SMALL_POOL), make(folder, 1)
    check_same(llm.generate(prompts(), params(2)), roomy.generate(prompts(), params(2)))
    stats = llm.stats()
    assert min(stats.fused_steps, stats.preemptions, stats.prefix_hits) > 0


def test_streams_get_their_tokens_one_by_one_and_may_be_closed_midway(folder: Path) -> None:
    llm, alone = make(folder, 4), make(folder, 1)
    greedy = SamplingParams(temperature=0, max_tokens=18, ignore_eos=True)
    stream = llm.stream(prompts()[:4], greedy)
    events = [next(stream) for _ in range(10)]
    stream.close()
    assert all(len(event.token_ids) == 1 for event in events)
    assert llm.stats().num_used_blocks == 0
    found, expected = (list(each.stream(prompts()[:4], greedy)) for each in (llm, alone))
    for index in range(4):
        ours, theirs = ([event for event in each if event.prompt_index == index] for each in (found, expected))
        assert ours == theirs
    assert llm.stats().fused_steps > alone.stats().fused_steps == 0


def test_interrupts_and_errors_of_calls_of_several_steps_leave_the_engine_usable(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, greedy = make(folder, 4), SamplingParams(temperature=0, max_tokens=18, ignore_eos=True)
    expected = list(map(seen, make(folder, 1).generate(prompts()[:4], greedy)))
    calls = llm.stats().fused_steps

    def interrupt_after(method: Any, *given: Any) -> Any:
        result = method(*given)
        if llm.stats().fused_steps > calls:
            raise KeyboardInterrupt
        return result

    def fail(*_: Any) -> Any:
        jax.tree.map(lambda array: array.delete(), llm.runner.cache)  # as if the donated cache was lost midway
        raise RuntimeError("out of memory")

    for moment in ("_launch", "_collect", "_apply"):
        with monkeypatch.context() as broken:
            broken.setattr(llm.engine, moment, bind(interrupt_after, getattr(llm.engine, moment)))
            with pytest.raises(KeyboardInterrupt):
                llm.generate(prompts()[:4], greedy)
        assert llm.stats().num_used_blocks == 0
        assert list(map(seen, llm.generate(prompts()[:4], greedy))) == expected
        calls = llm.stats().fused_steps
    with monkeypatch.context() as broken:
        broken.setattr(llm.runner.programs, "decode", fail)
        found = llm.generate(prompts()[:4], greedy)
    assert [each.error for each in found] == ["RuntimeError: out of memory"] * 4
    assert list(map(seen, llm.generate(prompts()[:4], greedy))) == expected


def test_auto_is_one_step_on_a_cpu(folder: Path) -> None:
    llm = LLM(folder, progress=False, dtype="float32", block_size=16, kv_cache_memory_bytes=2**20)
    llm.generate(prompts()[:2], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    assert llm.stats().fused_steps == 0


# --- the program


def ahead(lengths: list[int], steps: int) -> list[Scheduled]:
    step = scheduled(lengths)
    for number, entry in enumerate(step):
        entry.steps, entry.request.seat = steps, number
    return step


def compiled_decode(runner: Runner, step: list[Scheduled]) -> Any:
    (program,) = runner.programs_of(step).values()
    arguments = program.args[1:]  # type: ignore[attr-defined]
    return runner.programs.decode.lower(*arguments).compile()


@pytest.mark.parametrize(("tp", "dcp"), sample([(1, 1), (1, 8), (4, 2)], (1, 1), (4, 2)))
def test_the_loop_holds_the_collectives_of_one_step_and_updates_the_cache_in_place(tp: int, dcp: int) -> None:
    runner = make_runner(tp, dcp, num_decode_steps=8)
    program, single = compiled_decode(runner, ahead([20, 40], 8)), scheduled([20, 40])
    assert collectives(program) == collectives(compiled(runner, single)) + collectives(compiled_choice(runner, single))
    per_device = sum(array.addressable_shards[0].data.nbytes for array in jax.tree.leaves(runner.cache))
    assert program.memory_analysis().alias_size_in_bytes == per_device
    shape = ",".join(map(str, runner.cache[0].keys.addressable_shards[0].data.shape))
    assert not [line for line in program.as_text().splitlines() if " copy(" in line and f"[{shape}]" in line]


def test_the_loop_keeps_nothing_that_follows_from_the_weights_alone() -> None:
    """Such as a table of other numbers: XLA would take it out of the loop, and each call would compute all of it."""
    runner = make_runner(1, 1, num_decode_steps=8, dtype="bfloat16")
    program, single = compiled_decode(runner, ahead([20, 40], 8)), compiled(runner, scheduled([20, 40]))
    assert program.memory_analysis().temp_size_in_bytes < 1.3 * single.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    ("family", "tp", "dcp"),
    sample(
        [(family, tp, dcp) for family in ("llama3", "deepseek-v3") for tp, dcp in ((1, 1), (4, 2))],
        ("llama3", 4, 2),
        ("deepseek-v3", 1, 1),
    ),
)
def test_unused_slots_change_nothing(family: str, tp: int, dcp: int) -> None:
    """Nor do rows that have ended: they write nothing, so that what they would read stays unused."""

    def tokens(poison: float) -> list[list[int]]:
        runner = golden_runner(family, tp, dcp, num_decode_steps=8)
        runner.cache = jax.tree.map(lambda array: array.at[:].set(poison), runner.cache)
        for number, length in enumerate((19, 39)):
            run(runner, [prompt_entry(number, length)])
        step = ahead([20, 40], 8)
        step[1].steps = 3
        result = runner.collect(runner.launch(step))
        assert all(all(each.finite) for each in (result, *result.following))
        rows = [list(each.tokens) for each in (result, *result.following)]
        return [[row[0] for row in rows], [row[1] for row in rows[:3]]]

    def prompt_entry(number: int, length: int) -> Scheduled:
        entry = scheduled([length] * (number + 1), length)[number]
        entry.request.seat = number
        return entry

    assert tokens(np.nan) == tokens(0.0)
