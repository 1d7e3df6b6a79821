"""The compiled step: its collectives, its cache in place, and one program per shape."""

import re
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest
from harness import GOLDENS

from dcpjax.batch import build
from dcpjax.config import EngineConfig
from dcpjax.model_files import open_model
from dcpjax.outputs import RequestMetrics
from dcpjax.request import Request
from dcpjax.runner import Runner
from dcpjax.sampling_params import SamplingParams
from dcpjax.scheduler import Scheduled

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter", "collective-permute")


def make_runner(tp: int, dcp: int, **options: Any) -> Runner:
    config = EngineConfig(
        tensor_parallel_size=tp * dcp,
        decode_context_parallel_size=dcp,
        dtype="float32",
        block_size=16,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        kv_cache_memory_bytes=2**20,
        **options,
    )
    return Runner(open_model(GOLDENS / "llama3"), config)


def scheduled(lengths: list[int], count: int = 1) -> list[Scheduled]:
    return [
        Scheduled(
            Request(number, [3] * length, SamplingParams(temperature=0), 4, 0, frozenset(), RequestMetrics(0.0)),
            length - count,
            count,
            list(range(8 * number, 8 * number + 8)),
            True,
        )
        for number, length in enumerate(lengths)
    ]


def compiled(runner: Runner, step: list[Scheduled]) -> Any:
    batch = build(step, runner.shapes, runner.geometry)
    return runner._step.lower(runner.weights, runner.cache, batch).compile()


def instructions(text: str) -> list[tuple[str, str]]:
    """(collective, its result type) of every collective instruction."""
    pattern = re.compile(rf"= (\S+|\(.*?\)) ({'|'.join(COLLECTIVES)})(?:-start)?\(")
    return [(kind, result) for result, kind in pattern.findall(text)]


# per layer, besides the all-reduce after o_proj and the one after the MLP
MERGE_COLLECTIVES = {
    "ag_rs": {"all-gather": 2, "reduce-scatter": 1},  # query and lse; features
    "a2a": {"all-gather": 1, "all-to-all": 1},  # query; out with lse
    "psum": {"all-gather": 1, "all-reduce": 2},  # query; largest lse, then weights and out together
}


@pytest.mark.parametrize("merge", MERGE_COLLECTIVES)
@pytest.mark.parametrize(("tp", "dcp"), [(2, 2), (1, 8), (2, 4)])
def test_the_step_holds_exactly_the_designed_collectives(tp: int, dcp: int, merge: str) -> None:
    if merge == "a2a":
        assert 8 // tp % dcp == 0, "this test is of heads that divide; those that do not gather the lse too"
    runner = make_runner(tp, dcp, dcp_comm_backend=merge)
    layers = runner.config.num_layers
    expected = Counter({kind: layers * count for kind, count in MERGE_COLLECTIVES[merge].items()})
    expected["all-reduce"] += 2 * layers  # o_proj and MLP
    expected["all-reduce"] += 1  # rows of the embedding
    expected["all-gather"] += 1  # logits
    for step in (scheduled([20, 40]), scheduled([20], count=20)):
        found = Counter(kind for kind, _ in instructions(compiled(runner, step).as_text()))
        assert found == expected


def test_a_replicated_query_projection_saves_one_collective() -> None:
    def gathers(**options: Any) -> int:
        text = compiled(make_runner(1, 8, **options), scheduled([20])).as_text()
        return sum(kind == "all-gather" for kind, _ in instructions(text))

    assert gathers() - gathers(dcp_replicate_q=True) == 2  # one per layer


def test_tensor_parallelism_alone_merges_nothing() -> None:
    runner = make_runner(8, 1)
    found = Counter(kind for kind, _ in instructions(compiled(runner, scheduled([20])).as_text()))
    assert found == {"all-reduce": 2 * runner.config.num_layers + 1, "all-gather": 1}


@pytest.mark.parametrize(("tp", "dcp"), [(1, 1), (1, 8), (2, 4), (8, 1)])
def test_no_collective_moves_the_cache_and_every_cache_byte_is_aliased(tp: int, dcp: int) -> None:
    runner = make_runner(tp, dcp)
    per_device = sum(array.addressable_shards[0].data.nbytes for array in jax.tree.leaves(runner.cache))
    smallest = min(array.addressable_shards[0].data.size for array in jax.tree.leaves(runner.cache))
    for step in (scheduled([20, 40]), scheduled([20], count=20)):
        program = compiled(runner, step)
        assert program.memory_analysis().alias_size_in_bytes == per_device
        for kind, result in instructions(program.as_text()):
            elements = [
                int(np.prod([int(n) for n in dims.split(",") if n])) for dims in re.findall(r"\[([\d,]*)\]", result)
            ]
            assert max(elements) < smallest / 4, f"{kind} moves {result}"


def test_cache_bytes_per_device_fall_by_dcp_and_copies_rise_by_tp() -> None:
    def block_bytes(tp: int, dcp: int) -> int:
        return make_runner(tp, dcp).block_bytes_per_device()

    whole = block_bytes(1, 1)
    assert [block_bytes(1, dcp) for dcp in (2, 4, 8)] == [whole // 2, whole // 4, whole // 8]
    assert [block_bytes(tp, 1) for tp in (2, 4, 8)] == [whole // 2] * 3  # two KV heads: copied beyond tp=2
    assert block_bytes(4, 2) == whole // 4


def test_the_cache_lies_where_the_rules_say() -> None:
    runner = make_runner(2, 4)
    keys = runner.cache[0].keys
    assert keys.sharding == runner.place.sharding(None, "kv_context", "kv_heads", None, None)
    blocks, ranks, heads, head_dim, slots = keys.addressable_shards[0].data.shape
    assert (ranks, heads, head_dim, slots) == (1, 1, 8, 4)
    assert blocks == runner.sizes.num_blocks


def test_other_lengths_of_the_same_shape_compile_nothing() -> None:
    runner = make_runner(1, 8)
    runner.run(scheduled([5, 9, 40]))
    runner.run(scheduled([20], count=20))
    programs = runner._step._cache_size()
    for lengths in ([1, 2, 3], [60, 1, 17], [33, 32, 31]):
        runner.run(scheduled(lengths))
    for count in (17, 25, 32):
        runner.run(scheduled([count + 9], count=count))
    assert runner._step._cache_size() == programs == 2


def test_a_new_step_keeps_the_cache_on_its_devices() -> None:
    runner = make_runner(2, 4)
    before = jax.tree.leaves(runner.cache)
    runner.run(scheduled([20]))
    for old, new in zip(before, jax.tree.leaves(runner.cache), strict=True):
        assert old.is_deleted()  # donated
        assert new.sharding == runner.place.sharding(None, "kv_context", "kv_heads", None, None)
