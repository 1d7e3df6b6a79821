"""Experts of one device: equal to a loop over experts, independent of other tokens, work by the tokens routed."""

import re
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpjax.models import routed_experts

TOKENS, CHOICES, EXPERTS, MODEL, FFN, TILE = 6, 3, 5, 16, 12, 4
KINDS = np.int32, np.float32  # of ids and shares

Routing = tuple[np.ndarray, np.ndarray]


def weights(experts: int = EXPERTS, model: int = MODEL, ffn: int = FFN) -> tuple[np.ndarray, ...]:
    generator = np.random.default_rng(0)
    shapes = ((experts, ffn, model), (experts, ffn, model), (experts, model, ffn))
    return tuple(generator.normal(0, shape[2] ** -0.5, shape).astype(np.float32) for shape in shapes)


def states(tokens: int = TOKENS, model: int = MODEL) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(tokens, model)).astype(np.float32)


def shares(ids: np.ndarray) -> np.ndarray:
    return np.random.default_rng(2).uniform(0.1, 1, ids.shape).astype(np.float32)


@cache
def routed(tile: int = TILE) -> Any:
    return jax.jit(partial(routed_experts.routed, tile=tile))


def dense(x: np.ndarray, ids: np.ndarray, share: np.ndarray, gate: Any, up: Any, down: Any) -> np.ndarray:
    """All tokens through one expert after another, in float64."""
    total = np.zeros(x.shape)
    for expert in range(gate.shape[0]):
        rising = x.astype(np.float64) @ gate[expert].T
        result = (rising / (1 + np.exp(-rising)) * (x.astype(np.float64) @ up[expert].T)) @ down[expert].T
        total += result * np.where(ids == expert, share, 0).sum(1)[:, None]
    return total


def choices(tokens: int = TOKENS) -> st.SearchStrategy[np.ndarray]:
    """[T, k]: different experts of each token; those outside [0, EXPERTS) are on other devices."""
    token = st.lists(st.integers(-EXPERTS, 2 * EXPERTS - 1), min_size=CHOICES, max_size=CHOICES, unique=True)
    return st.lists(token, min_size=tokens, max_size=tokens).map(lambda rows: np.array(rows, np.int32))


def assert_equal_to_dense(ids: np.ndarray, tile: int = TILE) -> None:
    x, share = states(), shares(ids)
    found = np.asarray(routed(tile)(x, ids, share, *weights()))
    np.testing.assert_allclose(found, dense(x, ids, share, *weights()), rtol=0, atol=1e-5)


@given(choices())
def test_routed_experts_equal_a_loop_over_experts(ids):
    assert_equal_to_dense(ids)


@pytest.mark.parametrize("tile", [1, 2, 8])
@given(ids=choices())
def test_the_size_of_a_tile_changes_nothing(tile, ids):
    assert_equal_to_dense(ids, tile)


CORNERS = {
    "all tokens to the first expert": np.tile(np.array([0, -1, 9], np.int32), (TOKENS, 1)),
    "all tokens to the last expert": np.tile(np.array([9, -1, EXPERTS - 1], np.int32), (TOKENS, 1)),
    "an expert with no token": np.tile(np.array([0, 2, 4], np.int32), (TOKENS, 1)),
    "every choice elsewhere": np.full((TOKENS, CHOICES), -3, np.int32) + np.arange(CHOICES, dtype=np.int32),
    "one choice here": np.where(np.eye(TOKENS, CHOICES, dtype=bool) & (np.arange(TOKENS) == 1)[:, None], 3, 7).astype(
        np.int32
    ),
}


@pytest.mark.parametrize("corner", CORNERS)
def test_lopsided_routings_drop_no_token(corner):
    assert_equal_to_dense(CORNERS[corner])


def test_nothing_routed_here_gives_zero():
    ids = CORNERS["every choice elsewhere"]
    assert not np.asarray(routed()(states(), ids, shares(ids), *weights())).any()


def test_an_expert_that_no_token_chose_is_not_read():
    ids = CORNERS["an expert with no token"]
    poisoned = tuple(np.where((np.arange(EXPERTS) % 2 == 1)[:, None, None], np.nan, part) for part in weights())
    np.testing.assert_array_equal(
        routed()(states(), ids, shares(ids), *poisoned), routed()(states(), ids, shares(ids), *weights())
    )


@given(choices(), choices())
def test_a_token_gets_the_same_bits_whatever_its_neighbours_chose(ids, others):
    """Token 2 keeps its choices; the other tokens and their choices are replaced."""
    x, share = states(), shares(ids)
    changed, other_x = others.copy(), x[::-1].copy()
    changed[2], other_x[2] = ids[2], x[2]
    alone = np.asarray(routed()(x, ids, share, *weights()))[2]
    np.testing.assert_array_equal(np.asarray(routed()(other_x, changed, share, *weights()))[2], alone)


# --- the grouped product


@cache
def grouped(piece: int) -> Any:
    """`routed` as programs for TPUs compute it, with at most so many pairs in a product."""

    def run(x: jax.Array, ids: jax.Array, share: jax.Array, *stacks: jax.Array) -> jax.Array:
        pairs = routed_experts._Pairs.of(ids, EXPERTS)
        results = routed_experts.in_groups(x, pairs, stacks, choices=CHOICES, rows=ids.size + TILE)
        return routed_experts._sum_of_choices(results, ids, share, pairs, EXPERTS)

    program = jax.jit(run).lower(states(), *(np.zeros((TOKENS, CHOICES), kind) for kind in KINDS), *weights())
    return program.compile()


@pytest.mark.parametrize("piece", [1, 5, 7, TOKENS * CHOICES, 64])
@given(ids=choices())
def test_grouped_products_equal_a_loop_over_experts(piece, ids):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routed_experts, "PIECE", piece)
        found = grouped(piece)(states(), ids, shares(ids), *weights())
    np.testing.assert_allclose(found, dense(states(), ids, shares(ids), *weights()), rtol=0, atol=1e-5)


# --- work


@given(choices())
def test_the_tiles_visited_are_those_that_hold_tokens(ids):
    counts = [int((ids == expert).sum()) for expert in range(EXPERTS)]
    assert visits()(ids) == sum(-(-count // TILE) for count in counts)


@cache
def visits() -> Any:
    """A function from ids to the tiles that the compiled loop multiplied."""
    seen: list[int] = []

    def counting(x: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
        jax.debug.callback(lambda: seen.append(1))
        return swiglu(x, gate, up)

    swiglu = routed_experts.swiglu
    program = jax.jit(lambda *arguments: routed_experts.routed(*arguments, tile=TILE))
    routed_experts.swiglu = counting
    try:
        ids = np.zeros((TOKENS, CHOICES), np.int32)
        compiled = program.lower(states(), ids, shares(ids), *weights()).compile()
    finally:
        routed_experts.swiglu = swiglu

    def count(ids: np.ndarray) -> int:
        seen.clear()
        jax.block_until_ready(compiled(states(), ids, shares(ids), *weights()))
        jax.effects_barrier()
        return len(seen)

    return count


def program_for(experts: int, model: int = 512, ffn: int = 256, dtype: Any = np.float32) -> Any:
    """24 tokens and their choices, in tiles of 8."""

    def of(*shape: int, dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    rising, falling = of(experts, ffn, model, dtype=dtype), of(experts, model, ffn, dtype=dtype)
    arguments = (of(24, model), of(24, CHOICES, dtype=np.int32), of(24, CHOICES), rising, rising, falling)
    return routed(8).lower(*arguments).compile()


@pytest.mark.parametrize("experts", [17, 67])
def test_no_product_runs_over_the_experts(experts):
    """Each tile reads the weights of one expert: no operand or result of a dot has a dimension of all experts."""
    text = program_for(experts).as_text()
    shapes = {name: dims.split(",") for name, dims in re.findall(r"%([\w.-]+) = \w+\[([\d,]*)\]", text)}
    products = re.findall(r"%([\w.-]+) = \S+ (?:dot|custom-call)\(([^)]*)\)", text)
    assert len(products) >= 3
    for result, operands in products:
        for name in (result, *re.findall(r"%([\w.-]+)", operands)):
            assert str(experts) not in shapes.get(name, []), f"{name} {shapes[name]}"


def test_operations_do_not_grow_with_the_experts():
    """One iteration is one tile; besides that only the counting of tokens per expert grows."""
    few, many = (program_for(experts).cost_analysis()["flops"] for experts in (16, 64))
    tile = 8 * 3 * 2 * 512 * 256
    assert few == pytest.approx(tile, rel=0.02)
    assert many - few < 0.005 * few


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_weights_are_neither_copied_nor_widened(dtype):
    stack = 64 * 256 * 512 * np.dtype(dtype).itemsize
    assert program_for(64, dtype=dtype).memory_analysis().temp_size_in_bytes < 3 * stack / 8


@pytest.mark.parametrize(
    ("tokens", "experts", "size"), [(1, 384, 1), (8, 384, 8), (3, 8, 4), (512, 256, 16), (4096, 64, 128), (2, 2, 2)]
)
def test_a_tile_is_a_power_of_two_near_the_tokens_of_an_expert(tokens, experts, size):
    assert routed_experts.tile_size(tokens, experts, min(8, experts)) == size


def test_the_parts_of_all_devices_add_up_to_the_whole():
    """Two devices with two and three of the five experts."""
    ids = np.array([[0, 3, 4], [4, 1, 0], [2, 3, 1], [0, 1, 2], [4, 3, 2], [1, 4, 0]], np.int32)
    x, share = states(), shares(ids)
    first = routed()(x, ids, share, *(part[:2] for part in weights()))
    second = routed()(x, ids - 2, share, *(part[2:] for part in weights()))
    np.testing.assert_allclose(jnp.add(first, second), dense(x, ids, share, *weights()), rtol=0, atol=1e-5)
