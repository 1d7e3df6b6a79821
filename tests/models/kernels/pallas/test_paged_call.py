"""The accelerator kernels, interpreted on CPU, against the XLA loop; and that they lower for their devices.

No test here compiles a kernel for a device or runs it on one.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, reduce
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from harness import golden_runner
from paging import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    ROWS,
    TOKENS,
    TOLERANCE,
    Paging,
    Span,
    assert_close,
    live,
    paging,
    scheduled,
    whole,
)

from dcpjax.models.attention.dispatch import choose_attention
from dcpjax.models.attention.paged import paged_partial
from dcpjax.models.attention.work import Runtime, Work
from dcpjax.models.kernels.pallas import tpu
from dcpjax.models.kernels.pallas.paged_call import KERNELS, paged_partial_kernel, suits
from dcpjax.models.kv_cache import Cache, CacheGeometry, LatentCache, LayerCache
from dcpjax.sharding.merge import Partial, merge

PLATFORMS = sorted(KERNELS)


SHORT = paging(64, 4, 4, 500)  # eight blocks in a chunk
ODD = paging(96, 1, 1, 300)  # 96 slots in a block: loaded by 32 on GPUs, whole on TPUs
LONG = paging(1280, 2, 640, 3000)  # five chunks in a block: loaded by 128 on TPUs; two spans on GPUs
CASES = [("gqa", SHORT), ("mla", ODD), ("gqa", LONG)]
MORE = [("mla", SHORT), ("gqa", ODD), ("mla", LONG), ("gqa", paging(256, 2, 128, 1100)), ("mla", paging(16, 1, 1, 300))]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in MORE]


def spans(where: Paging) -> list[Span]:
    """Decodes at the edges of blocks and at the end, and prompts of more and of less than a tile."""
    size = where.geometry.block_size
    return [(where.context - 1, 1), (size - 1, 1), (size, 1), (where.context - 75, 70), (0, 3)]


def drawn(family: str, work: Work, where: Paging) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scaled queries [T, H, D] of the step; keys and values [B, S, K, D] of every position of every row."""
    random, kv_heads = np.random.default_rng(3), KV_HEADS if family == "gqa" else 1
    q = (HEAD_DIM**-0.5 * random.normal(size=(len(work.positions), HEADS, HEAD_DIM))).astype(np.float32)
    size = (ROWS, where.blocks * where.geometry.block_size, kv_heads, HEAD_DIM)
    keys, values = (random.normal(size=size).astype(np.float32) for _ in range(2))
    return q, keys, values if family == "gqa" else keys


def stored(family: str, work: Work, where: Paging, rank: int, dtype: Any = np.float32) -> Cache:
    """One rank's cache: what the step sees in the slots of `locate`, NaN in all others."""
    geometry, (_, keys, values) = where.geometry, drawn(family, work, where)
    pool = np.full((2, ROWS * where.blocks, geometry.slots, *keys.shape[2:]), np.nan, dtype)
    for row, count in enumerate(live(work)):
        position = np.arange(count)
        index, owner, slot = geometry.locate(position)
        mine = owner == rank
        place = np.asarray(work.block_table)[row, index[mine]], slot[mine]
        pool[0][place], pool[1][place] = keys[row, position[mine]], values[row, position[mine]]
    if family == "mla":
        return LatentCache(jnp.asarray(pool[0][:, None, :, 0]))
    return LayerCache(
        jnp.asarray(pool[0][:, None].transpose(0, 1, 3, 4, 2)), jnp.asarray(pool[1][:, None].swapaxes(2, 3))
    )


@cache
def program(platform: Any, geometry: CacheGeometry) -> Any:
    """The loop, or the kernel of a platform. Barely optimised: compiling takes longer than running."""

    def body(q: Any, layer: Any, work: Any, rank: Any) -> Partial:
        if platform is None:
            return paged_partial(q, layer, work, geometry, rank)
        return paged_partial_kernel(q, layer, work, geometry, rank, platform=platform, interpret=True)

    return jax.jit(body, compiler_options={"xla_backend_optimization_level": 0})


def run(platform: str | None, family: str, step: Sequence[Span], where: Paging, rank: int, **options: Any) -> Partial:
    work = scheduled(step, where)
    q, layer = drawn(family, work, where)[0], stored(family, work, where, rank, **options)
    assert platform is None or suits(layer, work, where.geometry, platform)
    return program(platform, where.geometry)(q, layer, work, np.int32(rank))


@pytest.mark.parametrize(("family", "where"), CASES, ids=str)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_kernel_equals_the_loop_on_every_rank_and_whole_attention_once_merged(platform, family, where):
    step, ranks = spans(where), range(where.geometry.dcp)
    found = [run(platform, family, step, where, rank) for rank in ranks]
    for rank in ranks:
        assert_close(found[rank], run(None, family, step, where, rank))  # padding too: 0 and -inf
    work = scheduled(step, where)
    assert_close(reduce(merge, found), whole(work, *drawn(family, work, where)))


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_rank_that_holds_no_position_of_a_request_gives_zero_and_minus_infinity(platform):
    step = [(3, 1), (7, 1), (SHORT.context - 1, 1), (2, 70)]
    out, lse = run(platform, "gqa", step, SHORT, 2)
    empty = np.asarray(scheduled(step, SHORT).positions) < 8  # rank 2 holds 8 to 11 of every 16
    np.testing.assert_array_equal(out[empty], 0.0)
    np.testing.assert_array_equal(lse[empty], -np.inf)
    assert np.isfinite(lse[~empty]).all()


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_requests_result_does_not_depend_on_its_neighbours(platform):
    mine, prompt = (250, 1), (7, 70)
    alone = run(platform, "gqa", [mine, prompt], SHORT, 0)
    crowded = run(platform, "gqa", [mine, (499, 1), (31, 1), (400, 9), prompt], SHORT, 0)
    np.testing.assert_array_equal(crowded.out[0], alone.out[0])
    np.testing.assert_array_equal(crowded.lse[0], alone.lse[0])


@pytest.mark.parametrize(
    ("platform", "dtype", "tolerance"),
    [("gpu", ml_dtypes.bfloat16, 2**-7), ("tpu", ml_dtypes.bfloat16, 2**-7), ("gpu", np.uint16, TOLERANCE)],
)
def test_bfloat16_is_multiplied_as_stored_and_its_bits_in_uint16_as_float32(platform, dtype, tolerance):
    work = scheduled(spans(SHORT), SHORT)
    q, rounded = drawn("gqa", work, SHORT)[0], stored("gqa", work, SHORT, 1, ml_dtypes.bfloat16)
    layer = jax.tree.map(lambda x: jnp.asarray(np.asarray(x).view(dtype)), rounded)
    raised = jax.tree.map(lambda x: x.astype(np.float32), rounded)
    found = program(platform, SHORT.geometry)(q, layer, work, np.int32(1))
    assert_close(found, program(None, SHORT.geometry)(q, raised, work, np.int32(1)), tolerance)


@pytest.mark.parametrize("tiles_of_a_call", [1, 2, 3])
def test_the_tpu_kernel_runs_several_times_if_its_list_may_not_fit_at_once(tiles_of_a_call, monkeypatch):
    """With padding tiles in the last call, or a call of nothing else."""
    step, pages = spans(SHORT), SHORT.geometry.slots // tpu.slots_per_iteration(None, SHORT.geometry)  # type: ignore[arg-type]
    work = scheduled(step, SHORT)
    at_once = run("tpu", "gqa", step, SHORT, 1)
    monkeypatch.setattr(tpu, "SCALARS", 2 * tiles_of_a_call * (1 + work.block_table.shape[1] * pages))
    program.cache_clear()
    in_parts = run("tpu", "gqa", step, SHORT, 1)
    program.cache_clear()
    jax.tree.map(np.testing.assert_array_equal, in_parts, at_once)


# --- shapes of real models


def abstract(family: str, head_dim: int, slots: int, dtype: Any, rows: int = 8, width: int = 16) -> tuple[Any, ...]:
    """q, cache and work of a step of `rows` decodes and up to four tiles of a prompt, as shapes alone."""
    geometry = CacheGeometry(block_size=2 * slots, dcp=2)
    kv_heads, array = 2, jax.ShapeDtypeStruct
    if family == "mla":
        layer = LatentCache(array((rows * width, 1, slots, head_dim), dtype))
    else:
        keys = array((rows * width, 1, kv_heads, head_dim, slots), dtype)
        layer = LayerCache(keys, array((*keys.shape[:3], slots, head_dim), dtype))
    step = scheduled([(0, 1), (0, 70)], Paging(geometry, 2 * slots))
    work = jax.tree.map(lambda x: array(x.shape, x.dtype), step)
    work = replace(work, block_table=array((rows, width), np.int32))
    return array((TOKENS, 16, head_dim), np.float32), layer, work, geometry


MODELS = [
    ("gqa", 128, 128, "bfloat16"),
    ("gqa", 96, 1024, "float32"),
    ("mla", 576, 32, "bfloat16"),
]


@pytest.mark.parametrize("model", MODELS, ids=str)
@pytest.mark.parametrize(
    ("platform", "lowered", "call"), [("gpu", "cuda", "triton"), ("tpu", "tpu", "tpu_custom_call")]
)
def test_a_kernel_lowers_for_its_device_without_one(platform, lowered, call, model):
    q, layer, work, geometry = abstract(*model)
    assert suits(layer, work, geometry, platform)

    def step(q: Any, layer: Any, work: Any, rank: Any) -> Partial:
        return paged_partial_kernel(q, layer, work, geometry, rank, platform=platform)

    traced = jax.jit(step).trace(q, layer, work, jax.ShapeDtypeStruct((), np.int32))
    text = traced.lower(lowering_platforms=(lowered,)).as_text()
    assert sum("custom_call @" in line and call in line for line in text.splitlines()) == len(work.tiles)


SOUND = {"family": "gqa", "head_dim": 64, "slots": 64, "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("platform", "shapes"),
    [
        ("gpu", {"slots": 8}),
        ("gpu", {"head_dim": 72}),
        ("tpu", {"slots": 8}),
        ("tpu", {"slots": 520}),
        ("tpu", {"width": 2**18}),
        ("cpu", {}),
    ],
)
def test_what_a_kernel_cannot_take_does_not_suit_it(platform, shapes):
    _, layer, work, geometry = abstract(**SOUND | shapes)
    assert not suits(layer, work, geometry, platform)


@pytest.mark.parametrize("shapes", [{}, {"rows": 256, "width": 2**13}])
@pytest.mark.parametrize("platform", PLATFORMS)
def test_what_a_kernel_can_take_suits_it(platform, shapes):
    _, layer, work, geometry = abstract(**SOUND | shapes)
    assert suits(layer, work, geometry, platform)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_whoever_gets_the_loop_instead_of_a_kernel_is_told(platform):
    _, layer, work, geometry = abstract("gqa", 64, 24, "bfloat16")
    place = SimpleNamespace(platform=platform)
    with pytest.warns(UserWarning, match=rf"slower than the kernel for {platform.upper()}s: .* there are 24 slots"):
        assert choose_attention(layer, work, Runtime(place=place, geometry=geometry)) is paged_partial  # type: ignore[arg-type]
    forced = Runtime(place=place, geometry=geometry, attention_body="loop")  # type: ignore[arg-type]
    assert choose_attention(layer, work, forced) is paged_partial
    with pytest.raises(ValueError, match=r"attention_body must be 'auto' or 'loop' on .* with heads of 64 values"):
        choose_attention(layer, work, replace(forced, attention_body="pallas"))


def test_a_body_can_be_forced_by_an_option_and_a_kernel_for_other_devices_is_refused() -> None:
    assert golden_runner("llama3", 1, 1, attention_body="loop").model.runtime.attention_body == "loop"
    with pytest.raises(ValueError, match="must be 'auto' or 'loop' on CPUs, but is 'pallas'; use 'auto'"):
        golden_runner("llama3", 1, 1, attention_body="pallas")
