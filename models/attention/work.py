"""What attention needs to know about one step: which tokens, where they lie, how their queries are tiled.

A tile is up to `size` query tokens of one request. It visits that request's slots in chunks of a fixed size, so the
cost follows the live tokens and a request's result does not depend on its neighbours. The host lists the tiles from
global lengths: the list is the same on every rank.
"""

from dataclasses import dataclass
from typing import Literal

import jax
from flax import struct

from dcpjax.models.kv_cache import CacheGeometry
from dcpjax.sharding.merge_cost import Link, Merge
from dcpjax.sharding.rules import Placement


@struct.dataclass
class Tiles:
    """Query tiles of one step. Entries past `count` are padding and are never visited."""

    # [G] int32, host: index of the tile's first token in the step
    start: jax.Array
    # [G] int32, host: the tile's row of the block table
    row: jax.Array
    # [G] int32, host: chunks of slots to visit, from the position of the tile's last token
    chunks: jax.Array
    # [] int32, host: tiles in use
    count: jax.Array
    # tokens per tile
    size: int = struct.field(pytree_node=False)


@struct.dataclass
class Work:
    """What attention needs to know about a step's N tokens."""

    # [N] int32, host: position of each token in its request, -1 for padding
    positions: jax.Array
    # [N] int32, host: row of the block table that each token belongs to, -1 for padding
    rows: jax.Array
    # [R, W] int32, host: block ids of each row's request, -1 for padding; W a multiple of `chunk_blocks`
    block_table: jax.Array
    # decode tiles of one token, prefill tiles of many: each token is in exactly one tile
    tiles: tuple[Tiles, ...]


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """How a model runs, besides its numbers."""

    place: Placement
    geometry: CacheGeometry
    dcp_comm_backend: Merge | Literal["auto"] = "ag_rs"
    dcp_replicate_q: bool = False
    dcp_overlap: bool = False
    link: Link | None = None  # by which "auto" chooses
    attention_body: Literal["auto", "loop", "gather", "pallas"] = "auto"
