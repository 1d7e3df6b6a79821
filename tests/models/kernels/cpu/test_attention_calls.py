"""The CPU kernel against the XLA loop and whole attention: every rank, decodes and prompts, one span and several."""

import subprocess
import sys
from collections.abc import Sequence
from functools import cache, partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import sample
from paging import ROWS, Paging, Span, assert_close, live, paging, scheduled, spans, whole

from dcpjax.models.attention.paged import paged_partial
from dcpjax.models.attention.work import Work
from dcpjax.models.kernels.cpu import support
from dcpjax.models.kernels.cpu.attention_calls import paged_partial_on_cpu, suits, write_on_cpu
from dcpjax.models.kernels.cpu.paged_attention import SPAN_SLOTS
from dcpjax.models.kv_cache import CacheGeometry, LayerCache, encode
from dcpjax.runtime.batch import SHORT_TILE
from dcpjax.sharding.merge import Partial, merge

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 64
PAGINGS = [
    paging(64, 2, 4, 500),  # 32 slots in a block
    paging(256, 1, 1, 600),
    paging(256, 8, 1, 1100),
    paging(1280, 2, 640, 3000),  # 640 slots in a block: two chunks and a half
    paging(256, 2, 1, 5000),  # two spans on each rank
    paging(96, 1, 1, 5000),  # two blocks in a chunk, whose end is not that of a span
]
FEW = [PAGINGS[0], PAGINGS[2], PAGINGS[5]]  # the others in the sweep
LONG = paging(256, 1, 1, 5000)


def drawn(work: Work, where: Paging) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scaled queries [N, H, D]; keys and values [R, S, K, D] of every position of every row."""
    random = np.random.default_rng(3)
    q = HEAD_DIM**-0.5 * random.normal(size=(len(work.positions), HEADS, HEAD_DIM))
    size = (ROWS, where.blocks * where.geometry.block_size, KV_HEADS, HEAD_DIM)
    keys, values = (random.normal(size=size).astype(np.float32) for _ in range(2))
    return q.astype(np.float32), keys, values


def stored(
    step: Sequence[Span], where: Paging, rank: int, dtype: Any, spoilt: int | None = None, part: int = 1
) -> LayerCache:
    """One rank's cache: what the step can see, NaN elsewhere and in the key (part 0) or value of position `spoilt`."""
    work = scheduled(step, where)
    _, keys, values = drawn(work, where)
    pool = np.full((2, ROWS * where.blocks, where.geometry.slots, KV_HEADS, HEAD_DIM), np.nan, np.float32)
    for row, count in enumerate(live(work)):
        position = np.arange(count)
        index, owner, slot = where.geometry.locate(position)
        mine = owner == rank
        place = np.asarray(work.block_table)[row, index[mine]], slot[mine]
        pool[0][place], pool[1][place] = keys[row, position[mine]], values[row, position[mine]]
        if spoilt is not None and spoilt < count:
            pool[part][np.asarray(work.block_table)[row, index[spoilt]], slot[spoilt]] = np.nan
    keys, values = encode(jnp.asarray(pool), np.dtype(dtype))[:, :, None]
    return LayerCache(keys.transpose(0, 1, 3, 4, 2), values.swapaxes(2, 3))


@cache
def program(kernel: str, geometry: CacheGeometry) -> Any:
    def body(q: Any, layer: Any, work: Any, rank: Any) -> Partial:
        if kernel == "loop":
            return paged_partial(q, layer, work, geometry, rank)
        return paged_partial_on_cpu(q, layer, work, geometry, rank, parallel=kernel == "parallel")

    return jax.jit(body, compiler_options={"xla_backend_optimization_level": 0})


def run(kernel: str, step: Sequence[Span], where: Paging, rank: int, layer: LayerCache) -> Partial:
    work = scheduled(step, where)
    assert suits(layer, where.geometry)
    assert [tiles.size for tiles in work.tiles] == [1, SHORT_TILE]
    return program(kernel, where.geometry)(drawn(work, where)[0], layer, work, np.int32(rank))


@pytest.mark.parametrize("where", sample(PAGINGS, *FEW), ids=str)
@pytest.mark.parametrize("dtype", sample([np.float32, np.uint16], np.uint16))
def test_the_kernel_equals_the_loop_on_every_rank(dtype, where):
    step = spans(where)
    for rank in range(where.geometry.dcp):
        layer = stored(step, where, rank, dtype)
        expected = run("loop", step, where, rank, layer)
        for kernel in ("in turn", "parallel"):
            assert_close(run(kernel, step, where, rank, layer), expected)  # padding too: 0 and -inf


@pytest.mark.parametrize("where", sample(PAGINGS, *FEW), ids=str)
def test_ranks_merged_equal_whole_attention_in_float64(where):
    step, work = spans(where), scheduled(spans(where), where)
    ranks = range(where.geometry.dcp)
    found = [run("in turn", step, where, rank, stored(step, where, rank, np.float32)) for rank in ranks]
    assert_close(reduce(merge, found), whole(work, *drawn(work, where)))


@pytest.mark.parametrize("where", [PAGINGS[1], LONG], ids=str)
def test_threads_change_no_bit_and_neither_do_neighbours(where):
    step, fewer = spans(where), spans(where)[:1] + spans(where)[3:]
    layer = stored(step, where, 0, np.uint16)
    one, many = (run(kernel, step, where, 0, layer) for kernel in ("in turn", "parallel"))
    np.testing.assert_array_equal(one.out, many.out)
    np.testing.assert_array_equal(one.lse, many.lse)
    alone = run("parallel", fewer, where, 0, stored(fewer, where, 0, np.uint16))
    np.testing.assert_array_equal(alone.out[0], many.out[0])


def test_tokens_on_both_sides_of_a_spans_end_equal_the_loop():
    step: list[Span] = [(SPAN_SLOTS - 9, 18), (SPAN_SLOTS - 1, 1), (SPAN_SLOTS, 1), (2 * SPAN_SLOTS + 7, 1)]
    layer = stored(step, LONG, 0, np.float32)
    expected = run("loop", step, LONG, 0, layer)
    for kernel in ("in turn", "parallel"):
        assert_close(run(kernel, step, LONG, 0, layer), expected)


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
@pytest.mark.parametrize("part", [0, 1], ids=["key", "value"])
def test_what_is_not_a_number_taints_only_those_who_see_it(part, dtype):
    where, spoilt = PAGINGS[0], 485
    step = spans(where)  # the fourth request computes positions 480 to 497
    rank = int(where.geometry.locate(spoilt)[1])
    layer = stored(step, where, rank, dtype, spoilt, part)
    tainted = np.isnan(run("in turn", step, where, rank, layer).out).any(axis=(1, 2))
    work = scheduled(step, where)
    seen = (np.asarray(work.positions) >= spoilt) & np.isin(np.asarray(work.rows), [0, 3])
    np.testing.assert_array_equal(tainted, seen)


def test_a_rank_without_a_position_gives_zero_and_minus_infinity():
    where = PAGINGS[0]
    step: list[Span] = [(3, 1), (1, 1), (where.context - 1, 1), (0, 9)]
    out, lse = run("in turn", step, where, 1, stored(step, where, 1, np.float32))
    empty = np.asarray(scheduled(step, where).positions) < 4  # rank 1 holds 4 to 7 of every 8
    np.testing.assert_array_equal(out[empty], 0.0)
    np.testing.assert_array_equal(lse[empty], -np.inf)
    assert np.isfinite(lse[~empty]).all()


def layer_of(slots: int, head_dim: int, dtype: Any = np.float32) -> LayerCache:
    shape = jax.ShapeDtypeStruct
    return LayerCache(shape((2, 1, 1, head_dim, slots), dtype), shape((2, 1, 1, slots, head_dim), dtype))


def test_what_the_kernel_cannot_take_stays_in_the_loop(monkeypatch):
    geometry = CacheGeometry(block_size=64)
    assert suits(layer_of(64, 64), geometry)
    assert not suits(layer_of(64, 48), geometry)
    assert not suits(layer_of(64, 64, jnp.bfloat16), geometry)
    assert not suits(layer_of(16, 64), CacheGeometry(block_size=16))
    monkeypatch.setattr(support, "available", lambda: False)
    assert not suits(layer_of(64, 64), geometry)


ENDS_DURING_A_STEP = """
from dcpjax import LLM, SamplingParams
sizes = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 8}
sizes |= {"num_key_value_heads": 2, "head_dim": 64, "vocab_size": 49152, "rope_scaling": None}
llm = LLM("llama-3.1-8b", load_format="dummy", hf_overrides=sizes, max_model_len=256, dtype="float32")
answers = llm.stream([[1, 2, 3]] * 2, SamplingParams(max_tokens=100, ignore_eos=True))
for _ in range(8):
    next(answers)
answers.close()
"""


def test_a_process_that_ends_while_a_step_runs_does_end():
    """XLA's threads and Numba's once waited for each other when their process left them in the middle of a step."""
    subprocess.run([sys.executable, "-c", ENDS_DURING_A_STEP], check=True, timeout=120)


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
@pytest.mark.parametrize("parallel", [False, True])
def test_the_kernel_writes_what_the_cache_does(dtype, parallel):
    random, slots = np.random.default_rng(5), 64
    stored = encode(jnp.asarray(random.normal(size=(2, 9, 1, KV_HEADS, HEAD_DIM, slots)), jnp.float32), np.dtype(dtype))
    layer = LayerCache(stored[0], stored[1].swapaxes(3, 4))
    runs = [(3, 17, 40), (8, 0, 64), (2, 63, 1), (0, 5, 1), (9, 0, 3)]  # block, first slot, tokens; 9 is past the end
    block = np.concatenate([np.full(count, number) for number, _, count in runs]).astype(np.int32)
    slot = np.concatenate([first + np.arange(count) for _, first, count in runs]).astype(np.int32)
    new = tuple(jnp.asarray(random.normal(size=(2, len(block), KV_HEADS, HEAD_DIM)), jnp.float32))
    for few in (slice(None), slice(104, None)):  # shared by threads, or not
        args = tuple(x[few] for x in new), block[few], slot[few]
        found = jax.jit(partial(write_on_cpu, parallel=parallel))(layer, *args)
        expected = layer.write(*args)
        np.testing.assert_array_equal(found.keys, expected.keys)
        np.testing.assert_array_equal(found.values, expected.values)


def test_a_donated_cache_is_written_in_place():
    layer = LayerCache(jnp.zeros((40, 1, 2, 64, 64)), jnp.zeros((40, 1, 2, 64, 64)))
    new, place = (jnp.ones((4, 2, 64)),) * 2, (jnp.arange(4), jnp.arange(4))
    program = jax.jit(partial(write_on_cpu, parallel=False), donate_argnums=0).lower(layer, new, *place).compile()
    assert program.memory_analysis().temp_size_in_bytes < layer.keys.nbytes // 2
