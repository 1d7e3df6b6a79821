"""The paged KV cache: where a token's keys and values are stored, and how they are written and read.

A block holds `block_size` consecutive positions of one request for any layout; each dcp rank stores
`block_size / dcp` of them. With block_size 8, dcp 2 and interleave 2:

    position   0 1 2 3 4 5 6 7
    rank       0 0 1 1 0 0 1 1
    slot       0 1 0 1 2 3 2 3
"""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from dcpjax.sharding import struct
from dcpjax.sharding.arrays import Leaf

Ints = TypeVar("Ints", int, np.ndarray, jax.Array)

CHUNK_SLOTS = 128  # loaded at once: with fewer the fixed cost dominates, more are wasted on short requests


@dataclass(frozen=True, kw_only=True)
class CacheGeometry:
    """The bijection of a position and (block index, rank, slot), the same arithmetic on host and device."""

    block_size: int
    dcp: int = 1
    interleave: int = 1

    def __post_init__(self) -> None:
        unit = self.dcp * self.interleave
        if self.block_size < 1 or self.block_size % unit:
            nearest = max(1, round(self.block_size / unit)) * unit
            raise ValueError(
                f"block_size must be a multiple of decode_context_parallel_size * cp_kv_cache_interleave_size "
                f"= {self.dcp} * {self.interleave} = {unit}, but is {self.block_size}; use {nearest}"
            )

    @cached_property
    def slots(self) -> int:
        """P: slots of one block on one rank."""
        return self.block_size // self.dcp

    @cached_property
    def chunk_blocks(self) -> int:
        """Blocks of one chunk: more than one if a block is shorter than a chunk."""
        return max(1, CHUNK_SLOTS // self.slots)

    @cached_property
    def chunk_slots_per_block(self) -> int:
        """Slots a chunk takes from each of its blocks: a divisor of `slots`, or all if the divisors are too small."""
        if self.slots <= CHUNK_SLOTS:
            return self.slots
        largest = next(size for size in range(CHUNK_SLOTS, 0, -1) if self.slots % size == 0)
        return largest if largest >= CHUNK_SLOTS // 4 else self.slots

    @property
    def chunk_slots(self) -> int:
        """S: slots of one chunk on one rank."""
        return self.chunk_blocks * self.chunk_slots_per_block

    def locate(self, position: Ints) -> tuple[Ints, Ints, Ints]:
        """position -> (index into the request's block table, rank, slot)."""
        offset = position % self.block_size
        rank = (offset // self.interleave) % self.dcp
        slot = offset // (self.interleave * self.dcp) * self.interleave + offset % self.interleave
        return position // self.block_size, rank, slot

    def position(self, block: Ints, rank: Ints, slot: Ints) -> Ints:
        """(index into the request's block table, rank, slot) -> position."""
        stripe, within = slot // self.interleave, slot % self.interleave
        return block * self.block_size + (stripe * self.dcp + rank) * self.interleave + within

    def blocks(self, tokens: Ints) -> Ints:
        """Blocks that hold this many tokens."""
        return -(-tokens // self.block_size)

    def tokens_per_rank(self, tokens: int) -> tuple[int, ...]:
        """The number of the first `tokens` positions that each rank stores."""
        stripes, rest = divmod(tokens, self.dcp * self.interleave)
        over = (min(max(rest - rank * self.interleave, 0), self.interleave) for rank in range(self.dcp))
        return tuple(stripes * self.interleave + extra for extra in over)

    def chunks(self, tokens: Ints) -> Ints:
        """Chunks that hold the first `tokens` positions; the same on every rank, enough for the fullest one.

        For 0 tokens the result is 0: the last position is then -1, in the last chunk of block -1.
        """
        last, stripe = tokens - 1, self.dcp * self.interleave
        block, offset = last // self.block_size, last % self.block_size
        within = offset % stripe
        beyond = within - (self.interleave - 1)  # positions on ranks after rank 0, which is filled first
        last_slot = offset // stripe * self.interleave + within - beyond * (beyond > 0)
        per_block = self.slots // self.chunk_slots_per_block
        if per_block > 1:
            return block * per_block + last_slot // self.chunk_slots_per_block + 1
        return block // self.chunk_blocks + 1


def storage_dtype(dtype: str, platform: str) -> np.dtype:
    """The dtype in which the cache stores values.

    XLA's CPU backend converts a whole bfloat16 array to float32 to scatter into it, so on CPU the same bits are
    stored as uint16.
    """
    return np.dtype(np.uint16) if dtype == "bfloat16" and platform == "cpu" else jnp.dtype(dtype)


def encode(values: jax.Array, dtype: np.dtype) -> jax.Array:
    """float32 values -> what the cache stores."""
    if dtype == np.uint16:
        return jax.lax.bitcast_convert_type(values.astype(jnp.bfloat16), jnp.uint16)
    return values.astype(dtype)


def decode(stored: jax.Array) -> jax.Array:
    """What the cache stores -> float32 values."""
    if stored.dtype == jnp.uint16:  # bfloat16 is the upper half of a float32
        return jax.lax.bitcast_convert_type(stored.astype(jnp.uint32) << 16, jnp.float32)
    return stored.astype(jnp.float32)


class Chunk(NamedTuple):
    """The slots of one chunk of a request on this rank."""

    block_ids: jax.Array  # [blocks] int32
    first: jax.Array  # [] int32: first slot within each of these blocks
    size: int  # slots within each of these blocks; S = blocks * size
    positions: jax.Array  # [S] int32: position of each slot in the request


def locate_chunk(table: jax.Array, row: jax.Array, chunk: jax.Array, geometry: CacheGeometry, rank: jax.Array) -> Chunk:
    """Chunk number `chunk` of the request in `row` of the block table [B, W]."""
    size, blocks = geometry.chunk_slots_per_block, geometry.chunk_blocks
    pieces = geometry.slots // size  # chunks per block where a block is long
    first_block, first_slot = chunk // pieces * blocks, chunk % pieces * size
    ids = jax.lax.dynamic_slice(table, (row, first_block), (1, blocks), allow_negative_indices=False)[0]
    index = first_block + jnp.arange(blocks)
    positions = geometry.position(index[:, None], rank, first_slot + jnp.arange(size)[None, :])
    return Chunk(jnp.maximum(ids, 0), first_slot, size, positions.reshape(-1))


@struct.dataclass
class LayerCache:
    """One layer's keys and values: N blocks of P slots per rank."""

    # [N, dcp, K, D, P] cache dtype, transposed so that scores read along slots
    keys: Leaf
    # [N, dcp, K, P, D] cache dtype
    values: Leaf

    SLOT_AXES: ClassVar = (4, 3)  # along which each array has a block's slots

    @property
    def num_blocks(self) -> int:
        return self.keys.shape[0]

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[2]

    @property
    def value_dim(self) -> int:
        return self.values.shape[4]

    def read(self, chunk: Chunk) -> tuple[jax.Array, jax.Array]:
        """Per device: keys [K, D, S], values [K, S, D] of one chunk, as float32."""
        return decode(_read_slots(self.keys, chunk, axis=4)), decode(_read_slots(self.values, chunk, axis=3))

    def read_blocks(self, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Per device: keys [W * P, K, D], values [W * P, K, D] of the whole blocks `ids` [W], as float32."""
        keys, values = self.keys[ids, 0].transpose(0, 3, 1, 2), self.values[ids, 0].transpose(0, 2, 1, 3)
        return decode(keys).reshape(-1, *keys.shape[2:]), decode(values).reshape(-1, *values.shape[2:])

    def read_stored(self, ids: jax.Array) -> "LayerCache":
        """Per device: the whole blocks `ids` [n] as a cache of their own."""
        return LayerCache(_read_blocks(self.keys, ids), _read_blocks(self.values, ids))

    def of_tokens(self, new: tuple[jax.Array, ...], tokens: jax.Array) -> "LayerCache":
        """Per device: new keys and values [T, K, D] as a cache like this one, whose blocks hold `tokens` [n, P]."""
        keys, values = (encode(x, self.keys.dtype)[tokens][:, None] for x in new)
        return LayerCache(keys.transpose(0, 1, 3, 4, 2), values.transpose(0, 1, 3, 2, 4))

    def write(self, new: tuple[jax.Array, ...], block: jax.Array, slot: jax.Array) -> "LayerCache":
        """Per device: store keys and values [T, K, D] at (block, slot) [T]; a block past the end is dropped."""
        k, v = new
        keys = self.keys.at[block, 0, :, :, slot].set(encode(k, self.keys.dtype), mode="drop")
        values = self.values.at[block, 0, :, slot, :].set(encode(v, self.values.dtype), mode="drop")
        return LayerCache(keys, values)


@struct.dataclass
class LatentCache:
    """One layer's latents, for multi-head latent attention: one KV head whose keys are also its values."""

    # [N, dcp, P, C + R] cache dtype
    latents: Leaf

    SLOT_AXES: ClassVar = (2,)

    @property
    def num_blocks(self) -> int:
        return self.latents.shape[0]

    @property
    def kv_heads(self) -> int:
        return 1

    @property
    def value_dim(self) -> int:
        """C + R: multiplying R columns too many is cheaper than a slice of the cache."""
        return self.latents.shape[3]

    def read(self, chunk: Chunk) -> tuple[jax.Array, jax.Array]:
        """Per device: keys [1, C + R, S], values [1, S, C + R] of one chunk, as float32."""
        latents = decode(_read_slots(self.latents, chunk, axis=2))
        return latents.T[None], latents[None]

    def read_blocks(self, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Per device: keys and values [W * P, 1, C + R] of the whole blocks `ids` [W], as float32."""
        latents = decode(self.latents[ids, 0]).reshape(-1, 1, self.value_dim)
        return latents, latents

    def read_stored(self, ids: jax.Array) -> "LatentCache":
        """Per device: the whole blocks `ids` [n] as a cache of their own."""
        return LatentCache(_read_blocks(self.latents, ids))

    def of_tokens(self, new: tuple[jax.Array, ...], tokens: jax.Array) -> "LatentCache":
        """Per device: new latents [T, C + R] as a cache like this one, whose blocks hold `tokens` [n, P]."""
        (latent,) = new
        return LatentCache(encode(latent, self.latents.dtype)[tokens][:, None])

    def write(self, new: tuple[jax.Array, ...], block: jax.Array, slot: jax.Array) -> "LatentCache":
        """Per device: store latents [T, C + R] at (block, slot) [T]; a block past the end is dropped."""
        (latent,) = new
        return LatentCache(self.latents.at[block, 0, slot].set(encode(latent, self.latents.dtype), mode="drop"))


Cache = LayerCache | LatentCache
AnyCache = TypeVar("AnyCache", LayerCache, LatentCache)


def _read_blocks(stored: jax.Array, ids: jax.Array) -> jax.Array:
    """Whole blocks [n, ...], copied one by one as in `_read_slots`."""

    def copy(index: jax.Array, blocks: jax.Array) -> jax.Array:
        block = jax.lax.dynamic_index_in_dim(stored, ids[index], allow_negative_indices=False)
        return jax.lax.dynamic_update_slice_in_dim(blocks, block, index, 0)

    return jax.lax.fori_loop(0, ids.shape[0], copy, jnp.zeros((ids.shape[0], *stored.shape[1:]), stored.dtype))


def _read_slots(stored: jax.Array, chunk: Chunk, axis: int) -> jax.Array:
    """The slots of a chunk, contiguous: per device [N, 1, ...] with slots along `axis` -> [...].

    Copied block by block: XLA's CPU backend takes several times as long for a gather or a concatenation.
    """
    ids, size = chunk.block_ids, chunk.size
    starts, sizes = [jnp.zeros_like(chunk.first)] * stored.ndim, [1, *stored.shape[1:]]
    starts[axis], sizes[axis] = chunk.first, size

    def read(block_id: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice(stored, [block_id, *starts[1:]], sizes, allow_negative_indices=False)[0, 0]

    if ids.shape[0] == 1:
        return read(ids[0])
    shape = list(stored.shape[2:])
    shape[axis - 2] = size * ids.shape[0]

    def copy(index: jax.Array, slots: jax.Array) -> jax.Array:
        block_id = jax.lax.dynamic_index_in_dim(ids, index, keepdims=False, allow_negative_indices=False)
        return jax.lax.dynamic_update_slice_in_dim(slots, read(block_id), index * size, axis - 2)

    return jax.lax.fori_loop(0, ids.shape[0], copy, jnp.zeros(shape, stored.dtype))
