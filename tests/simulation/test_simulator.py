import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
import pytest
from engine_mock import Launch, MockRunner
from hypothesis import given
from hypothesis import strategies as st
from small_models import NINE_HEADS

from dcpjax.cli import simulate as simulate_command
from dcpjax.cli.commands import COMMANDS, Command, main
from dcpjax.engine.engine import Engine, StepResult
from dcpjax.engine.request import Request, Status
from dcpjax.engine.scheduler import Scheduled
from dcpjax.models.kv_cache import CacheGeometry
from dcpjax.planning.floor import floor
from dcpjax.planning.hardware import find_hardware
from dcpjax.planning.model_config import Model
from dcpjax.planning.planner import plan
from dcpjax.sharding.mesh import Layout
from dcpjax.simulation.arrivals import prompt
from dcpjax.simulation.cost import head_cost, step_floor
from dcpjax.simulation.replay import PARAMS
from dcpjax.simulation.result import Percentiles, SimulatedStep, Simulation
from dcpjax.simulation.simulator import Simulator, _limits, simulate
from dcpjax.simulation.table import conclusion, remarks, to_text
from dcpjax.simulation.trace import TraceRequest, ideal_hit_rate, synthesise

QWEN = str(Path(__file__).parents[1] / "goldens" / "qwen3")
VOCAB = 512
SMALL_KIMI = {"num_hidden_layers": 2, "first_k_dense_replace": 1, "n_routed_experts": 16}
KIMI = {"hf_overrides": SMALL_KIMI, "tensor_parallel_size": 8, "dtype": "bfloat16"}


def request(input_length: int, output_length: int, *hash_ids: int, unit: int = 8, timestamp: float = 0) -> TraceRequest:
    return TraceRequest(
        timestamp=timestamp,
        input_length=input_length,
        output_length=output_length,
        hash_ids=hash_ids,
        tokens_per_hash=unit,
    )


@st.composite
def traffic(draw: st.DrawFn) -> list[TraceRequest]:
    """Few ids, so that prompts often begin alike; lengths end anywhere in their last id's tokens."""
    ids = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=8))
    return [request(8 * len(own) - draw(st.integers(0, 7)), draw(st.integers(1, 9)), *own) for own in ids]


def alike(count: int, length: int = 4096, output: int = 64) -> list[TraceRequest]:
    """Requests of one size that share nothing."""
    per = -(-length // 512)
    return [request(length, output, *range(n * per, n * per + per), unit=512) for n in range(count)]


def cache_of(blocks: int, model: str, **options) -> dict[str, int]:
    """The option that gives each device so many blocks."""
    return {"kv_cache_memory_bytes": blocks * plan(model, **options).row.block_bytes}


# The engine decides: the simulator adds a clock and nothing else.


class Answering(MockRunner):
    """A mock device whose answers tell requests apart: two of one prompt have no more than it in common."""

    def collect(self, launched: Launch) -> StepResult:
        result = super().collect(launched)
        return replace(result, tokens=np.array([1000 + entry.request.number for entry in launched.step], np.int32))


def direct(requests: Sequence[TraceRequest], simulator: Simulator, users: int | None) -> list[tuple[int, ...]]:
    """What a mock device is asked for, step by step, by the real engine and prompts made for a model."""
    row, seen = simulator.plan.row, list[tuple[int, ...]]()

    def note(step: Sequence[Scheduled]) -> None:
        now = engine.scheduler
        decodes = [e for e in step if e.count == 1 and e.samples and e.start >= len(e.request.prompt_token_ids)]
        seen.append(
            (
                len(now.running),
                len(now.waiting),
                engine.blocks.num_used,
                sum(e.count for e in step) - len(decodes),
                len(decodes),
                now.counters.prefix_hits,
                now.counters.preemptions,
            )
        )

    runner = Answering(CacheGeometry(block_size=row.block_size, dcp=row.dcp), after_launch=note)
    engine = Engine(runner, num_blocks=row.num_blocks, limits=_limits(simulator.options, simulator.plan))
    waiting = list(enumerate(requests))
    free = users or len(requests)
    while waiting or engine.has_work:
        for number, one in waiting[:free]:
            tokens = synthesise(one, VOCAB)
            made = Request(number=number, prompt_token_ids=tokens, params=PARAMS, max_tokens=one.output_length)
            engine.add(made)
        waiting, free = waiting[free:], free - min(free, len(waiting))
        free += sum(changed.status is Status.FINISHED for changed in engine.step())
    return seen


def steps_of(simulation: Simulation) -> list[tuple[int, ...]]:
    """The timeline with hits and preemptions counted up, as the engine counts them."""
    hits = preemptions = 0
    told = []
    for step in simulation.timeline:
        hits, preemptions = hits + step.found_tokens, preemptions + step.preempted
        told.append(
            (step.running, step.waiting, step.used_blocks, step.prefill_tokens, step.decode_tokens, hits, preemptions)
        )
    return told


@given(
    requests=traffic(),
    blocks=st.integers(11, 24),
    users=st.sampled_from([None, 1, 2, 4]),
    seats=st.integers(1, 5),
    caching=st.booleans(),
)
def test_every_step_is_that_of_the_engine_with_a_mock_device(requests, blocks, users, seats, caching):
    options = {"block_size": 4, "max_num_seqs": seats, "max_num_batched_tokens": 24, "max_mixed_prefill_tokens": 16}
    options |= {"enable_prefix_caching": caching} | cache_of(blocks, QWEN, block_size=4)
    options |= {"arrivals": "all"} if users is None else {"arrivals": "closed", "concurrency": users}
    simulator = Simulator(requests, QWEN, **options)
    assert simulator.plan.row.num_blocks == blocks
    simulation = simulator.run()
    assert steps_of(simulation) == direct(requests, simulator, users)
    check_totals(simulation, requests)


def test_a_crowded_cache_preempts_as_the_engine_does():
    requests = [request(16, 9, n, n + 1) for n in range(0, 12, 2)]
    options = {"block_size": 4, "arrivals": "all"} | cache_of(11, QWEN, block_size=4)
    simulator = Simulator(requests, QWEN, **options)
    simulation = simulator.run()
    assert simulation.preemptions > 0
    assert steps_of(simulation) == direct(requests, simulator, None)
    check_totals(simulation, requests)


def test_parts_of_blocks_are_copied_as_in_the_engine():
    requests = [request(200, 3, 1, 2, unit=100), request(200, 3, 1, 3, unit=100)]
    options = {"block_size": 80, "arrivals": "closed", "concurrency": 1} | cache_of(8, QWEN, block_size=80)
    simulator = Simulator(requests, QWEN, **options)
    simulation = simulator.run()
    assert simulation.prefix_hits == 80  # 20 tokens more are too few to copy
    assert steps_of(simulation) == direct(requests, simulator, 1)
    longer = [replace(one, tokens_per_hash=150, input_length=300) for one in requests]
    simulator = Simulator(longer, QWEN, **options)
    simulation = simulator.run()
    assert simulation.prefix_hits == 150  # 80 + 70
    assert steps_of(simulation) == direct(longer, simulator, 1)


def check_totals(simulation: Simulation, requests: Sequence[TraceRequest]) -> None:
    """The timeline's sums are the totals that the engine counts on its own."""
    timeline = simulation.timeline
    assert simulation.output_tokens == sum(one.output_length for one in requests)
    assert sum(step.preempted for step in timeline) == simulation.preemptions
    assert sum(step.found_tokens for step in timeline) == simulation.prefix_hits
    ends = [step.time + step.seconds for step in timeline]
    assert all(end <= later.time + 1e-12 for end, later in zip(ends, timeline[1:], strict=False))
    assert simulation.duration == pytest.approx(ends[-1])
    if simulation.arrivals != "trace":  # there is always something to do
        assert simulation.duration == pytest.approx(sum(step.seconds for step in timeline))
    if not simulation.preemptions:
        assert sum(step.prefill_tokens for step in timeline) + simulation.prefix_hits == simulation.input_tokens
        assert sum(step.decode_tokens for step in timeline) == simulation.output_tokens - len(requests)


# Prompts.


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens two prompts have in common."""
    different = (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(different, min(len(one), len(other)))


@given(traffic())
def test_prompts_begin_alike_exactly_where_the_traces_do(requests):
    for one in requests:
        assert len(prompt(one)) == one.input_length
        for other in requests:
            made = shared(synthesise(one, VOCAB), synthesise(other, VOCAB))
            assert shared(prompt(one), prompt(other)) == made


@given(traffic())
def test_one_user_and_a_large_cache_find_what_an_ideal_cache_finds(requests):
    options = {"block_size": 4, "arrivals": "closed", "concurrency": 1} | cache_of(500, QWEN, block_size=4)
    simulation = simulate(requests, QWEN, **options)
    assert simulation.prefix_hit_rate == pytest.approx(ideal_hit_rate(requests, 4))


def test_without_prefix_caching_nothing_is_found():
    requests = [request(16, 2, 1, 2)] * 3
    options = {"block_size": 4, "arrivals": "closed", "concurrency": 1}
    assert simulate(requests, QWEN, **options).prefix_hits == 24
    assert simulate(requests, QWEN, **options, enable_prefix_caching=False).prefix_hits == 0


# Time.


def entry(start: int, count: int, samples: bool = True) -> Scheduled:
    return Scheduled(request=None, start=start, count=count, block_table=[], samples=samples)  # type: ignore[arg-type]


@pytest.mark.parametrize("dcp", [1, 2, 8])
@pytest.mark.parametrize("requests", [1, 7, 300])
def test_a_step_of_decodes_takes_what_the_planner_says(dcp, requests):
    planned = plan("kimi-k2", **KIMI, decode_context_parallel_size=dcp)
    layout = Layout(tensor_parallel_size=8, decode_context_parallel_size=dcp)
    floor_of = step_floor(planned.row.cost, head_cost(planned.config, layout, planned.dtype), planned.hardware)
    expected = floor(planned.row.cost, planned.hardware, requests, 5000)
    told = floor_of([entry(4999, 1)] * requests)
    assert astuple(told) == pytest.approx(astuple(expected))


def test_a_prompt_costs_its_pairs_of_tokens_and_no_logits_until_its_end():
    planned = plan("kimi-k2", **KIMI, decode_context_parallel_size=8)
    cost, hardware = planned.row.cost, planned.hardware
    head = head_cost(planned.config, Layout(tensor_parallel_size=8, decode_context_parallel_size=8), planned.dtype)
    assert head.flops == 2 * planned.config.hidden_size * planned.config.vocab_size / 8
    floor_of = step_floor(cost, head, hardware)
    middle, end = floor_of([entry(1000, 3, samples=False)]), floor_of([entry(1000, 3)])
    pairs = 1001 + 1002 + 1003
    assert end.compute_seconds - middle.compute_seconds == pytest.approx(head.flops / hardware.flops)
    assert end.exchange_seconds - middle.exchange_seconds == pytest.approx(7 / 8 * 4 * 163840 / hardware.link)
    assert middle.compute_seconds == pytest.approx(
        (3 * cost.weight_flops - 3 * head.flops + pairs * cost.kv_flops) / hardware.flops
    )
    read = cost.weight_bytes + cost.expert_bytes * (1 - (1 - cost.experts_chosen) ** 3) + 1003 * cost.kv_bytes
    assert middle.memory_seconds == pytest.approx(read / hardware.bandwidth)
    assert middle.latency_seconds == end.latency_seconds > 0


def floor_and_cost(model: Model, **options):
    planned = plan(model, hardware="b200", **options)
    layout = Layout(tensor_parallel_size=8, decode_context_parallel_size=8)
    head = head_cost(planned.config, layout, planned.dtype)
    return step_floor(planned.row.cost, head, planned.hardware), planned.row.cost, planned.hardware


def test_a_chunk_with_many_tokens_gathers_its_cached_keys_and_one_with_few_its_queries():
    floor_of, cost, hardware = floor_and_cost("kimi-k2", **KIMI, decode_context_parallel_size=8, kv_cache_dtype="fp8")
    elsewhere = cost.exchange_bytes - cost.attention_exchange_bytes
    logits = 7 / 8 * 4 * 163840
    keys, queries = floor_of([entry(9000, 2000, samples=False)]), floor_of([entry(9000, 2, samples=False)])
    assert cost.layers == 2
    pieces = 2 * 2 * 7 * 1024 * 576  # of 8,192 positions, in two layers
    assert keys.exchange_seconds == pytest.approx((2000 * (elsewhere - logits) + pieces) / hardware.link)
    assert queries.exchange_seconds == pytest.approx(2 * (cost.exchange_bytes - logits) / hardware.link)
    others = cost.collectives - cost.attention_collectives
    assert keys.latency_seconds == pytest.approx((others + 2 * 2) * hardware.latency)
    assert queries.latency_seconds == pytest.approx(cost.collectives * hardware.latency)


def test_beside_gathered_keys_decodes_send_their_queries():
    floor_of, cost, hardware = floor_and_cost("kimi-k2", **KIMI, decode_context_parallel_size=8, kv_cache_dtype="fp8")
    prompt, decodes = entry(9000, 2000, samples=False), [entry(5000, 1)] * 3
    both, alone = floor_of([prompt, *decodes]), floor_of([prompt])
    assert both.exchange_seconds - alone.exchange_seconds == pytest.approx(3 * cost.exchange_bytes / hardware.link)
    assert both.latency_seconds - alone.latency_seconds == pytest.approx(cost.attention_collectives * hardware.latency)


def test_gathered_keys_are_written_and_read_by_each_device():
    floor_of, cost, hardware = floor_and_cost("kimi-k2", **KIMI, decode_context_parallel_size=8, kv_cache_dtype="fp8")
    first, later = floor_of([entry(0, 2000)]), floor_of([entry(9000, 2000)])
    assert (later.memory_seconds - first.memory_seconds) * hardware.bandwidth == pytest.approx(
        9000 * cost.kv_bytes + 2 * 2 * 9000 * 576
    )


def test_heads_that_ranks_share_attend_on_each_of_them():
    floor_of, cost, hardware = floor_and_cost(
        NINE_HEADS, tensor_parallel_size=8, decode_context_parallel_size=8, dtype="bfloat16"
    )
    chunk, pairs = entry(30, 20), 20 * 30 + 20 * 21 / 2
    weights = (20 * cost.weight_flops - 19 * 2 * 36 * 32 / 8) / hardware.flops
    attention = floor_of([chunk]).compute_seconds - weights
    assert attention == pytest.approx(2 * 8 / 9 * pairs * cost.kv_flops / hardware.flops)


def test_tied_embeddings_are_the_head():
    planned = plan(QWEN, hf_overrides={"tie_word_embeddings": True})
    expected = 2 * planned.config.hidden_size * planned.config.vocab_size
    assert head_cost(planned.config, Layout(), planned.dtype).flops == expected


def test_a_request_alone_waits_for_its_own_steps_only():
    simulation = simulate([request(40, 4, *range(5))], QWEN, max_num_batched_tokens=16, max_num_seqs=1)
    timeline = simulation.timeline
    assert [(step.prefill_tokens, step.decode_tokens) for step in timeline] == [(16, 0), (16, 0), (8, 0)] + [(0, 1)] * 3
    assert simulation.queue_time == Percentiles(p50=0.0, p99=0.0)
    assert simulation.time_to_first_token.p50 == pytest.approx(sum(step.seconds for step in timeline[:3]))
    assert simulation.inter_token_gap.p50 == pytest.approx(timeline[4].seconds)
    assert simulation.duration == pytest.approx(sum(step.seconds for step in timeline))
    assert simulation.throughput == pytest.approx(4 / simulation.duration)
    assert simulation.total_throughput == pytest.approx(44 / simulation.duration)


def test_who_finds_no_seat_waits_for_the_one_before():
    simulation = simulate([request(8, 3, 1), request(8, 3, 2)], QWEN, arrivals="all", max_num_seqs=1)
    assert [step.waiting for step in simulation.timeline[:3]] == [1, 1, 1]
    assert simulation.queue_time.p99 > sum(step.seconds for step in simulation.timeline[:2])
    assert not simulation.saturated  # for want of a seat, not of cache


def test_recorded_times_are_kept_and_can_be_run_through_faster():
    far = [request(8, 2, 1, timestamp=3000), request(8, 2, 2, timestamp=5000), request(8, 2, 3, timestamp=1000)]
    simulation = simulate(far, QWEN)
    starts = [step.time for step in simulation.timeline if step.prefill_tokens]
    assert starts == [0.0, 2.0, 4.0]
    assert simulation.duration == pytest.approx(4.0, abs=0.01)
    assert simulation.queue_time.p99 == 0.0
    fast = simulate(far, QWEN, speedup=4)
    assert [step.time for step in fast.timeline if step.prefill_tokens] == [0.0, 0.5, 1.0]
    check_totals(simulation, far)


def test_users_send_the_next_request_when_the_last_is_answered():
    simulation = simulate(alike(6), "kimi-k2", **KIMI, arrivals="closed", concurrency=2)
    assert simulation.running_max == 2
    assert all(step.running + step.waiting <= 2 for step in simulation.timeline)
    assert simulation.max_num_seqs == 2


def test_the_same_comes_out_twice():
    requests = [request(40 - n, 3 + n, n % 3, 1, 2, 3, 4) for n in range(8)]
    simulator = Simulator(requests, QWEN, block_size=4, arrivals="closed", concurrency=3)
    assert (
        simulator.run() == simulator.run() == simulate(requests, QWEN, block_size=4, arrivals="closed", concurrency=3)
    )


def test_percentiles_lie_between_their_neighbours():
    found = Percentiles.of([3.0, 1.0, 2.0, 4.0])
    assert (found.p50, found.p99) == (2.5, pytest.approx(3.97))
    assert Percentiles.of([7.0]) == Percentiles(p50=7.0, p99=7.0)
    assert Percentiles.of([]) == Percentiles(p50=0.0, p99=0.0)


# Capacity.


def crowd(dcp: int, users: int) -> Simulation:
    """Twelve times 4,160 tokens against a cache that holds ten blocks of 256 on each device: 16 MLA blocks each."""
    planned = plan("kimi-k2", **KIMI, decode_context_parallel_size=1)
    return simulate(
        alike(24),
        "kimi-k2",
        **KIMI,
        decode_context_parallel_size=dcp,
        kv_cache_memory_bytes=70 * planned.row.block_bytes,
        arrivals="closed",
        concurrency=users,
        max_num_batched_tokens=8192,
        max_mixed_prefill_tokens=8192,
    )


def test_split_by_position_a_latent_cache_holds_eight_times_the_tokens_and_stays_free():
    tensor, context = crowd(1, 12), crowd(8, 12)
    assert context.cache_tokens == 8 * tensor.cache_tokens
    assert tensor.saturated
    assert tensor.cache_usage_max > 0.95
    assert tensor.waiting_max >= 8
    assert not context.saturated
    assert context.cache_usage_max < 0.5
    assert context.running_mean > 2 * tensor.running_mean
    few = crowd(1, 4)
    assert not few.saturated
    text = conclusion([few, tensor, crowd(8, 4), context])
    assert text.startswith("dcp=1 saturates at 12 users: up to ")
    assert "; dcp=8 does not saturate, with up to " in text
    assert text.endswith(
        f"; at 12 users dcp=8 generates {context.throughput / tensor.throughput:.2g} x the tokens/s of dcp=1."
    )
    assert not conclusion([few]).endswith("the tokens/s of dcp=1.")


def test_prompts_held_back_by_the_steps_limits_are_told():
    held = simulate(alike(12), "kimi-k2", **KIMI, arrivals="all", max_num_seqs=12, max_mixed_prefill_tokens=16)
    assert held.waiting_mean >= 1
    assert held.short_of_cache == 0
    assert "raise max_mixed_prefill_tokens" in remarks([held])[0]
    assert len(remarks([simulate(alike(1), "kimi-k2", **KIMI)])) == 1


# Refusals.


@pytest.mark.parametrize(
    ("requests", "options", "sentence"),
    [
        ([], {}, "requests must hold at least one request"),
        (alike(1, 512, 1), {"context_length": 1}, "unknown option 'context_length'"),
        (alike(1), {"concurrency": 4}, "concurrency must come with arrivals=closed, but arrivals is 'trace'"),
        (alike(1), {"arrivals": "closed"}, "concurrency must be given with arrivals=closed"),
        (alike(1), {"arrivals": "none"}, "arrivals must be one of trace, all, closed, but is 'none'"),
        (alike(1), {"speedup": 0}, "speedup must be a positive number, but is 0; use 1"),
        (alike(1), {"speedup": 2, "arrivals": "all"}, "speedup must be 1 with arrivals=all, but is 2"),
        (alike(1), {"max_num_seqs": 0}, "max_num_seqs must be an integer of at least 1, but is 0"),
        (alike(1), {"enable_prefix_caching": 1}, "enable_prefix_caching must be True or False, but is 1"),
        (alike(1), {"tensor_parallel_size": 6}, "decode_context_parallel_size must suit tensor_parallel_size=6"),
        ([request(8, 505, 1)], {}, "request 1 has 8 \\+ 505 tokens"),
        (
            [request(8, 1, 1), request(40, 9, *range(5))],
            {"block_size": 4} | cache_of(12, QWEN, block_size=4),
            "a request of the trace must fit the KV cache of 48 tokens at dcp=1, but request 2 has 40 \\+ 9 tokens; "
            "raise kv_cache_memory_bytes or decode_context_parallel_size",
        ),
        (alike(1, 512, 1), {"kv_cache_memory_bytes": 1}, "with 0 blocks of cache"),
        (alike(1, 512, 1), {"kv_cache_memory_bytes": 10**12}, "weights and cache must fit the 162000000000 bytes"),
    ],
)
def test_mistakes_are_refused_with_a_sentence(requests, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        simulate(requests, QWEN, **options)


def test_a_trace_of_exactly_the_caches_size_runs():
    options = {"block_size": 4} | cache_of(12, QWEN, block_size=4)
    assert simulate([request(40, 8, *range(5))], QWEN, **options).output_tokens == 8


def test_a_machine_far_larger_than_the_trace_is_no_burden():
    simulation = simulate([request(40, 9, *range(5))], QWEN, block_size=4)
    assert simulation.num_blocks > 10**7
    assert simulation.cache_usage_max == max(step.used_blocks for step in simulation.timeline) / simulation.num_blocks


# What is shown.


def test_a_simulation_reads_as_a_few_lines_and_never_as_html_of_the_models_name():
    simulation = simulate([request(16, 2, 1, 2)] * 2, QWEN, arrivals="closed", concurrency=1, block_size=4)
    lines = repr(replace(simulation, model="small")).splitlines()
    assert lines[:3] == [
        "Simulation",
        "  model: small, float32 weights, float32 cache",
        "  layout: tp=1, dcp=1, 1 x B200",
    ]
    assert "  requests: 2 (closed from 1 user), 32 prompt tokens, 4 generated" in lines
    assert "  prefix cache: 12 of 32 tokens found (38%)" in lines
    page = replace(simulation, model="<b>&")._repr_html_()
    assert "&lt;b&gt;&amp;" in page
    assert "<b>" not in page
    assert "lower bounds, not forecasts" in page


def test_as_plain_data_it_keeps_every_step_and_every_rate():
    simulation = simulate([request(16, 2, 1, 2)], QWEN)
    read = json.loads(json.dumps(simulation.to_dict()))
    assert read["timeline"]["prefill_tokens"] == [16, 0]
    assert set(read["timeline"]) == set(SimulatedStep.__dataclass_fields__)
    assert read["throughput"] == simulation.throughput
    assert read["time_to_first_token"] == {
        "p50": simulation.time_to_first_token.p50,
        "p99": simulation.time_to_first_token.p99,
    }
    assert read["steps"] == 2
    assert "timeline" not in simulation.to_dict(timeline=False)


def test_means_are_over_time_not_over_steps():
    step = {"exchange_seconds": 0.0, "waiting": 0, "used_blocks": 1, "prefill_tokens": 0, "decode_tokens": 1}
    step |= {"found_tokens": 0, "preempted": 0, "lacks_blocks": False}
    short = SimulatedStep(time=0.0, seconds=1.0, running=1, **step)
    long = SimulatedStep(time=1.0, seconds=3.0, running=5, **step | {"used_blocks": 3, "lacks_blocks": True})
    simulation = replace(simulate([request(8, 1, 1)], QWEN), timeline=(short, long), num_blocks=4)
    assert simulation.running_mean == 4.0
    assert simulation.cache_usage_mean == 0.625
    assert simulation.cache_usage_max == 0.75
    assert simulation.short_of_cache == 0.75


# The command.


@pytest.fixture
def trace(tmp_path) -> str:
    path = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 0, "input_length": 600, "output_length": 20, "hash_ids": [0, n]} for n in range(1, 7)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


@pytest.fixture(autouse=True)
def command(monkeypatch):
    """The command, whether or not the program lists it."""
    usage = "dcpjax simulate TRACE MODEL [FLAGS]"
    monkeypatch.setitem(
        COMMANDS, "simulate", Command(usage, "simulate", simulate_command.add_flags, simulate_command.run)
    )


FITTING = ["--tp", "8", "--dtype", "nvfp4", "--kv-cache-dtype", "fp8"]


def test_the_command_prints_a_row_for_every_layout_and_number_of_users(capsys, trace):
    assert main(["simulate", trace, "kimi-k2", *FITTING, "--dcp", "1", "8", "--concurrency", "2", "3"]) == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    rows = [line.split()[:4] for line in lines if line.strip()[:5] in ("8 x 1", "1 x 8")]
    assert rows == [["8", "x", "1", "2"], ["8", "x", "1", "3"], ["1", "x", "8", "2"], ["1", "x", "8", "3"]]
    assert "lower bounds, not forecasts" in shown.out.replace("\n", " ")
    assert shown.err == ""


def test_the_command_gives_what_python_gives(capsys, trace):
    arguments = ["simulate", trace, QWEN, "--scale", "8", "--limit", "4", "--arrivals", "all", "--json"]
    assert main([*arguments, "--timeline"]) == 0
    read = json.loads(capsys.readouterr().out)
    requests = [request(75, 3, 0, n, unit=64) for n in range(1, 5)]
    expected = simulate(requests, QWEN, arrivals="all")
    assert read["rows"] == [json.loads(json.dumps(expected.to_dict()))]
    assert read["conclusion"] == conclusion([expected])
    assert main(arguments) == 0
    assert "timeline" not in json.loads(capsys.readouterr().out)["rows"][0]


def test_recorded_arrivals_have_no_users(capsys, trace):
    assert main(["simulate", trace, QWEN, "--scale", "8"]) == 0
    shown = capsys.readouterr().out
    assert "requests arrive as recorded" in shown
    assert to_text([simulate([request(75, 3, 0, n, unit=64) for n in range(1, 7)], QWEN)]) == shown.rstrip("\n")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "simulate must have a trace and one model"),
        (["nowhere.jsonl", "kimi-k2"], "a trace must be a readable file of JSON lines"),
        (["TRACE", "kimi-k3"], "model must be a preset"),
        (["TRACE", "kimi-k2"], "weights and cache must fit"),
        (["TRACE", "kimi-k2", "--tp", "8", "--dcp", "3"], "--decode-context-parallel-size must suit"),
        (["TRACE", QWEN, "--concurrency", "0"], "--concurrency must be an integer of at least 1, but is 0"),
        (["TRACE", QWEN, "--concurrency", "many"], "must be an integer, but is 'many'"),
        (["TRACE", QWEN, "--concurrency", "2", "--arrivals", "all"], "but arrivals is 'all'; use"),
        (["TRACE", QWEN], "request 1 has 600 + 20 tokens"),
        (["TRACE", QWEN, "--scale", "3"], "factor must divide the 512 tokens of a hash id, but is 3; use 2"),
        (["TRACE", QWEN, "--limit", "0"], "limit must be at least 1, but is 0"),
        (["TRACE", QWEN, "--concurency", "2"], "unknown flag --concurency; did you mean --concurrency?"),
    ],
)
def test_mistakes_exit_2_with_a_sentence(capsys, trace, arguments, sentence):
    assert main(["simulate", *(trace if word == "TRACE" else word for word in arguments)]) == 2
    shown = capsys.readouterr()
    assert sentence in shown.err
    assert shown.out == ""


def test_help_lists_every_option(capsys):
    assert main(["simulate", "--help"]) == 0
    shown = capsys.readouterr().out
    for name in ("--hardware", "--concurrency", "--arrivals", "--speedup", "--limit", "--scale", "--dcp", "--timeline"):
        assert name in shown


def test_options_are_refused_before_jax_is_imported():
    program = """
import sys
from dcpjax.cli import simulate
from dcpjax.cli.flags import Flags
try:
    simulate.run(Flags(positionals=["trace", "kimi-k2"], given={"concurrency": [0]}))
except ValueError as error:
    print(error, sorted({"jax", "numpy"} & set(sys.modules)))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert run.stdout == "concurrency must be an integer of at least 1, but is 0; use 1 or more []\n", run.stderr


def test_hardware_decides_how_long_it_takes_and_not_what_happens():
    requests = [request(40 - n, 3 + n, n % 3, 1, 2, 3, 4) for n in range(8)]
    options = {"block_size": 4, "arrivals": "closed", "concurrency": 3} | cache_of(40, QWEN, block_size=4)
    fast, slow = (simulate(requests, QWEN, hardware=name, **options) for name in ("b200", "h100"))
    assert steps_of(fast) == steps_of(slow)
    assert slow.duration > fast.duration
    assert slow.hardware == find_hardware("h100").name
