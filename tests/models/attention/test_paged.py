from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, reduce

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paging import dense, request

from dcpjax.engine.scheduler import Scheduled
from dcpjax.models.attention.dispatch import (
    write,
)
from dcpjax.models.attention.paged import (
    paged_partial,
    paged_partial_gathered,
)
from dcpjax.models.attention.softmax import (
    partial,
)
from dcpjax.models.attention.work import (
    Work,
)
from dcpjax.models.kv_cache import CacheGeometry, LayerCache
from dcpjax.runtime.batch import ShapeBuckets, build
from dcpjax.sharding.merge import Partial, merge

POISONS = (np.nan, np.inf, 1e30, -1e30)
SEEDS = st.integers(0, 2**32 - 1)


def assert_close(found: Partial, expected: tuple[np.ndarray, np.ndarray], rounding: float = 0.0) -> None:
    """`rounding` is that of the largest possible score in float32, which no softmax can undo."""
    np.testing.assert_allclose(found.out, expected[0], rtol=1e-5, atol=2e-6 + 2 * rounding)
    np.testing.assert_allclose(found.lse, expected[1], rtol=1e-6, atol=2e-6 + rounding)


# --- the contract, on one device

SHAPES = st.sampled_from([(1, 1, 1, 1, 1), (3, 4, 2, 4, 7), (5, 6, 1, 2, 16), (2, 3, 3, 8, 9)])  # N, H, K, D, S
contract = jax.jit(partial)


def random_case(shape: tuple[int, ...], seed: int, scale: float = 1.0) -> tuple[np.ndarray, ...]:
    """q, k, v and a mask of any density, from no visible key to all."""
    N, H, K, D, S = shape
    random = np.random.default_rng(seed)
    q, k, v = random.normal(size=(N, H, D)), random.normal(size=(S, K, D)), random.normal(size=(S, K, D))
    mask = random.random((N, S)) < random.choice([0.0, 0.2, 0.8, 1.0], size=(N, 1))
    return (scale * q).astype(np.float32), k.astype(np.float32), v.astype(np.float32), mask


def poison(x: np.ndarray, where: np.ndarray | int, value: float) -> np.ndarray:
    """A poisoned copy: a device may still be reading `x` itself."""
    poisoned = x.copy()
    poisoned[where] = value
    return poisoned


@given(SHAPES, SEEDS, st.sampled_from([0.1, 1.0, 5.0]))
def test_partial_equals_dense_softmax(shape, seed, scale):
    case = random_case(shape, seed, scale)
    q, k = np.abs(case[0]), np.abs(case[1])
    assert_close(contract(*case), dense(*case), rounding=np.finfo(np.float32).eps * (q.max() * k.max() * shape[3]))


@given(SHAPES, SEEDS)
def test_a_query_that_sees_no_key_gets_zero_and_minus_infinity(shape, seed):
    q, k, v, mask = random_case(shape, seed)
    mask[0] = False
    out, lse = contract(q, k, v, mask)
    np.testing.assert_array_equal(out[0], 0.0)
    np.testing.assert_array_equal(lse[0], -np.inf)


@given(SHAPES, SEEDS, st.sampled_from(POISONS), st.sampled_from(POISONS))
def test_what_keys_hold_that_nobody_sees_changes_nothing(shape, seed, key_poison, value_poison):
    q, k, v, mask = random_case(shape, seed)
    hidden = ~mask.any(0)
    poisoned = contract(q, poison(k, hidden, key_poison), poison(v, hidden, value_poison), mask)
    clean = contract(q, k, v, mask)
    np.testing.assert_array_equal(poisoned.out, clean.out)
    np.testing.assert_array_equal(poisoned.lse, clean.lse)


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(np.nan),
        pytest.param(np.inf),
        1e30,
        -1e30,
    ],
)
def test_what_a_key_holds_changes_nothing_for_a_query_that_does_not_see_it(value):
    q, k, v, mask = random_case((2, 3, 3, 8, 9), 1)
    mask[0], mask[1] = np.arange(9) != 4, True
    poisoned = contract(q, poison(k, 4, value), poison(v, 4, value), mask)
    clean = contract(q, k, v, mask)
    assert np.isfinite(clean.out).all()
    np.testing.assert_array_equal(poisoned.out[0], clean.out[0])
    np.testing.assert_array_equal(poisoned.lse[0], clean.lse[0])


@given(SHAPES, SEEDS)
def test_huge_scores_stay_finite_and_right(shape, seed):
    """Whole numbers, so that scores near 1e4 are exact in float32 and only the softmax is tested."""
    N, H, K, D, S = shape
    random = np.random.default_rng(seed)
    q = random.integers(-60, 61, (N, H, D)).astype(np.float32)
    k = random.integers(-60, 61, (S, K, D)).astype(np.float32)
    v, mask = random_case(shape, seed)[2:]
    found = contract(q, k, v, mask)
    assert np.isfinite(found.out).all()
    assert_close(found, dense(q, k, v, mask))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_scores_of_ten_thousand_neither_overflow_nor_vanish(sign):
    q, k = jnp.full((1, 1, 1), sign * 1e4), jnp.ones((4, 1, 1))
    out, lse = contract(q, k, jnp.arange(4.0).reshape(4, 1, 1), jnp.ones((1, 4), bool))
    np.testing.assert_allclose(out, 1.5, rtol=1e-6)
    np.testing.assert_allclose(lse, sign * 1e4 + np.log(4.0), rtol=1e-7)


# --- over the paged cache

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 4
ROWS, TOKENS = 4, 16  # of a step; a step of decodes alone has as many tokens as rows


@dataclass(frozen=True)
class Paging:
    """A geometry and a context long enough for several chunks."""

    geometry: CacheGeometry
    context: int

    @property
    def table_width(self) -> int:
        """A multiple of a chunk's blocks, as in the real table."""
        chunk_blocks = self.geometry.chunk_blocks
        return -(-self.geometry.blocks(self.context) // chunk_blocks) * chunk_blocks


def paging(block_size: int, dcp: int, interleave: int, context: int):
    geometry = CacheGeometry(block_size=block_size, dcp=dcp, interleave=interleave)
    return pytest.param(Paging(geometry, context), id=f"{block_size}-{dcp}-{interleave}")


PAGINGS = [
    paging(4, 1, 1, 300),  # 32 blocks in a chunk, three chunks
    paging(2, 2, 1, 300),  # one slot per block and rank, 128 blocks in a chunk
    paging(16, 8, 2, 1100),  # two slots, on eight ranks
    paging(256, 1, 1, 300),  # two chunks in a block
    paging(384, 2, 96, 500),  # chunks of 96 slots, each rank a long stretch
    paging(131, 1, 1, 300),  # no small divisor: one chunk of 131 slots
    paging(512, 2, 256, 600),  # half a block on each rank, two chunks each
]


@dataclass(frozen=True)
class Step:
    """Requests that advance together, with the keys and values of all their positions."""

    spans: Sequence[tuple[int, int]]  # (tokens computed before, tokens in this step), decodes first
    seeds: Sequence[int] = ()
    queries: list[np.ndarray] = field(init=False)
    keys: list[np.ndarray] = field(init=False)
    values: list[np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        made = [self._draw(seed, *span) for seed, span in zip(self.own_seeds, self.spans, strict=True)]
        for name, arrays in zip(("queries", "keys", "values"), zip(*made, strict=True), strict=True):
            object.__setattr__(self, name, list(arrays))

    @property
    def own_seeds(self) -> Sequence[int]:
        return self.seeds or range(len(self.spans))

    @staticmethod
    def _draw(seed: int, start: int, count: int) -> tuple[np.ndarray, ...]:
        random = np.random.default_rng(seed)
        shapes = [(count, HEADS, HEAD_DIM), *[(start + count, KV_HEADS, HEAD_DIM)] * 2]
        return tuple(random.normal(size=shape).astype(np.float32) for shape in shapes)

    def q(self, tokens: int) -> np.ndarray:
        """The step's queries one request after another, and noise where the step is padded."""
        noise = np.random.default_rng(99).normal(size=(tokens, HEADS, HEAD_DIM)).astype(np.float32)
        used = np.concatenate(self.queries)
        return np.concatenate([used, noise[len(used) :]])

    def expected(self, of_rank: Callable[[np.ndarray], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """The oracle over the positions that `of_rank` selects."""
        parts = []
        for (start, count), q, k, v in zip(self.spans, self.queries, self.keys, self.values, strict=True):
            keys, queries = np.arange(start + count), np.arange(start, start + count)
            parts.append(dense(q, k, v, (keys[None, :] <= queries[:, None]) & of_rank(keys)[None, :]))
        out, lse = zip(*parts, strict=True)
        return np.concatenate(out), np.concatenate(lse)


def block_tables(step: Step, where: Paging, seed: int = 7) -> list[list[int]]:
    """Blocks in no particular order, none shared; twice as many exist as are needed."""
    counts = [where.geometry.blocks(start + count) for start, count in step.spans]
    ids = iter(np.random.default_rng(seed).permutation(pool_size(where)).tolist())
    return [[next(ids) for _ in range(count)] for count in counts]


def pool_size(where: Paging) -> int:
    return 2 * ROWS * where.geometry.blocks(where.context)


def work(step: Step, where: Paging, max_tokens: int = TOKENS) -> Work:
    scheduled = [
        Scheduled(request(number, start + count), start, count, table, True)
        for number, ((start, count), table) in enumerate(zip(step.spans, block_tables(step, where), strict=True))
    ]
    shapes = ShapeBuckets(max_rows=ROWS, max_tokens=max_tokens, table_width=where.table_width)
    return build(scheduled, shapes, where.geometry).work


def paged(step: Step, where: Paging, rank: int, unused: float, dtype: type = np.float32) -> LayerCache:
    """One rank's cache: the requests' keys and values in the slots of `locate`, `unused` in all others."""
    g = where.geometry
    keys = np.full((pool_size(where), 1, KV_HEADS, HEAD_DIM, g.slots), unused, dtype)
    values = np.full((pool_size(where), 1, KV_HEADS, g.slots, HEAD_DIM), unused, dtype)
    for table, k, v in zip(block_tables(step, where), step.keys, step.values, strict=True):
        position = np.arange(len(k))
        offset = position % g.block_size
        slot = offset // (g.interleave * g.dcp) * g.interleave + offset % g.interleave
        block = np.array(table)[position // g.block_size]
        mine = owners(position, g) == rank
        keys[block[mine], 0, :, :, slot[mine]] = k[mine]
        values[block[mine], 0, :, slot[mine], :] = v[mine]
    return LayerCache(keys, values)  # type: ignore[arg-type]


def owners(position: np.ndarray, geometry: CacheGeometry) -> np.ndarray:
    return position % geometry.block_size // geometry.interleave % geometry.dcp


@cache
def body(function: Callable[..., Partial], geometry: CacheGeometry) -> Callable[..., Partial]:
    return jax.jit(lambda q, layer, work, rank: function(q, layer, work, geometry, rank))


def run(step: Step, where: Paging, rank: int, unused: float = np.nan, function=paged_partial, **options) -> Partial:
    planned = work(step, where, **options)
    q = step.q(planned.positions.shape[0])
    found = body(function, where.geometry)(q, paged(step, where, rank, unused), planned, np.int32(rank))
    return Partial(*(np.asarray(x)[planned.positions >= 0] for x in found))


def steps(context: int) -> dict[str, Step]:
    """Steps of every kind. In the last two, tiles of 16 tokens reach past the end of their request."""
    return {
        "decode": Step([(context - 1, 1), (0, 1), (context // 2, 1)]),
        "verify": Step([(context - 2, 2), (3, 3), (context // 2, 4), (17, 5)]),
        "chunk": Step([(context - TOKENS, TOKENS)]),
        "mixed": Step([(context - 1, 1), (1, 1), (context // 2, 3), (0, 9)]),
    }


KINDS = ("decode", "verify", "chunk", "mixed")


@pytest.mark.parametrize("where", PAGINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_each_ranks_partial_equals_dense_attention_over_its_positions(where, kind):
    step, geometry = steps(where.context)[kind], where.geometry
    for rank in range(geometry.dcp):
        expected = step.expected(lambda positions, rank=rank: owners(positions, geometry) == rank)
        assert_close(run(step, where, rank), expected)


@pytest.mark.parametrize("where", [where for where in PAGINGS if where.values[0].geometry.dcp > 1])
@pytest.mark.parametrize("kind", KINDS)
def test_merged_over_ranks_equals_dense_attention_over_all_positions(where, kind):
    step = steps(where.context)[kind]
    merged = reduce(merge, [run(step, where, rank) for rank in range(where.geometry.dcp)])
    assert_close(merged, step.expected(lambda positions: positions >= 0))


@pytest.mark.parametrize("where", PAGINGS[:5])
def test_the_loop_equals_the_plain_batched_form(where):
    step, last = steps(where.context)["mixed"], where.geometry.dcp - 1
    assert_close(run(step, where, last), run(step, where, last, function=paged_partial_gathered))


@pytest.mark.parametrize("where", PAGINGS[:4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unused", [np.nan, np.inf, 1e30])
def test_what_unused_slots_hold_changes_nothing(where, kind, unused):
    step = steps(where.context)[kind]
    clean, poisoned = run(step, where, 0, unused=0.0), run(step, where, 0, unused=unused)
    np.testing.assert_array_equal(poisoned.out, clean.out)
    np.testing.assert_array_equal(poisoned.lse, clean.lse)


def test_a_prompt_longer_than_several_tiles_equals_dense_attention():
    where = PAGINGS[0].values[0]
    step = Step([(40, 1), (100, 150), (0, 70)])
    assert_close(run(step, where, 0, max_tokens=256), step.expected(lambda positions: positions >= 0))


def test_several_query_tokens_equal_one_at_a_time():
    where = PAGINGS[1].values[0]
    for count in (2, 3, 4, 5):
        together = Step([(200, count)], seeds=[5])
        for rank in range(2):
            found = run(together, where, rank)
            for index in range(count):
                alone = Step([(200 + index, 1)])
                alone.queries[0] = together.queries[0][index : index + 1]
                alone.keys[0] = together.keys[0][: 201 + index]
                alone.values[0] = together.values[0][: 201 + index]
                assert_close(run(alone, where, rank), (found.out[index : index + 1], found.lse[index : index + 1]))


@pytest.mark.parametrize("where", PAGINGS[:4])
def test_a_decoding_requests_result_does_not_depend_on_its_neighbours(where):
    mine = (where.context - 3, 1)
    first = run(Step([mine, (0, 1), (5, 1)], seeds=[50, 1, 2]), where, 0)
    last = run(Step([(where.context - 1, 1), (7, 1), (64, 1), mine], seeds=[3, 4, 5, 50]), where, 0)
    np.testing.assert_array_equal(last.out[3], first.out[0])
    np.testing.assert_array_equal(last.lse[3], first.lse[0])


@pytest.mark.parametrize("where", PAGINGS[:4])
def test_a_prompts_result_does_not_depend_on_its_neighbours(where):
    mine = (130, 4)
    first = run(Step([mine, (0, 3)], seeds=[50, 1]), where, 0)
    last = run(Step([(where.context - 1, 1), (100, 1), (9, 5), mine], seeds=[2, 3, 4, 50]), where, 0)
    np.testing.assert_array_equal(last.out[7:11], first.out[:4])
    np.testing.assert_array_equal(last.lse[7:11], first.lse[:4])


@pytest.mark.parametrize("where", PAGINGS[1:2])
def test_a_cache_of_bfloat16_bits_equals_attention_over_the_rounded_values(where):
    step = steps(where.context)["mixed"]
    rounded = steps(where.context)["mixed"]
    for arrays in (rounded.keys, rounded.values):
        arrays[:] = [x.astype(ml_dtypes.bfloat16).astype(np.float32) for x in arrays]
    layer = paged(step, where, 0, np.nan, ml_dtypes.bfloat16)
    bits = LayerCache(layer.keys.view(np.uint16), layer.values.view(np.uint16))
    planned = work(step, where)
    found = body(paged_partial, where.geometry)(step.q(TOKENS), bits, planned, np.int32(0))
    mine = owners(np.arange(where.context), where.geometry) == 0
    used = planned.positions >= 0
    assert_close(Partial(found.out[used], found.lse[used]), rounded.expected(lambda positions: mine[positions]))


# --- writing


@pytest.mark.parametrize("where", [PAGINGS[1], PAGINGS[2], PAGINGS[4]])
@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_write_fills_the_slots_that_the_rank_owns_and_no_other(where, dtype):
    step, untouched = steps(where.context)["mixed"], 7.0
    planned = work(step, where)
    stored = ml_dtypes.bfloat16 if dtype == np.uint16 else dtype
    k, v = new_values(step, TOKENS)
    put = jax.jit(lambda layer, k, v, work, rank: write(layer, (k, v), work, where.geometry, rank))
    for rank in (0, where.geometry.dcp - 1):
        expected = paged(step, where, rank, untouched, stored)
        before = erase(expected, step, where, rank, untouched)
        found = put(jax.tree.map(lambda x: x.view(dtype), before), k, v, planned, np.int32(rank))
        np.testing.assert_array_equal(found.keys, expected.keys.view(dtype))
        np.testing.assert_array_equal(found.values, expected.values.view(dtype))


def new_values(step: Step, tokens: int) -> tuple[np.ndarray, ...]:
    """The step's own keys and values [T, K, D], NaN where the step is padded."""
    made = []
    for arrays in (step.keys, step.values):
        new = np.concatenate([x[start:] for (start, _), x in zip(step.spans, arrays, strict=True)])
        made.append(np.pad(new, ((0, tokens - len(new)), (0, 0), (0, 0)), constant_values=np.nan))
    return tuple(made)


def erase(layer: LayerCache, step: Step, where: Paging, rank: int, value: float) -> LayerCache:
    """The cache before the step, without the step's own tokens."""
    past = Step([(0, start) for start, _ in step.spans])
    for mine, theirs in ((past.keys, step.keys), (past.values, step.values)):
        mine[:] = [x[:start] for (start, _), x in zip(step.spans, theirs, strict=True)]
    # the same blocks: those of the longer request, of which the past fills the first
    g, tables = where.geometry, block_tables(step, where)
    keys, values = np.full_like(layer.keys, value), np.full_like(layer.values, value)
    for table, k, v in zip(tables, past.keys, past.values, strict=True):
        for position in range(len(k)):
            index, owner, slot = g.locate(position)
            if owner == rank:
                keys[table[index], 0, :, :, slot] = k[position]
                values[table[index], 0, :, slot, :] = v[position]
    return LayerCache(keys, values)
