"""The paged KV cache: where a token's keys and values live, and how they are written and read.

A block holds `block_size` consecutive positions of one request whatever the layout; each dcp rank stores
`block_size / dcp` of them. With block_size 8, dcp 2 and interleave 2:

    position   0 1 2 3 4 5 6 7
    rank       0 0 1 1 0 0 1 1
    slot       0 1 0 1 2 3 2 3

Knows positions, blocks and slots; knows nothing about requests or who owns a block.
"""

from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Ints = TypeVar("Ints", int, np.ndarray, jax.Array)

CHUNK_SLOTS = 128  # slots one pass of attention loads; fewer waste its fixed cost, more waste short requests


@dataclass(frozen=True, kw_only=True)
class CacheGeometry:
    """Position <-> (block index, rank, slot): a bijection, the same arithmetic on host and device."""

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

    @property
    def slots(self) -> int:
        """P: slots of one block on one rank."""
        return self.block_size // self.dcp

    @property
    def chunk_blocks(self) -> int:
        """Blocks that one chunk spans: more than one when a block is short."""
        return max(1, CHUNK_SLOTS // self.slots)

    @property
    def chunk_slots_per_block(self) -> int:
        """Slots a chunk takes from each of its blocks: a divisor of `slots`, unless the divisors are all tiny."""
        if self.slots <= CHUNK_SLOTS:
            return self.slots
        largest = next(size for size in range(CHUNK_SLOTS, 0, -1) if self.slots % size == 0)
        return largest if largest >= CHUNK_SLOTS // 4 else self.slots

    @property
    def chunk_slots(self) -> int:
        """Slots of one chunk on one rank: the unit of attention work, a fixed size."""
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

    def blocks(self, tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-tokens // self.block_size)

    def chunks(self, tokens: int) -> int:
        """Chunks that hold the first `tokens` positions. From the global length: the same on every rank."""
        if tokens <= 0:
            return 0
        block, offset = divmod(tokens - 1, self.block_size)
        stripe, within = divmod(offset, self.dcp * self.interleave)
        last_slot = stripe * self.interleave + min(within, self.interleave - 1)  # rank 0 fills first
        per_block = self.slots // self.chunk_slots_per_block
        if per_block > 1:
            return block * per_block + last_slot // self.chunk_slots_per_block + 1
        return block // self.chunk_blocks + 1


def storage_dtype(dtype: str, platform: str) -> np.dtype:
    """The dtype that holds cached values.

    XLA's CPU backend widens a whole bfloat16 array to scatter into it, so there the same bits are kept in uint16.
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
