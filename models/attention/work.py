"""What attention needs to know about one step: its tokens, their places in the cache, the tiles of their queries.

A tile is up to `size` query tokens of one request. It attends to that request's slots in chunks of a fixed size, so
the cost grows with the tokens in use and a request's result does not depend on the other requests. The host lists the
tiles from the requests' lengths, so the list is the same on every rank.
"""

from dataclasses import dataclass
from typing import Literal

import jax

from dcpjax.models.kv_cache import CacheGeometry
from dcpjax.sharding import struct
from dcpjax.sharding.merge_cost import Link, Merge
from dcpjax.sharding.rules import Placement


@struct.dataclass
class Tiles:
    """I query tiles of one step. Entries from `count` on are padding and are not processed."""

    # [I] int32, host: index of the tile's first token in the step
    start: jax.Array
    # [I] int32, host: the tile's row of the block table
    row: jax.Array
    # [I] int32, host: chunks of slots to visit, from the position of the tile's last token
    chunks: jax.Array
    # [] int32, host: tiles in use
    count: jax.Array
    # most tokens of a tile
    size: int = struct.static()


@struct.dataclass
class GatheredKeys:
    """Which prompts of a step attend to gathered keys, and where those are: see `gathered_keys`."""

    # [T] int32, host: how many tokens of the same request in this step come before; -1 where queries are gathered
    index_in_chunk: jax.Array
    # [blocks] int32, host: index into the step of the first token of each block of new keys
    first_tokens: jax.Array
    # [B, W] int32, host: each row's blocks of new keys, -1 for padding
    new_blocks: jax.Array
    # [B] int32, host: each row's tokens that the cache held before the step; 0 where queries are gathered
    cached: jax.Array
    # [B] int32, host: cached blocks to gather, of this row and those above it
    ends: jax.Array
    # [] int32, host: pieces in which they are gathered
    pieces: jax.Array
    # [n] int32, host: index into the step of each token whose query is gathered, T for padding
    others: jax.Array
    # those tokens as a step of their own; None if the step cannot have any
    other_work: "Work | None"
    # blocks of a piece
    piece_blocks: int = struct.static()


@struct.dataclass
class Work:
    """What attention needs to know about a step's T tokens."""

    # [T] int32, host: position of each token in its request, -1 for padding
    positions: jax.Array
    # [T] int32, host: row of the block table that each token belongs to, -1 for padding
    rows: jax.Array
    # [B, W] int32, host: block ids of each row's request, -1 for padding; W a multiple of `chunk_blocks`
    block_table: jax.Array
    # tiles of one token, and in steps with prompts also tiles of many: each token is in exactly one tile. With
    # `gathered_keys`, tiles of those prompts alone, which visit the chunks of new keys
    tiles: tuple[Tiles, ...]
    # None: the queries of all tokens are gathered
    gathered_keys: GatheredKeys | None = None


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """How a model runs: what does not follow from its config."""

    place: Placement
    geometry: CacheGeometry
    dcp_comm_backend: Merge | Literal["auto"] = "ag_rs"
    dcp_replicate_q: bool = False
    dcp_exchange_dtype: Literal["float32", "bfloat16"] = "float32"
    dcp_overlap: bool = False
    link: Link | None = None  # from which dcp_comm_backend="auto" chooses a merge
    attention_body: Literal["auto", "loop", "gather", "pallas"] = "auto"
