import re

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpjax.models.kv_cache import CHUNK_SLOTS, CacheGeometry, decode, encode, storage_dtype


def geometry(stripes: int, dcp: int, interleave: int) -> CacheGeometry:
    return CacheGeometry(block_size=stripes * dcp * interleave, dcp=dcp, interleave=interleave)


GEOMETRIES = st.builds(geometry, st.integers(1, 12), st.integers(1, 8), st.integers(1, 6))
LONG_BLOCKS = [
    CacheGeometry(block_size=slots * dcp, dcp=dcp, interleave=interleave)
    for slots in (127, 128, 129, 130, 192, 254, 256, 257, 384, 512, 640)
    for dcp in (1, 2)
    for interleave in (1, slots)  # at most one slot in a row, or all of a rank's in one stretch
]


def naive_places(where: CacheGeometry, tokens: int) -> list[tuple[int, int, int]]:
    """Assign `interleave` consecutive positions to each rank in turn; each rank fills its slots in order."""
    places = []
    for block in range(-(-tokens // where.block_size)):
        filled = [0] * where.dcp
        for offset in range(where.block_size):
            rank = offset // where.interleave % where.dcp
            places.append((block, rank, filled[rank]))
            filled[rank] += 1
    return places[:tokens]


@given(GEOMETRIES)
def test_positions_are_dealt_out_to_ranks_in_turn(where):
    tokens = 3 * where.block_size
    assert [where.locate(position) for position in range(tokens)] == naive_places(where, tokens)


@given(GEOMETRIES, st.integers(0, 10**9))
def test_position_and_place_are_a_bijection(where, position):
    block, rank, slot = where.locate(position)
    assert 0 <= rank < where.dcp
    assert 0 <= slot < where.slots
    assert where.position(block, rank, slot) == position


@given(GEOMETRIES)
def test_every_slot_of_every_rank_holds_one_position(where):
    blocks, ranks, slots = np.meshgrid(range(2), range(where.dcp), range(where.slots), indexing="ij")
    positions = where.position(blocks, ranks, slots)
    assert sorted(positions.ravel()) == list(range(2 * where.block_size))
    for found, expected in zip(where.locate(positions), (blocks, ranks, slots), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_the_arithmetic_is_the_same_on_host_and_device():
    where = CacheGeometry(block_size=24, dcp=4, interleave=3)
    positions = np.arange(100)
    for host, device in zip(where.locate(positions), where.locate(jnp.asarray(positions)), strict=True):
        np.testing.assert_array_equal(host, device)


def test_geometry_looks_like_its_drawing():
    where = CacheGeometry(block_size=8, dcp=2, interleave=2)
    _, rank, slot = where.locate(np.arange(8))
    assert rank.tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert slot.tolist() == [0, 1, 0, 1, 2, 3, 2, 3]


def test_one_block_as_long_as_the_context_gives_each_rank_one_stretch():
    where = CacheGeometry(block_size=100, dcp=2, interleave=50)
    assert [where.locate(position)[1] for position in range(100)] == [0] * 50 + [1] * 50


@given(GEOMETRIES, st.integers(0, 400))
def test_blocks_are_just_enough_for_the_tokens(where, tokens):
    blocks = where.blocks(tokens)
    assert blocks * where.block_size >= tokens
    assert blocks == 0 or (blocks - 1) * where.block_size < tokens


def chunk_of(where: CacheGeometry, block: int, slot: int) -> int:
    """A chunk is some slots of one block, or several whole blocks."""
    if where.chunk_blocks > 1:
        return block // where.chunk_blocks
    return block * (where.slots // where.chunk_slots_per_block) + slot // where.chunk_slots_per_block


def assert_chunks_follow_the_live_slots(where: CacheGeometry) -> None:
    """Token after token: the chunks are exactly those that hold one on some rank."""
    live: set[int] = set()
    assert where.chunks(0) == 0
    places = naive_places(where, max(3 * where.block_size, 2 * where.chunk_slots * where.dcp + 1))
    for tokens, (block, _, slot) in enumerate(places, 1):
        live.add(chunk_of(where, block, slot))
        assert where.chunks(tokens) == max(live) + 1 == len(live)
    lengths = np.arange(len(places) + 1)
    assert where.chunks(lengths).tolist() == [where.chunks(tokens) for tokens in range(len(lengths))]


@given(GEOMETRIES)
def test_chunks_of_several_short_blocks_are_exactly_those_that_hold_a_token(where):
    assert_chunks_follow_the_live_slots(where)


@pytest.mark.parametrize("where", LONG_BLOCKS, ids=str)
def test_chunks_of_a_long_block_are_exactly_those_that_hold_a_token(where):
    assert_chunks_follow_the_live_slots(where)


@given(GEOMETRIES | st.sampled_from(LONG_BLOCKS))
def test_a_chunk_takes_equal_parts_of_a_block_or_whole_blocks(where):
    assert where.slots % where.chunk_slots_per_block == 0
    assert where.chunk_blocks == 1 or where.chunk_slots_per_block == where.slots
    assert where.chunk_slots == where.chunk_blocks * where.chunk_slots_per_block


@pytest.mark.parametrize(
    ("block_size", "dcp", "chunk_slots"),
    [(16, 1, 128), (256, 8, 128), (256, 2, 128), (256, 1, 128), (384, 1, 128), (192, 1, 96), (8, 8, 128)],
)
def test_a_chunk_holds_about_as_many_slots_as_one_pass_should_load(block_size, dcp, chunk_slots):
    assert CHUNK_SLOTS == 128
    assert CacheGeometry(block_size=block_size, dcp=dcp).chunk_slots == chunk_slots


@given(st.integers(-5, 600), st.integers(1, 8), st.integers(1, 40))
def test_a_block_size_that_does_not_divide_is_refused_with_the_nearest_that_does(block_size, dcp, interleave):
    unit = dcp * interleave
    if block_size >= 1 and block_size % unit == 0:
        assert CacheGeometry(block_size=block_size, dcp=dcp, interleave=interleave).slots == block_size // dcp
        return
    with pytest.raises(ValueError) as refusal:
        CacheGeometry(block_size=block_size, dcp=dcp, interleave=interleave)
    beginning, advice = str(refusal.value).split("; use ")
    assert beginning == (
        f"block_size must be a multiple of decode_context_parallel_size * cp_kv_cache_interleave_size "
        f"= {dcp} * {interleave} = {unit}, but is {block_size}"
    )
    nearest = min(abs(block_size - legal) for legal in range(unit, 700 + unit, unit))
    assert int(advice) % unit == 0
    assert abs(int(advice) - block_size) == nearest


def test_the_refusal_reads_as_a_sentence():
    sentence = (
        "block_size must be a multiple of decode_context_parallel_size * cp_kv_cache_interleave_size "
        "= 8 * 5 = 40, but is 256; use 240"
    )
    with pytest.raises(ValueError, match=re.escape(sentence)):
        CacheGeometry(block_size=256, dcp=8, interleave=5)


# --- what a slot stores


def test_bfloat16_is_kept_as_its_bits_on_cpu_only():
    assert storage_dtype("bfloat16", "cpu") == np.uint16
    assert storage_dtype("bfloat16", "gpu") == ml_dtypes.bfloat16
    assert storage_dtype("float32", "cpu") == np.float32


def test_every_bfloat16_survives_decoding_and_encoding():
    bits = np.arange(2**16, dtype=np.uint16)
    values = bits.view(ml_dtypes.bfloat16)
    decoded = decode(jnp.asarray(bits))
    assert decoded.dtype == jnp.float32
    np.testing.assert_array_equal(decoded, values.astype(np.float32))
    numbers = ~np.isnan(values.astype(np.float32))
    again = np.asarray(encode(decoded, np.dtype(np.uint16)))
    np.testing.assert_array_equal(again[numbers], bits[numbers])
    assert np.isnan(again[~numbers].view(ml_dtypes.bfloat16).astype(np.float32)).all()


@given(st.integers(0, 2**32 - 1))
def test_encoding_rounds_to_the_nearest_bfloat16(seed):
    random = np.random.default_rng(seed)
    values = (random.normal(size=64) * 10.0 ** random.integers(-20, 20, 64)).astype(np.float32)
    stored = np.asarray(encode(jnp.asarray(values), np.dtype(np.uint16)))
    np.testing.assert_array_equal(stored, values.astype(ml_dtypes.bfloat16).view(np.uint16))


def test_float32_values_are_stored_as_they_are():
    values = jnp.array([1.0, -2.5, 3e-20])
    stored = encode(values, np.dtype(np.float32))
    assert stored.dtype == np.float32
    np.testing.assert_array_equal(decode(stored), values)
