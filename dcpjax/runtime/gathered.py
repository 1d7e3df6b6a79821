"""The arrays of `GatheredKeys`: where a step's gathered keys are, and what is left for gathered queries."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dcpjax.models.attention.gathered_keys import NEW_KEYS
from dcpjax.models.attention.work import GatheredKeys, Work
from dcpjax.models.kv_cache import CacheGeometry
from dcpjax.runtime.tiles import Placed, cut, list_tiles, pack, padded, together


def with_gathered_keys(
    work: Work,
    prompts: Sequence[Placed],
    others: Sequence[Placed],
    *,
    tile: int,
    other_tokens: int,
    other_tile: int,
    piece_blocks: int,
    geometry: CacheGeometry,
) -> Work:
    """The same step with the keys gathered for `prompts`.

    Args:
        tile: tokens of a tile of `prompts`.
        other_tokens: how many tokens the rest of the step may have; 0 if it is always empty.
        other_tile: tokens of a tile of its prompts; 0 if it has none.
        piece_blocks: see `GatheredKeys`.
    """
    tokens, rows = len(work.positions), len(work.block_table)
    new_blocks, first_tokens = _blocks_of_new_keys(prompts, tokens, rows)
    cached = np.zeros(rows, np.int32)
    for entry, row, _ in prompts:
        cached[row] = entry.start
    ends = np.cumsum(geometry.blocks(cached), dtype=np.int32)
    keys = GatheredKeys(
        index_in_chunk=_index_in_chunk(prompts, tokens),  # type: ignore[arg-type]
        first_tokens=first_tokens,  # type: ignore[arg-type]
        new_blocks=new_blocks,  # type: ignore[arg-type]
        cached=cached,  # type: ignore[arg-type]
        ends=ends,  # type: ignore[arg-type]
        pieces=np.int32(-(-ends[-1] // piece_blocks)),  # type: ignore[arg-type]
        others=_indices(others, other_tokens, fill=tokens),  # type: ignore[arg-type]
        other_work=_other_work(work, others, other_tokens, other_tile, geometry) if other_tokens else None,
        piece_blocks=piece_blocks,
    )
    tiles = pack(cut(prompts, tile, in_chunk=True), tile, tokens // tile + rows, NEW_KEYS)
    return replace(work, tiles=(tiles,), gathered_keys=keys)


def _index_in_chunk(prompts: Sequence[Placed], tokens: int) -> np.ndarray:
    index = np.full(tokens, -1, np.int32)
    for entry, _, first in prompts:
        index[first : first + entry.count] = np.arange(entry.count)
    return index


def _blocks_of_new_keys(prompts: Sequence[Placed], tokens: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """The table [B, W] and the first tokens [blocks]: as many blocks as prompts of two tokens and more may need."""
    size, first_tokens = NEW_KEYS.block_size, list[int]()
    table = np.full((rows, -(-tokens // size)), -1, np.int32)
    for entry, row, first in prompts:
        count = NEW_KEYS.blocks(entry.count)
        table[row, :count] = len(first_tokens) + np.arange(count)
        first_tokens += range(first, first + entry.count, size)
    return table, padded(first_tokens, tokens // size + min(rows, tokens // 2), fill=0)


def _indices(others: Sequence[Placed], size: int, *, fill: int) -> np.ndarray:
    indices = [first + offset for entry, _, first in others for offset in range(entry.count)]
    return padded(indices, size, fill=fill)


def _other_work(work: Work, others: Sequence[Placed], size: int, tile: int, geometry: CacheGeometry) -> Work:
    moved, index = together(others), _indices(others, size, fill=-1)
    positions, rows = (np.where(index >= 0, np.asarray(x)[index], -1) for x in (work.positions, work.rows))
    tiles = list_tiles(moved, len(work.block_table), size, tile, geometry)
    return Work(positions, rows, work.block_table, tiles)  # type: ignore[arg-type]
