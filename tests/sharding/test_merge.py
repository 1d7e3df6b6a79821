from collections.abc import Callable
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from dcpjax.sharding.merge import MERGES, Partial, flatten_heads, merge, weight
from dcpjax.sharding.mesh import Layout, make_mesh

MESHES = [(1, 2), (1, 4), (1, 8), (2, 4), (4, 2)]  # (tp, dcp)
TOKENS, HEADS, HEAD_DIM, KEYS = 5, 3, 4, 24  # per device: 12 features, padded for dcp=8
SEEDS = st.integers(0, 2**32 - 1)

joined = jax.jit(merge)


def dense(scores: np.ndarray, values: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float64 softmax of scores [T, H, S] over visible keys, on values [S, H, Y] -> out [T, H, Y], lse [T, H]."""
    visible = mask[:, None, :]
    top = np.where(visible, scores, -np.inf).max(-1, initial=-1e300, keepdims=True)
    shares = np.where(visible, np.exp(np.where(visible, scores - top, 0.0)), 0.0)
    total = shares.sum(-1)
    empty = total == 0
    out = np.einsum("NHS,SHD->NHD", shares, values) / np.where(empty, 1.0, total)[..., None]
    return out, np.where(empty, -np.inf, top[..., 0] + np.log(np.where(empty, 1.0, total)))


def random_case(seed: int, spread: float) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    scores = random.normal(scale=spread, size=(TOKENS, HEADS, KEYS))
    return scores, random.normal(size=(KEYS, HEADS, HEAD_DIM))


def shards(seed: int, ranks: int) -> np.ndarray:
    """Masks [ranks, T, S] of disjoint key subsets: some ranks see nothing, and token 0 sees nothing anywhere."""
    random = np.random.default_rng(seed)
    owner = random.choice(random.choice(ranks, size=max(1, ranks - 1), replace=False), size=KEYS)
    seen = random.random((TOKENS, KEYS)) < random.random((TOKENS, 1))
    seen[0] = False
    return (owner == np.arange(ranks)[:, None])[:, None, :] & seen


def partials(scores: np.ndarray, values: np.ndarray, masks: np.ndarray) -> list[Partial]:
    made = (dense(scores, values, mask) for mask in masks)
    return [Partial(jnp.float32(out), jnp.float32(lse)) for out, lse in made]


def assert_close(found: Partial, expected: tuple[np.ndarray, np.ndarray]) -> None:
    """An lse is rounded to float32, so the weights computed from it have an error of its spacing."""
    largest = np.abs(expected[1], where=np.isfinite(expected[1]), out=np.zeros_like(expected[1])).max()
    np.testing.assert_allclose(found.out, expected[0], rtol=1e-5, atol=1e-6 + 4 * np.finfo(np.float32).eps * largest)
    np.testing.assert_allclose(found.lse, expected[1], rtol=1e-6, atol=1e-6)


# --- on one device


@given(SEEDS, st.sampled_from([0.1, 3.0, 50.0]))
def test_merge_is_commutative(seed, spread):
    left, right = partials(*random_case(seed, spread), shards(seed, 2))
    one, other = joined(left, right), joined(right, left)
    np.testing.assert_array_equal(one.out, other.out)
    np.testing.assert_array_equal(one.lse, other.lse)


@given(SEEDS, st.sampled_from([0.1, 3.0, 50.0]))
def test_merge_is_associative_and_equals_softmax_over_all_keys(seed, spread):
    scores, values = random_case(seed, spread)
    masks = shards(seed, 3)
    first, second, third = partials(scores, values, masks)
    expected = dense(scores, values, masks.any(0))
    assert_close(joined(joined(first, second), third), expected)
    assert_close(joined(first, joined(second, third)), expected)


@given(SEEDS)
def test_an_empty_partial_is_neutral(seed):
    one, empty = partials(*random_case(seed, 3.0), np.stack([shards(seed, 1)[0], np.zeros((TOKENS, KEYS), bool)]))
    for merged in (joined(one, empty), joined(empty, one)):
        np.testing.assert_array_equal(merged.out, one.out)
        np.testing.assert_array_equal(merged.lse, one.lse)


def test_merging_empty_partials_gives_zero_and_minus_infinity():
    empty = Partial(jnp.zeros((TOKENS, HEADS, HEAD_DIM)), jnp.full((TOKENS, HEADS), -jnp.inf))
    merged = joined(joined(empty, empty), empty)
    np.testing.assert_array_equal(merged.out, 0.0)
    np.testing.assert_array_equal(merged.lse, -np.inf)


def test_lse_is_a_natural_logarithm():
    # keys of scores ln 2 and ln 6 have weights 2 / 8 and 6 / 8
    left = Partial(jnp.full((1, 1, 1), 4.0), jnp.full((1, 1), np.log(2.0), jnp.float32))
    right = Partial(jnp.full((1, 1, 1), 8.0), jnp.full((1, 1), np.log(6.0), jnp.float32))
    merged = merge(left, right)
    np.testing.assert_allclose(merged.out, 7.0, rtol=1e-6)
    np.testing.assert_allclose(merged.lse, np.log(8.0), rtol=1e-6)


def test_far_apart_lse_neither_overflow_nor_vanish():
    low = Partial(jnp.full((1, 1, 1), 4.0), jnp.full((1, 1), -1e4))
    high = Partial(jnp.full((1, 1, 1), 8.0), jnp.full((1, 1), 1e4))
    for merged in (merge(low, high), merge(high, low)):
        assert merged.out.item() == 8.0
        assert merged.lse.item() == 1e4


def test_the_weight_of_an_empty_partial_is_zero_even_if_all_are_empty():
    lse = jnp.array([-jnp.inf, -jnp.inf, 0.0])
    total = jnp.array([-jnp.inf, 1.0, jnp.log(2.0)])
    np.testing.assert_allclose(weight(lse, total), [0.0, 0.0, 0.5], rtol=1e-6)


# --- across dcp


@cache
def on_mesh(tp: int, dcp: int, features: int) -> Callable[[jax.Array, jax.Array], dict[str, jax.Array]]:
    """All three merges of out [tp, dcp, T, H, Y] and lse [tp, dcp, T, H], one rank's partial per device."""

    def body(out: jax.Array, lse: jax.Array) -> dict[str, jax.Array]:
        part = Partial(out[0, 0], lse[0, 0])
        return {name: across(part, features) for name, across in MERGES.items()}

    mesh = make_mesh(Layout(tensor_parallel_size=tp * dcp, decode_context_parallel_size=dcp))
    per_device, whole_pool = P("tp", "dcp"), P(None, ("tp", "dcp"))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(per_device, per_device), out_specs=whole_pool, check_vma=False)
    return jax.jit(mapped)


def merged_and_expected(tp: int, dcp: int, seed: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """What each merge gives on a mesh, and the float64 oracle, as [T, tp * features] with zeros in padded features."""
    features = -(-HEADS * HEAD_DIM // dcp) * dcp
    outs, lses, expected = [], [], []
    for group in range(tp):
        scores, values = random_case(seed + group, 3.0)
        masks = shards(seed + group, dcp)
        made = partials(scores, values, masks)
        outs.append(jnp.stack([part.out for part in made]))
        lses.append(jnp.stack([part.lse for part in made]))
        whole = dense(scores, values, masks.any(0))[0].reshape(TOKENS, -1)
        expected.append(np.pad(whole, ((0, 0), (0, features - whole.shape[1]))))
    found = on_mesh(tp, dcp, features)(jnp.stack(outs), jnp.stack(lses))
    own = {shard.data.shape for out in found.values() for shard in out.addressable_shards}
    assert own == {(TOKENS, features // dcp)}
    return jax.device_get(found), np.concatenate(expected, 1)


@pytest.mark.parametrize("backend", MERGES)
@pytest.mark.parametrize(("tp", "dcp"), MESHES)
@pytest.mark.parametrize("seed", range(3))
def test_merge_over_ranks_equals_softmax_over_all_keys(tp, dcp, seed, backend):
    found, expected = merged_and_expected(tp, dcp, seed)
    np.testing.assert_allclose(found[backend], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("tp", "dcp"), MESHES)
def test_the_three_merges_agree(tp, dcp):
    found, _ = merged_and_expected(tp, dcp, 11)
    for backend in MERGES:
        np.testing.assert_allclose(found[backend], found["ag_rs"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", MERGES)
def test_heads_that_divide_by_dcp_merge_to_the_same_as_one_device(backend):
    """Eight heads over two, four and eight ranks: the packed form of the all-to-all."""
    random = np.random.default_rng(5)
    scores, values = random.normal(size=(2, 8, KEYS)), random.normal(size=(KEYS, 8, 2))
    for dcp in (2, 4, 8):
        owner = np.arange(KEYS) % dcp  # interleave 1
        masks = np.broadcast_to((owner == np.arange(dcp)[:, None])[:, None, :], (dcp, 2, KEYS))
        made = partials(scores, values, masks)
        found = on_mesh(1, dcp, 16)(
            jnp.stack([part.out for part in made])[None], jnp.stack([part.lse for part in made])[None]
        )
        expected = dense(scores, values, np.ones((2, KEYS), bool))[0].reshape(2, 16)
        np.testing.assert_allclose(found[backend], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", MERGES)
def test_a_query_that_no_rank_answers_merges_to_zero(backend):
    out, lse = jnp.zeros((1, 8, TOKENS, HEADS, HEAD_DIM)), jnp.full((1, 8, TOKENS, HEADS), -jnp.inf)
    np.testing.assert_array_equal(on_mesh(1, 8, 16)(out, lse)[backend], 0.0)


@pytest.mark.parametrize("backend", MERGES)
def test_scores_far_apart_on_different_ranks_stay_finite(backend):
    lse = jnp.broadcast_to(jnp.array([-1e4, 1e4])[None, :, None, None], (1, 2, TOKENS, HEADS))
    out = jnp.broadcast_to(jnp.array([3.0, 5.0])[None, :, None, None, None], (1, 2, TOKENS, HEADS, HEAD_DIM))
    np.testing.assert_array_equal(on_mesh(1, 2, 12)(out, lse)[backend], 5.0)


def test_flattened_heads_are_padded_with_zeros_at_the_end():
    flat = flatten_heads(jnp.arange(12.0).reshape(1, 3, 4), features=16)
    np.testing.assert_array_equal(flat, [[*range(12), 0, 0, 0, 0]])
