"""Attention of prompts to gathered keys: the keys cross the link, the queries stay.

Decodes gather their queries, and merge what each rank found among its keys: little is sent, however long the context.
A chunk of a prompt has many queries, so for it the other way sends less (pass-KV and pass-Q of Yang et al. 2024,
"Context Parallelism for Scalable Million-Token Inference", arXiv:2411.01783, section 3.4). Each rank then attends with
its own heads to all positions, and there is nothing to merge:

    new keys       those of the chunk itself, which every rank computes anyway: nothing is sent
    cached keys    those of earlier chunks and of found prefixes: gathered over dcp, as they are stored, in pieces of a
                   fixed number of blocks, so that the memory they take is bounded

Both are laid out as a small cache that is not split over dcp, for which the usual attention over a paged cache serves.
Its results for the new keys and for each piece are partials over disjoint keys.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dcpjax.models.attention.work import GatheredKeys, Work
from dcpjax.models.kv_cache import CHUNK_SLOTS, AnyCache, CacheGeometry
from dcpjax.sharding import merge
from dcpjax.sharding.merge import Partial
from dcpjax.sharding.mesh import DCP

NEW_KEYS = CacheGeometry(block_size=CHUNK_SLOTS)  # of the cache that holds a step's new keys


class OwnHeads(NamedTuple):
    """The query heads of a dcp group that each rank attends with, and the KV heads of the group that they read.

    A rank has `features` of the group's; if these are not whole heads, its heads are all those that they belong to.
    """

    first: np.ndarray  # [dcp] int: its first query head
    size: int  # number of its query heads
    kv_heads: np.ndarray  # [dcp, n] int: query head i of the count reads KV head number i // (size / n) of these
    head_dim: int
    features: int  # of each rank

    @property
    def are_whole(self) -> bool:
        """Whether a rank's features are those of its heads, so that it has their queries without any exchange."""
        return self.size * self.head_dim == self.features

    def take(self, x: jax.Array) -> jax.Array:
        """Per device: [T, heads of the group, ...] -> those of this rank [T, size, ...]."""
        first = jnp.asarray(self.first, jnp.int32)[merge.rank()]
        return jax.lax.dynamic_slice_in_dim(x, first, self.size, axis=1)

    def own_features(self, out: jax.Array) -> jax.Array:
        """Per device: results of this rank's heads [T, size, D] -> its features [T, features]."""
        flat = out.reshape(out.shape[0], -1)
        if self.are_whole:
            return flat
        starts = np.arange(len(self.first)) * self.features - self.first * self.head_dim
        flat = jnp.pad(flat, ((0, 0), (0, max(0, int(starts.max()) + self.features - flat.shape[1]))))
        start = jnp.asarray(starts, jnp.int32)[merge.rank()]
        return jax.lax.dynamic_slice_in_dim(flat, start, self.features, axis=1)


def own_heads(heads: int, kv_heads: int, head_dim: int, features: int, dcp: int) -> OwnHeads:
    """For a dcp group of so many query heads and KV heads, of whose padded features each rank has `features`."""
    begin = np.minimum(np.arange(dcp) * features, heads * head_dim - 1)
    end = np.minimum((np.arange(dcp) + 1) * features, heads * head_dim)
    count = int(np.max(-(-np.maximum(end, begin + 1) // head_dim) - begin // head_dim))
    first = np.minimum(begin // head_dim, heads - count)
    read = (first[:, None] + np.arange(count)) // (heads // kv_heads)
    shared = max(size for size in range(1, count + 1) if count % size == 0 and _is_read_by(size, read))
    return OwnHeads(first, count, read[:, ::shared], head_dim, features)


def _is_read_by(size: int, read: np.ndarray) -> bool:
    """Whether each `size` neighbouring query heads of every rank read the same KV head."""
    groups = read.reshape(len(read), -1, size)
    return bool((groups == groups[..., :1]).all())


def attend_to_gathered(
    new: tuple[jax.Array, ...],
    cache: AnyCache,
    work: Work,
    geometry: CacheGeometry,
    heads: OwnHeads | None,
    attend: Callable[[AnyCache, Work, CacheGeometry], Partial],
) -> Partial:
    """Attention of the prompts for which `work.gathered_keys` says so; out 0 and lse -inf for all other tokens.

    Per device, inside `shard_map`: new keys and values of the whole step, as they are written to the cache.
    `attend(cache, work, geometry)` is attention with this rank's queries over a cache that is not split.
    """
    keys = work.gathered_keys
    assert keys is not None
    kv_heads = None if heads is None else heads.kv_heads

    def add_piece(number: jax.Array, part: Partial) -> Partial:
        with jax.named_scope("gather_keys"):
            piece = _Piece.of(keys, number, geometry.block_size)
            gathered = _gather(cache, piece.block_ids(work, keys), geometry, kv_heads)
        whole = CacheGeometry(block_size=geometry.block_size)
        return merge.merge(part, attend(gathered, piece.work(work, keys, whole), whole))

    tokens = keys.first_tokens[:, None] + jnp.arange(CHUNK_SLOTS)[None, :]
    own_new = tuple(_select(x, kv_heads, axis=1) for x in new)
    own = cache.of_tokens(own_new, jnp.minimum(tokens, work.positions.shape[0] - 1))
    own_work = Work(keys.index_in_chunk, work.rows, keys.new_blocks, work.tiles)
    return jax.lax.fori_loop(0, keys.pieces, add_piece, attend(own, own_work, NEW_KEYS))


class _Piece(NamedTuple):
    """Which of the cached blocks one piece holds: for each row of the block table some that follow each other."""

    start: jax.Array  # [] int32: number of the first block, among all that are gathered
    first: jax.Array  # [B] int32: index of each row's first block within the piece
    end: jax.Array  # [B] int32: index after each row's last one
    tokens_before: jax.Array  # [B] int32: tokens of each row that were in earlier pieces
    size: int  # blocks

    @classmethod
    def of(cls, keys: GatheredKeys, number: jax.Array, block_size: int) -> "_Piece":
        size = keys.piece_blocks
        start, begins = number * size, jnp.concatenate([jnp.zeros(1, jnp.int32), keys.ends[:-1]])
        first, end = (jnp.clip(x - start, 0, size) for x in (begins, keys.ends))
        return cls(start, first, end, jnp.maximum(start - begins, 0) * block_size, size)

    def block_ids(self, work: Work, keys: GatheredKeys) -> jax.Array:
        """[size] int32: the blocks in the cache, any block where there are none left."""
        number = self.start + jnp.arange(self.size)
        row = jnp.minimum(jnp.sum(keys.ends[None, :] <= number[:, None], axis=1), keys.ends.shape[0] - 1)
        begin = jnp.where(row > 0, keys.ends[jnp.maximum(row - 1, 0)], 0)
        index = jnp.clip(number - begin, 0, work.block_table.shape[1] - 1)
        return jnp.maximum(work.block_table[row, index], 0)

    def work(self, work: Work, keys: GatheredKeys, geometry: CacheGeometry) -> Work:
        """All tokens of a row see all that the piece holds of the row's cached tokens."""
        seen = jnp.clip(keys.cached - self.tokens_before, 0, (self.end - self.first) * geometry.block_size)
        positions = jnp.where(keys.index_in_chunk >= 0, seen[jnp.maximum(work.rows, 0)] - 1, -1)
        width = -(-self.size // geometry.chunk_blocks) * geometry.chunk_blocks
        index = self.first[:, None] + jnp.arange(width)[None, :]
        table = jnp.where(index < self.end[:, None], index, -1)
        (tiles,) = work.tiles
        tiles = replace(tiles, chunks=geometry.chunks(seen[tiles.row]))
        return Work(positions, work.rows, table, (tiles,))


def _gather(cache: AnyCache, ids: jax.Array, geometry: CacheGeometry, kv_heads: np.ndarray | None) -> AnyCache:
    """Blocks `ids` [n] with the slots of all ranks, of the KV heads that each rank reads: one exchange."""
    arrays, structure = jax.tree.flatten(cache.read_stored(ids))
    if kv_heads is not None and kv_heads.shape[1] < cache.kv_heads:  # to each rank the heads that it reads
        arrays = [array[:, 0, kv_heads] for array in arrays]  # [n, dcp, K, ...]
        shapes = [(len(ids), 1, *array.shape[2:]) for array in arrays]
        packed = jnp.concatenate([array.reshape(*array.shape[:2], -1) for array in arrays], axis=2)
        received = jax.lax.all_to_all(packed, DCP, split_axis=1, concat_axis=0, tiled=False)
        kv_heads = None
    else:
        shapes = [array.shape for array in arrays]
        packed = jnp.concatenate([array.reshape(len(ids), -1) for array in arrays], axis=1)
        received = jax.lax.all_gather(packed, DCP)
    ends = np.cumsum([int(np.prod(shape[1:])) for shape in shapes])
    parts = zip(jnp.split(received, ends[:-1], axis=2), shapes, cache.SLOT_AXES, strict=True)
    whole = [_in_order(part.reshape(-1, *shape), axis, geometry) for part, shape, axis in parts]
    return jax.tree.unflatten(structure, [_select(array, kv_heads, axis=2) for array in whole])


def _in_order(received: jax.Array, slot_axis: int, geometry: CacheGeometry) -> jax.Array:
    """What all ranks hold of some blocks, [dcp, n, 1, ...] -> [n, 1, ...] with the slots in the order of positions."""
    before, after = received.shape[1 : slot_axis + 1], received.shape[slot_axis + 2 :]
    striped = received.reshape(geometry.dcp, *before, -1, geometry.interleave, *after)
    return jnp.moveaxis(striped, 0, slot_axis + 1).reshape(*before, geometry.block_size, *after)


def _select(array: jax.Array, kv_heads: np.ndarray | None, axis: int) -> jax.Array:
    """The KV heads along `axis` that this rank reads; None: all."""
    if kv_heads is None or all(heads.tolist() == list(range(array.shape[axis])) for heads in kv_heads):
        return array
    return jnp.take(array, jnp.asarray(kv_heads)[merge.rank()], axis=axis)
