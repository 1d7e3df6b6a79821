"""The CPU kernel on latent caches against the XLA loop and whole attention, every rank, whatever the blocks' size."""

from collections.abc import Sequence
from functools import cache, partial, reduce
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import Stepper, Trace, sample
from paging import ROWS, Paging, Span, assert_close, live, paging, scheduled, spans, whole

from dcpjax.models.attention.dispatch import (
    choose_attention,
    choose_cache_write,
)
from dcpjax.models.attention.paged import (
    paged_partial,
)
from dcpjax.models.attention.work import (
    Runtime,
)
from dcpjax.models.kernels.cpu import support
from dcpjax.models.kernels.cpu.attention_calls import paged_partial_on_cpu, suits
from dcpjax.models.kernels.cpu.paged_attention import workspace_size
from dcpjax.models.kv_cache import CacheGeometry, LatentCache, encode
from dcpjax.sharding.merge import Partial, merge
from dcpjax.sharding.mesh import Layout, make_mesh
from dcpjax.sharding.rules import Placement

WIDTH = 96  # latents of 64 and rope keys of 32
WHOLE = paging(256, 1, 1, 600)
LONG = paging(256, 1, 1, 5000)
PAGINGS = [
    paging(2, 2, 1, 600),  # a single slot in a block, 256 of them in a chunk
    paging(24, 2, 4, 300),  # 12 slots in a block: fewer than a vector
    paging(72, 8, 1, 700),  # an odd number of slots
    WHOLE,
    paging(1280, 2, 640, 3000),  # 640 slots in a block: two chunks and a half
    paging(256, 2, 1, 5000),  # two spans on each rank
    paging(40, 1, 1, 5000),  # six blocks in a chunk, and spans that end with a block
]
FEW = [PAGINGS[0], PAGINGS[2], WHOLE]  # the others in the sweep


def queries(tokens: int, heads: int) -> np.ndarray:
    """[N, H, W], scaled."""
    return (WIDTH**-0.5 * np.random.default_rng(3).normal(size=(tokens, heads, WIDTH))).astype(np.float32)


def latents_of(where: Paging) -> np.ndarray:
    """[R, S, W] of every position of every row."""
    size = (ROWS, where.blocks * where.geometry.block_size, WIDTH)
    return np.random.default_rng(4).normal(size=size).astype(np.float32)


def stored(step: Sequence[Span], where: Paging, rank: int, dtype: Any, spoilt: int | None = None) -> LatentCache:
    """One rank's cache: what the step can see, NaN elsewhere and at position `spoilt`."""
    work = scheduled(step, where)
    latents = latents_of(where)
    pool = np.full((ROWS * where.blocks, where.geometry.slots, WIDTH), np.nan, np.float32)
    for row, count in enumerate(live(work)):
        position = np.arange(count)
        index, owner, slot = where.geometry.locate(position)
        mine = (owner == rank) & (position != spoilt)
        pool[np.asarray(work.block_table)[row, index[mine]], slot[mine]] = latents[row, position[mine]]
    return LatentCache(encode(jnp.asarray(pool), np.dtype(dtype))[:, None])


@cache
def program(kernel: str, geometry: CacheGeometry) -> Any:
    body = paged_partial if kernel == "loop" else partial(paged_partial_on_cpu, parallel=kernel == "parallel")
    return jax.jit(
        lambda q, layer, work, rank: body(q, layer, work, geometry, rank),
        compiler_options={"xla_backend_optimization_level": 0},
    )


def run(kernel: str, step: Sequence[Span], where: Paging, rank: int, layer: LatentCache, heads: int = 6) -> Partial:
    work = scheduled(step, where)
    assert suits(layer, where.geometry)
    return program(kernel, where.geometry)(queries(len(work.positions), heads), layer, work, np.int32(rank))


@pytest.mark.parametrize("where", sample(PAGINGS, *FEW), ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
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
    keys = latents_of(where)[:, :, None]
    ranks = range(where.geometry.dcp)
    found = [run("in turn", step, where, rank, stored(step, where, rank, np.float32)) for rank in ranks]
    assert_close(reduce(merge, found), whole(work, queries(len(work.positions), 6), keys, keys))


@pytest.mark.parametrize("heads", [1, 128])
def test_heads_of_one_device_or_of_a_whole_group_equal_the_loop(heads):
    where = WHOLE
    step = spans(where)
    layer = stored(step, where, 0, np.uint16)
    expected = run("loop", step, where, 0, layer, heads)
    for kernel in ("in turn", "parallel"):
        assert_close(run(kernel, step, where, 0, layer, heads), expected)


def test_many_heads_share_no_more_tokens_than_fit_a_small_workspace():
    few, many = workspace_size(256, 16, 576), workspace_size(256, 128, 576)
    assert few == many
    assert 4 * many < 16 * 2**20  # bytes


@pytest.mark.parametrize("where", [WHOLE, LONG], ids=str)
def test_threads_change_no_bit_and_neither_do_neighbours(where):
    step, fewer = spans(where), spans(where)[:1] + spans(where)[3:]
    layer = stored(step, where, 0, np.uint16)
    one, many = (run(kernel, step, where, 0, layer) for kernel in ("in turn", "parallel"))
    np.testing.assert_array_equal(one.out, many.out)
    np.testing.assert_array_equal(one.lse, many.lse)
    alone = run("parallel", fewer, where, 0, stored(fewer, where, 0, np.uint16))
    np.testing.assert_array_equal(alone.out[0], many.out[0])


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_what_is_not_a_number_taints_only_those_who_see_it(dtype):
    where = paging(64, 2, 4, 500)
    step, spoilt = spans(where), 485  # the fourth request computes positions 480 to 497
    rank = int(where.geometry.locate(spoilt)[1])
    tainted = np.isnan(run("in turn", step, where, rank, stored(step, where, rank, dtype, spoilt)).out).any(axis=(1, 2))
    work = scheduled(step, where)
    seen = (np.asarray(work.positions) >= spoilt) & np.isin(np.asarray(work.rows), [0, 3])
    np.testing.assert_array_equal(tainted, seen)


def test_a_rank_without_a_position_gives_zero_and_minus_infinity():
    where = paging(64, 2, 4, 500)
    step: list[Span] = [(3, 1), (1, 1), (where.context - 1, 1), (0, 9)]
    out, lse = run("in turn", step, where, 1, stored(step, where, 1, np.float32))
    empty = np.asarray(scheduled(step, where).positions) < 4  # rank 1 holds 4 to 7 of every 8
    np.testing.assert_array_equal(out[empty], 0.0)
    np.testing.assert_array_equal(lse[empty], -np.inf)
    assert np.isfinite(lse[~empty]).all()


def test_latents_that_are_whole_vectors_go_to_the_kernel_by_themselves_and_are_written_by_xla():
    geometry = CacheGeometry(block_size=16)
    fits, odd = (LatentCache(jax.ShapeDtypeStruct((2, 1, 16, width), np.float32)) for width in (96, 80))
    assert suits(fits, geometry)
    assert not suits(odd, geometry)
    runtime = Runtime(place=Placement(make_mesh(Layout())), geometry=geometry)
    work = scheduled([(3, 1)], paging(16, 1, 1, 100))
    assert choose_attention(fits, work, runtime).func is paged_partial_on_cpu  # type: ignore[attr-defined]
    assert choose_attention(odd, work, runtime) is paged_partial
    assert choose_cache_write(fits, runtime) is None


SIZES = {  # DeepSeek's shape in whole vectors; prompts are up-projected from 33 tokens on
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 48,
    "kv_lora_rank": 96,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "n_routed_experts": None,
    "first_k_dense_replace": 2,
    "vocab_size": 128,
    "dtype": "float32",
}


def traces(**options: Any) -> list[Trace]:
    """Of prompts that are chunked, mixed and beside decodes."""
    made = {"load_format": "dummy", "hf_overrides": SIZES, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 2**21}
    random, lengths = np.random.default_rng(5), (90, 3, 41, 1, 150)
    prompts = [random.integers(0, 128, length).tolist() for length in lengths]
    return Stepper(Path("deepseek-v3"), one_shape=True, **made, **options).greedy(prompts, 4)


@cache
def without_kernels() -> list[Trace]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(support, "available", lambda: False)
        return traces()


@pytest.mark.parametrize(("tp", "dcp"), sample([(1, 1), (1, 8), (4, 2)], (1, 1)))
def test_a_model_gives_the_same_with_kernels_on_every_layout(tp, dcp):
    found = traces(tensor_parallel_size=tp * dcp, decode_context_parallel_size=dcp)
    for expected, one in zip(without_kernels(), found, strict=True):
        assert one.tokens == expected.tokens
        np.testing.assert_allclose(one.every_logits, expected.every_logits, rtol=0, atol=2e-5)
