"""Prompts with up-projected keys and values: the same results as absorbed, the choice, what is sent and multiplied."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from functools import partial as bind
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from abstract_arrays import abstract_tree
from compiled_steps import compiled, instructions, scheduled, with_gathered_queries
from harness import GOLDENS, Stepper, Trace, golden, golden_runner, sample, swept
from hypothesis import example, given
from hypothesis import strategies as st
from traced import config_of, flops

from dcpjax.api.config import EngineConfig
from dcpjax.checkpoint.model_files import open_model
from dcpjax.checkpoint.presets import PRESETS
from dcpjax.models import decoder, mla
from dcpjax.models.attention import up_projected
from dcpjax.models.attention.paged import (
    paged_partial_gathered,
)
from dcpjax.models.attention.up_projected import (
    NEVER,
    UpProjection,
    prompt_partial,
    up_projection_threshold,
    uses_up_projection,
)
from dcpjax.models.attention.work import (
    Runtime,
    Work,
)
from dcpjax.models.config import MLAConfig, from_hf
from dcpjax.models.kernels.cpu.attention_calls import prompt_partial_on_cpu, suits_prompts
from dcpjax.models.kv_cache import CacheGeometry, LatentCache, encode
from dcpjax.runtime.batch import PREFILL_TILE, SHORT_TILE, Batch, ShapeBuckets, build
from dcpjax.runtime.runner import Runner, load_runner
from dcpjax.sharding.merge import Partial
from dcpjax.sharding.mesh import Layout, make_mesh
from dcpjax.sharding.rules import Placement

TOLERANCE = 2e-5


@pytest.fixture(autouse=True)
def several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models have short tiles, which should still be several pieces."""
    monkeypatch.setattr(up_projected, "PIECE", 16)
    monkeypatch.setattr(up_projected, "ABSORBED_PIECE", 4)


# --- the choice

SIZES = st.builds(
    MLAConfig,
    q_rank=st.none(),
    latent_rank=st.integers(1, 600),
    nope_dim=st.integers(1, 300),
    rope_dim=st.integers(1, 80),
    value_dim=st.integers(1, 300),
)


@given(SIZES)
def test_a_tile_is_up_projected_from_where_that_takes_fewer_operations(sizes):
    def gains(queries: int) -> bool:
        made, scores, values = sizes.latent_rank * (sizes.nope_dim + sizes.value_dim), sizes.qk_dim, sizes.value_dim
        return made + queries * (scores + values) < queries * 2 * sizes.cached_dim

    fewest = up_projection_threshold(sizes)
    assert gains(fewest) or fewest == NEVER
    assert not gains(fewest - 1)


@pytest.mark.parametrize(("name", "fewest"), [("deepseek-v3", 158), ("kimi-k2", 158), ("deepseek-v2-lite", 158)])
def test_published_models_gain_from_158_tokens_on(name, fewest):
    """512 * (128 + 128) to make keys and values, 576 + 576 - 192 - 128 saved by each query: 157.5."""
    sizes = from_hf(PRESETS[name]).mla
    assert sizes is not None
    assert up_projection_threshold(sizes) == fewest


def test_a_prompt_attends_as_one_where_a_step_is_long_enough_to_gain():
    plain = ShapeBuckets(max_rows=4, max_tokens=2000, table_width=64)
    whole = replace(plain, whole_prompts_from=158)
    sizes = (8, 32, 64, 128, 157, 158, 256, 2000)
    assert [plain.prefill_tile(size) for size in sizes] == [SHORT_TILE, SHORT_TILE, *[PREFILL_TILE] * 6]
    assert [whole.prefill_tile(size) for size in sizes] == [SHORT_TILE, SHORT_TILE, *[PREFILL_TILE] * 3, 158, 256, 2000]


@cache
def runner(tp: int, dcp: int, *, tokens: int = 64, **options: Any) -> Runner:
    """Queries are gathered: `test_gathered_keys` is about the other way."""
    return with_gathered_queries(golden_runner("deepseek-v3", tp, dcp, max_num_batched_tokens=tokens, **options))


def test_only_steps_with_large_tiles_are_up_projected_and_no_other_body_is():
    own, sizes = runner(1, 8), from_hf(open_model(GOLDENS / "deepseek-v3").config).mla
    assert sizes is not None
    assert own.shapes.whole_prompts_from == up_projection_threshold(sizes) == 17

    def chosen(step: list[Any], body: Any = "auto") -> bool:
        work = build(step, own.shapes, own.geometry).work
        return uses_up_projection(work, sizes, replace(own.model.runtime, attention_body=body))

    decodes, short, long = scheduled([20, 40]), scheduled([20], count=20), scheduled([60], count=40)
    assert [chosen(step) for step in (decodes, short, long)] == [False, False, True]
    assert [chosen(long, body) for body in ("loop", "gather", "pallas")] == [True, False, False]


def test_models_without_latents_keep_their_tiles():
    config = EngineConfig(dtype="float32", max_num_batched_tokens=256, kv_cache_memory_bytes=2**22)
    assert load_runner(open_model(GOLDENS / "llama3"), config).shapes.prefill_tile(256) == PREFILL_TILE


# --- equal results, one device


SMALL = MLAConfig(q_rank=None, latent_rank=5, nope_dim=3, rope_dim=2, value_dim=4)  # up-projected from 8 tokens on
WHOLE = MLAConfig(q_rank=None, latent_rank=96, nope_dim=32, rope_dim=64, value_dim=32)  # for kernels; from 33 tokens on
GEOMETRY = CacheGeometry(block_size=8, dcp=2, interleave=2)  # 128 slots of a rank, 256 positions, in a chunk
ROWS, TOKENS, HEADS, WIDTH = 4, 48, 2, 96
SPANS = st.lists(  # (tokens computed before, tokens in this step)
    st.tuples(st.integers(0, 8 * WIDTH - TOKENS), st.sampled_from([1, 2, 7, 8, 9, 16, 17, 39])),
    min_size=1,
    max_size=ROWS,
).filter(lambda spans: sum(count for _, count in spans) <= TOKENS)


@cache
def by_heads(sizes: MLAConfig) -> Any:
    """In the loop, or in the kernel where the sizes are made for it."""
    body: Any = "loop" if sizes is SMALL else "auto"
    runtime = Runtime(place=Placement(make_mesh(Layout())), geometry=GEOMETRY, attention_body=body)

    def run(q: jax.Array, cache: LatentCache, work: Work, rank: jax.Array, up: UpProjection) -> Partial:
        assert suits_prompts(cache, GEOMETRY, up.w_uk, up.w_uv) == (sizes is WHOLE)
        return prompt_partial(q, cache, work, GEOMETRY, rank, up=up, mla=sizes, runtime=runtime)

    return jax.jit(run)


@jax.jit
def absorbed(q: jax.Array, cache: LatentCache, work: Work, rank: jax.Array, up: UpProjection) -> Partial:
    out, lse = paged_partial_gathered(up.absorb(q), cache, work, GEOMETRY, rank)
    return Partial(up.values_of(out), lse)


def work_of(spans: Sequence[tuple[int, int]]) -> Work:
    """Requests of `start` tokens computed before and `count` in this step."""
    step = [
        replace(entry, start=start, count=count, block_table=list(range(row * WIDTH, row * WIDTH + WIDTH)))
        for row, (entry, (start, count)) in enumerate(zip(scheduled([sum(span) for span in spans]), spans, strict=True))
    ]
    shapes = ShapeBuckets(max_rows=ROWS, max_tokens=TOKENS, table_width=WIDTH, whole_prompts_from=1)
    work = build(step, Fixed(**vars(shapes)), GEOMETRY).work
    assert work.tiles[-1].size == TOKENS
    return work


class Fixed(ShapeBuckets):
    """One shape, so that one program serves all examples."""

    def decode_only(self, step: Any) -> bool:
        return False

    def rows(self, count: int) -> int:
        return self.max_rows

    def tokens(self, count: int) -> int:
        return self.max_tokens


@pytest.mark.parametrize("sizes", [SMALL, WHOLE], ids=["loop", "kernel"])
@example(spans=[(100, 39), (5, 7), (3, 2)], rank=0, seed=1, poison=np.nan)  # a short tile at the end of a full step
@given(
    spans=SPANS,
    rank=st.integers(0, 1),
    seed=st.integers(0, 2**32 - 1),
    poison=st.sampled_from([0.0, np.nan, np.inf, 1e30]),
)
def test_prompts_of_any_length_behind_any_prefix_equal_the_absorbed_reference(sizes, spans, rank, seed, poison):
    random = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return random.normal(size=shape).astype(np.float32)

    weights = (
        draw(HEADS, dim, sizes.latent_rank) / sizes.latent_rank**0.5 for dim in (sizes.nope_dim, sizes.value_dim)
    )
    up = UpProjection(*weights, sizes.qk_dim**-0.5)  # type: ignore[arg-type]
    latents, work = draw(ROWS * WIDTH, 1, GEOMETRY.slots, sizes.cached_dim), work_of(spans)
    clean = LatentCache(latents=latents)
    positions = GEOMETRY.position(np.arange(WIDTH)[:, None], rank, np.arange(GEOMETRY.slots)[None, :])
    dirty = latents.reshape(ROWS, WIDTH, GEOMETRY.slots, -1).copy()
    for row in range(ROWS):
        dirty[row, positions >= (sum(spans[row]) if row < len(spans) else 0)] = poison
    q = draw(TOKENS, HEADS, sizes.qk_dim)
    expected = absorbed(q, clean, work, rank, up)
    found = by_heads(sizes)(q, LatentCache(latents=dirty.reshape(latents.shape)), work, rank, up)
    np.testing.assert_allclose(found.out, expected.out, rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(found.lse, expected.lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", [SMALL, WHOLE], ids=["loop", "kernel"])
@pytest.mark.parametrize("count", [20, 40])
def test_a_latent_that_is_not_finite_spoils_only_the_queries_that_see_it(sizes, count):
    work = work_of([(0, count), (0, 3)])
    latents = np.random.default_rng(0).normal(size=(ROWS * WIDTH, 1, GEOMETRY.slots, sizes.cached_dim))
    latents[1, 0, 1] = np.nan  # position 9, on rank 0
    up = UpProjection(*(jnp.ones((HEADS, dim, sizes.latent_rank)) for dim in (sizes.nope_dim, sizes.value_dim)), 1e-3)
    q = jnp.ones((TOKENS, HEADS, sizes.qk_dim))
    out, _ = by_heads(sizes)(q, LatentCache(latents=latents.astype(np.float32)), work, 0, up)
    assert np.isfinite(out).all(axis=(1, 2)).tolist() == [token < 9 or token >= count for token in range(TOKENS)]


@pytest.mark.parametrize("dtype", sample([np.float32, np.uint16], np.float32))
def test_threads_change_no_bit_of_a_prompt(dtype):
    random, work = np.random.default_rng(2), work_of([(300, 39), (20, 5), (3, 1)])
    latents = encode(
        jnp.asarray(random.normal(size=(ROWS * WIDTH, 1, GEOMETRY.slots, WHOLE.cached_dim))), np.dtype(dtype)
    )
    q, w_uk, w_uv = (
        random.normal(size=size).astype(np.float32)
        for size in ((TOKENS, HEADS, WHOLE.qk_dim), (HEADS, WHOLE.nope_dim, 96), (HEADS, WHOLE.value_dim, 96))
    )
    where = LatentCache(latents=latents), work, work.tiles[1], GEOMETRY, jnp.int32(0)
    one, many = (
        jax.jit(lambda: prompt_partial_on_cpu(q / 10, *where, w_uk, w_uv, fewest=33, parallel=parallel))()  # noqa: B023
        for parallel in (False, True)
    )
    np.testing.assert_array_equal(one.out, many.out)
    np.testing.assert_array_equal(one.lse, many.lse)
    assert np.isfinite(one.lse).all(axis=1).tolist() == [token < 44 for token in range(TOKENS)]


# --- equal results, whole models

LENGTHS = (90, 3, 41, 1, 200)  # in steps of 64 tokens, four at a time: chunked, mixed and beside decodes


@cache
def stepper(**options: Any) -> Stepper:
    made = Stepper(GOLDENS / "deepseek-v3", max_num_batched_tokens=64, one_shape=True, **options)
    with_gathered_queries(made.runner)
    return made


def traces(**options: Any) -> list[Trace]:
    random = np.random.default_rng(5)
    return stepper(**options).greedy([random.integers(0, 101, length).tolist() for length in LENGTHS], 5)


@cache
def reference() -> list[Trace]:
    """Absorbed, on one device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mla, "uses_up_projection", lambda *_: False)
        return traces(block_size=32)


@pytest.mark.parametrize(
    ("tp", "dcp", "options"),
    [
        (1, 1, {}),
        swept((2, 4, {"dcp_comm_backend": "ag_rs"})),
        (2, 4, {"dcp_comm_backend": "a2a"}),
        (1, 8, {"dcp_comm_backend": "psum"}),
        (4, 2, {"dcp_replicate_q": True, "cp_kv_cache_interleave_size": 4}),
        swept((8, 1, {})),
    ],
)
def test_up_projected_prompts_equal_absorbed_ones_on_every_layout(tp, dcp, options):
    layout = {"tensor_parallel_size": tp * dcp, "decode_context_parallel_size": dcp}
    for expected, found in zip(reference(), traces(**layout, **options), strict=True):
        assert found.tokens == expected.tokens
        np.testing.assert_allclose(found.every_logits, expected.every_logits, rtol=0, atol=TOLERANCE)


def test_up_projected_prompts_equal_transformers():
    expected = golden("deepseek-v3")
    prompts = [expected[name].tolist() for name in ("prompt", "short_prompt", "long_prompt")]
    first, short, long = stepper(tensor_parallel_size=8, decode_context_parallel_size=4).greedy(prompts, 24)
    np.testing.assert_allclose(first.prompt_logits, expected["logits"], rtol=0, atol=2e-4)
    np.testing.assert_array_equal(first.tokens, expected["greedy"])
    np.testing.assert_array_equal(short.tokens[:8], expected["short_greedy"])
    np.testing.assert_array_equal(long.tokens[:16], expected["long_greedy"])


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30])
def test_a_poisoned_cache_changes_nothing(poison):
    layout = {"tensor_parallel_size": 8, "decode_context_parallel_size": 4}
    clean = traces(**layout)
    stepper(**layout).poison(poison)
    for expected, found in zip(clean, traces(**layout), strict=True):
        np.testing.assert_array_equal(found.every_logits, expected.every_logits)


# --- what is sent

SENT = {  # of the bytes of a result, by each device of n
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: n - 1,
    "all-to-all": lambda n: (n - 1) / n,
    "all-reduce": lambda n: 2 * (n - 1) / n,
}


@cache
def program(merge: str, *, up: bool) -> str:
    with pytest.MonkeyPatch.context() as patch:
        if not up:
            patch.setattr(mla, "uses_up_projection", lambda *_: False)
        own = runner.__wrapped__(1, 8, dcp_comm_backend=merge)
        return compiled(own, scheduled([60], count=40)).as_text()


def attention_bytes(text: str) -> float:
    """What each of eight devices sends for queries, up-projections and merges."""
    scopes = ("/gather_query/", "/gather_up_projection/", "/merge/")
    lines = "\n".join(line for line in text.splitlines() if any(scope in line for scope in scopes))
    return sum(
        4 * math.prod(int(size) for size in dims.split(",")) * SENT[kind](8)
        for kind, result in instructions(lines)
        for dims in re.findall(r"f32\[([\d,]+)\]", result)
    )


@pytest.mark.parametrize("merge", sample(["ag_rs", "a2a", "psum"], "ag_rs"))
def test_a_long_chunk_sends_queries_and_results_of_the_heads_own_dimensions(merge):
    """64 tokens and 8 heads: queries of 20 instead of 28 numbers, results of 10 instead of 20, weights of 22 * 20."""
    layers, times = 2, 2 if merge == "psum" else 1
    saved = 4 * 7 / 8 * 8 * (64 * (28 - 20) + times * 64 * (20 - 10) - 22 * 20)
    found = [attention_bytes(program(merge, up=up)) for up in (False, True)]
    assert found[0] - found[1] == pytest.approx(layers * saved)
    assert saved > 0


def test_up_projections_are_gathered_beside_the_collectives_of_every_step_and_latents_never():
    shard = min(array.addressable_shards[0].data.size for array in jax.tree.leaves(runner(1, 8).cache))
    kinds = {}
    for up in (False, True):
        found = instructions(program("ag_rs", up=up))
        kinds[up] = sorted(kind for kind, _ in found)
        for kind, result in found:
            for dims in re.findall(r"\[([\d,]+)\]", result):
                assert math.prod(int(size) for size in dims.split(",")) < shard / 4, f"{kind} moves {result}"
    assert kinds[True] == sorted([*kinds[False], *["all-gather"] * 2])  # W_uk with W_uv, two layers


def test_decodes_alone_and_short_chunks_gather_no_weights():
    for step in (scheduled([20, 40]), scheduled([20], count=20)):
        assert "up_projection/all-gather" not in (text := compiled(runner(1, 8), step).as_text())
        assert "/up_projection/" in text


# --- what is multiplied

BLOCK, CHUNK = 1024, 256  # tokens


def traced() -> tuple[Any, Batch]:
    """The third 256 tokens of a block of 1,024, on four ranks, as abstract arrays: nothing is computed."""
    config, layout = config_of("mla"), Layout(tensor_parallel_size=8, decode_context_parallel_size=4)
    place, geometry = Placement(make_mesh(layout)), CacheGeometry(block_size=BLOCK, dcp=4)

    shapes = ShapeBuckets(max_rows=1, max_tokens=CHUNK, table_width=8, whole_prompts_from=CHUNK)
    batch = build(scheduled([3 * CHUNK], count=CHUNK), shapes, geometry)
    forward = bind(decoder.forward, config=config, runtime=Runtime(place=place, geometry=geometry))
    weights = abstract_tree(decoder.weight_specs(config, layout, "float32"), place)
    cache_specs = abstract_tree(decoder.cache_specs(config, layout, 8, geometry.slots, "float32"), place)
    tokens = jax.ShapeDtypeStruct((CHUNK,), np.int32)
    return jax.jit(forward).trace(weights, cache_specs, tokens, batch.work).jaxpr.jaxpr, batch


def inside(jaxpr: Any) -> Iterator[Any]:
    """Equations of a jaxpr and of what it calls, but not of its loops."""
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name != "while":
            for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")):
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    yield from inside(inner)


def loops(jaxpr: Any) -> list[Any]:
    return [each.params["body_jaxpr"].jaxpr for each in inside(jaxpr) if each.primitive.name == "while"]


def dots(jaxpr: Any) -> int:
    return sum(flops(each) for each in inside(jaxpr) if each.primitive.name == "dot_general")


def test_a_step_multiplies_exactly_what_the_choice_counts_on(monkeypatch):
    """768 positions are two chunks of 128 slots on each of four ranks; a device has four of the eight heads."""
    sizes = config_of("mla").mla
    assert sizes is not None
    pairs = 2 * 4 * 2 * 128  # multiplication and addition, heads, chunks, slots
    made, each = sizes.latent_rank * (sizes.nope_dim + sizes.value_dim), sizes.qk_dim + sizes.value_dim

    jaxpr, batch = traced()
    whole = batch.work.tiles[1]
    assert (int(whole.count), whole.size, int(whole.chunks[0])) == (1, CHUNK, 2)
    tile, _ = loops(jaxpr)  # and the single tokens
    _, chunk = loops(tile)  # a tile too short, and this one
    (piece,) = loops(chunk)
    up = 2 * (dots(chunk) + CHUNK // up_projected.PIECE * dots(piece))
    assert up == pairs * (made + CHUNK * each)

    monkeypatch.setattr(mla, "uses_up_projection", lambda *_: False)
    jaxpr, _ = traced()
    _, tile = loops(jaxpr)
    (chunk,) = loops(tile)
    assert 2 * dots(chunk) == pairs * CHUNK * 2 * sizes.cached_dim > up
