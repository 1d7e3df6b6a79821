"""A long prompt beside streams: it neither starves nor holds them up. Times follow a formula, not this machine."""

from collections.abc import Sequence

import numpy as np
import pytest

from dcpjax.engine.blocks import BlockManager
from dcpjax.engine.limits import step_limits
from dcpjax.engine.request import Request, Status
from dcpjax.engine.scheduler import Scheduled, Scheduler
from dcpjax.models.config import ModelConfig, from_hf
from dcpjax.models.kv_cache import CacheGeometry

STREAMS = 8
SMALL = {  # two layers of SmolLM2's width, as in scripts/bench_fairness.py
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 65536,
    "tie_word_embeddings": True,
}
TINY = SMALL | {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def milliseconds(step: Sequence[Scheduled]) -> float:
    """A step of `SMALL` in float32 on two cores, from measurements at positions 0, 8,192 and 32,000.

    Beside decodes, chunks run in tiles of 8, those of more than 24 tokens in one of 64.
    """
    *decodes, last = step
    if last.count == 1:
        return 11
    if not decodes:
        return last.count * (0.09 + 3.05e-5 * last.start)
    if last.count > 24:
        return 13.5 + 3.2e-3 * last.start
    tokens = -(-last.count // 8) * 8
    return 11 + 4.2e-4 * last.start + tokens * (0.05 + 2.2e-5 * last.start)


def run(config: ModelConfig, prompt: int, streams: int) -> list[float]:
    """Milliseconds of the steps from the arrival of a prompt to its first token."""
    limits = step_limits(
        config,
        "cpu",
        max_num_seqs=STREAMS + 1,
        max_num_batched_tokens=512,
        max_mixed_prefill_tokens=None,
        enable_prefix_caching=False,
    )
    plan = Scheduler(BlockManager(1000), CacheGeometry(block_size=256), limits)
    for number in range(streams):
        plan.add(Request(number=number, prompt_token_ids=[number], max_tokens=20_000))
    if streams:
        advance(plan)
    long = Request(number=100, prompt_token_ids=[7] * prompt, max_tokens=1)
    plan.add(long)
    times = list[float]()
    while long.status is not Status.FINISHED:
        times.append(milliseconds(advance(plan)))
    return times


def advance(plan: Scheduler) -> list[Scheduled]:
    step = plan.schedule()
    plan.update(step)
    for entry in step:
        plan.token_arrived(entry)
        if entry.samples:
            entry.request.output_token_ids.append(1)
        if len(entry.request.output_token_ids) == entry.request.max_tokens:
            entry.request.finish("length")
            plan.release(entry.request)
    return step


@pytest.mark.parametrize("prompt", [8192, 32768])
def test_a_long_prompt_and_the_streams_beside_it_each_take_at_most_three_times_as_long(prompt):
    config = from_hf(SMALL)
    alone, beside = run(config, prompt, streams=0), run(config, prompt, streams=STREAMS)
    assert sum(beside) <= 3 * sum(alone)
    assert np.percentile(beside, 99) <= 3 * 11


@pytest.mark.parametrize(("shape", "streams"), [(SMALL, 8), (TINY, 8), (TINY, 1)])
def test_a_prompt_of_32768_tokens_takes_no_more_than_2600_steps_beside_streams(shape, streams):
    assert len(run(from_hf(shape), 32768, streams)) <= 2600


@pytest.mark.parametrize(
    ("platform", "asked", "steps", "streamed"),
    [("cpu", "auto", 1, 1), ("gpu", "auto", 8, 1), ("cpu", 4, 4, 4), ("tpu", 2, 2, 2), ("gpu", 1, 1, 1)],
)
def test_several_decode_steps_run_where_asked_and_on_accelerators_where_nobody_waits(platform, asked, steps, streamed):
    limits = step_limits(
        from_hf(TINY),
        platform,
        max_num_seqs=1,
        max_num_batched_tokens=None,
        max_mixed_prefill_tokens=None,
        enable_prefix_caching=False,
        num_decode_steps=asked,
    )
    assert (limits.num_decode_steps, limits.num_streamed_steps) == (steps, streamed)
