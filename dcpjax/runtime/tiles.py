"""Tiles of a step's tokens, listed on the host."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from dcpjax.engine.scheduler import Scheduled
from dcpjax.models.attention.work import Tiles
from dcpjax.models.kv_cache import CacheGeometry


class Placed(NamedTuple):
    """An entry of a step, and where its tokens lie."""

    entry: Scheduled
    row: int  # of the block table
    first: int  # index of its first token


def placed(step: Iterable[Scheduled]) -> list[Placed]:
    """The entries with their tokens one after another."""
    found, first = list[Placed](), 0
    for row, entry in enumerate(step):
        found.append(Placed(entry, row, first))
        first += entry.count
    return found


def together(entries: Iterable[Placed]) -> list[Placed]:
    """Some entries of a step with their tokens moved up, as if they were a step of their own; rows stay."""
    entries = list(entries)
    return [moved._replace(row=own.row) for own, moved in zip(entries, placed(x.entry for x in entries), strict=True)]


def list_tiles(step: Sequence[Placed], rows: int, size: int, tile: int, geometry: CacheGeometry) -> tuple[Tiles, ...]:
    """Tiles of one token for the decodes; when prompts run too, tiles of `tile` tokens for those.

    `size` is the step's number of tokens; a `tile` of 0 says that it cannot have prompts.
    """
    singles = [(own.first, own.row, own.entry.start) for own in step if own.entry.count == 1]
    tiles = [pack(singles, 1, rows, geometry)]
    if tile:
        prompts = [own for own in step if own.entry.count > 1]
        tiles.append(pack(cut(prompts, tile), tile, size // tile + rows, geometry))
    return tuple(tiles)


def cut(entries: Iterable[Placed], size: int, *, in_chunk: bool = False) -> list[tuple[int, int, int]]:
    """(first token, row, last position) of each tile of some entries; `in_chunk` counts positions from their start."""
    return [
        (first + offset, row, (0 if in_chunk else entry.start) + min(offset + size, entry.count) - 1)
        for entry, row, first in entries
        for offset in range(0, entry.count, size)
    ]


def pack(tiles: Sequence[tuple[int, int, int]], size: int, capacity: int, geometry: CacheGeometry) -> Tiles:
    """(first token, row, last position) of each tile as arrays."""
    start, row, chunks = np.zeros((3, capacity), np.int32)
    if tiles:
        start[: len(tiles)], row[: len(tiles)], last_positions = np.array(tiles, np.int32).T
        chunks[: len(tiles)] = geometry.chunks(last_positions + 1)
    return Tiles(start, row, chunks, np.int32(len(tiles)), size)  # type: ignore[arg-type]


def padded(values: Sequence[int] | np.ndarray, size: int, *, fill: int) -> np.ndarray:
    """[size] int32: the values, then `fill`."""
    array = np.full(size, fill, np.int32)
    array[: len(values)] = values
    return array
