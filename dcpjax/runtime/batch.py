"""A step's requests as arrays of fixed shapes: all that goes from the host to the device.

The tokens of all scheduled requests lie one after another, decodes first. Sizes are rounded up to a few buckets, so
that few programs are compiled. Padding is -1 and is dropped on the device; a token that only the device knows is
`UNKNOWN`.

    tokens  | d0 | d1 | d2 | p0 p0 p0 p0 p0 | p1 p1 p1 | -1 -1 |      3 decodes, 2 prompt chunks, padding
    rows    |  0 |  1 |  2 |  3  3  3  3  3 |  4  4  4 | -1 -1 |
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from dcpjax.engine.scheduler import Scheduled
from dcpjax.models.attention.work import Work
from dcpjax.models.exchange import PromptExchange
from dcpjax.models.kv_cache import CacheGeometry
from dcpjax.runtime.gathered import with_gathered_keys
from dcpjax.runtime.tiles import Placed, list_tiles, padded, placed
from dcpjax.sharding import struct

PREFILL_TILE = 64  # query tokens of a prompt that attend together
SHORT_TILE = 8  # the same, in the smallest steps
LEAST_TOKENS = 32  # of a step that runs prompts


@struct.dataclass
class Batch:
    """One step's input: T tokens of B requests."""

    # [T] int32, host: token ids, -1 for padding, -2 for the newest token of the request's seat
    tokens: jax.Array
    work: Work
    # [B] int32, host: index into the T tokens of each request's last one, 0 for padding
    last: jax.Array
    # [B] int32, host: seat of each request, 0 for padding
    seats: jax.Array


@dataclass(frozen=True, kw_only=True)
class ShapeBuckets:
    """The buckets that step shapes are rounded up to."""

    max_rows: int
    max_tokens: int
    table_width: int
    # fewest tokens of a step in which all tokens of a prompt form one tile; None: tiles have a fixed size
    whole_prompts_from: int | None = None
    # which prompts attend to gathered keys; None: none does
    prompt_exchange: PromptExchange | None = None

    def gathers_keys(self, entry: Scheduled) -> bool:
        """Whether the keys of this entry are gathered, not its queries."""
        exchange = self.prompt_exchange
        return entry.count > 1 and exchange is not None and exchange.keys_travel(entry.start, entry.count)

    def piece_blocks(self, rows: int, geometry: CacheGeometry) -> int:
        """Blocks of gathered keys in a piece: no more than the requests can have."""
        assert self.prompt_exchange is not None
        return max(1, min(self.prompt_exchange.positions // geometry.block_size, rows * self.table_width))

    def decode_only(self, step: Sequence[Scheduled]) -> bool:
        """Whether a step of single tokens alone runs a program of its own, without tiles of many tokens."""
        return all(entry.count == 1 for entry in step)

    def rows(self, count: int) -> int:
        """T and B of a step of single tokens, and rows that are sampled: 1, 8, 16, 32 ..."""
        return 1 if count == 1 else _round_up(count, 8, 2, self.max_rows)

    def prompt_rows(self, count: int) -> int:
        """B of a step that runs prompts: 1, 8, 32, 64 ...: fewer, since each is compiled for each T."""
        return 1 if count == 1 else _round_up(count, 8, 4 if count <= 32 else 2, self.max_rows)

    def tokens(self, count: int) -> int:
        """T of a step that runs prompts: 32, 64, 128 ..."""
        return _round_up(count, LEAST_TOKENS, 2, self.max_tokens)

    def prefill_tile(self, size: int) -> int:
        """Tokens of a prefill tile in a step of T = `size` tokens.

        Few in the smallest steps: these run a few tokens of a long prompt beside decodes, and padding a tile costs as
        much as real tokens.
        """
        if size <= LEAST_TOKENS:
            return min(size, SHORT_TILE)
        whole = self.whole_prompts_from is not None and size >= self.whole_prompts_from
        return size if whole else min(size, PREFILL_TILE)


def _round_up(count: int, least: int, base: int, most: int) -> int:
    size = least
    while size < count:
        size *= base
    return max(count, min(size, most))


def build(step: Sequence[Scheduled], shapes: ShapeBuckets, geometry: CacheGeometry) -> Batch:
    """Lay the scheduled tokens out, in the order of `step`."""
    decode_only = shapes.decode_only(step)
    rows = shapes.rows(len(step)) if decode_only else shapes.prompt_rows(len(step))
    tokens, positions, row_of, last = list[int](), list[int](), list[int](), list[int]()
    table = np.full((rows, shapes.table_width), -1, np.int32)
    for row, entry in enumerate(step):
        stop = entry.start + entry.count
        tokens += entry.request.tokens(entry.start, stop)
        positions += range(entry.start, stop)
        row_of += [row] * entry.count
        last.append(len(tokens) - 1)
        table[row, : len(entry.block_table)] = entry.block_table
    size = rows if decode_only else shapes.tokens(len(tokens))
    tile = 0 if decode_only else shapes.prefill_tile(size)
    work = Work(
        padded(positions, size, fill=-1),  # type: ignore[arg-type]
        padded(row_of, size, fill=-1),  # type: ignore[arg-type]
        table,  # type: ignore[arg-type]
        list_tiles(placed(step), rows, size, tile, geometry),
    )
    seats = padded([entry.request.seat for entry in step], rows, fill=0)
    work = _gather_keys(work, step, tile, shapes, geometry)
    return Batch(padded(tokens, size, fill=-1), work, padded(last, rows, fill=0), seats)  # type: ignore[arg-type]


def _gather_keys(
    work: Work, step: Sequence[Scheduled], tile: int, shapes: ShapeBuckets, geometry: CacheGeometry
) -> Work:
    """The step with the keys gathered for those prompts for which that is cheaper.

    The queries of other prompts are gathered beside them if these have few tokens: a program has room for the queries
    of decodes, of a quarter of its tokens or of all. Otherwise all prompts go the way that is cheaper for all.
    """
    exchange, entries = shapes.prompt_exchange, placed(step)
    if exchange is None or not tile:
        return work
    prompts, others = _split(entries, lambda own: shapes.gathers_keys(own.entry))
    size, rows = len(work.positions), len(work.block_table)
    few = max(LEAST_TOKENS, size // 4)
    if sum(own.entry.count for own in others) > few and any(own.entry.count > 1 for own in others):
        every = [own.entry for own in entries if own.entry.count > 1]
        all_keys = exchange.keys_travel(sum(entry.start for entry in every), sum(entry.count for entry in every))
        prompts, others = _split(entries, lambda own: own.entry.count > 1 and all_keys)
    if not prompts:
        return work
    only_decodes = all(own.entry.count == 1 for own in others)
    other_tokens = rows if only_decodes else few
    return with_gathered_keys(
        work,
        prompts,
        others,
        tile=tile,
        other_tokens=0 if rows == 1 else other_tokens,
        other_tile=0 if only_decodes else shapes.prefill_tile(few),
        piece_blocks=shapes.piece_blocks(rows, geometry),
        geometry=geometry,
    )


def _split(entries: Sequence[Placed], chosen: Callable[[Placed], bool]) -> tuple[list[Placed], list[Placed]]:
    """Those that are chosen, and the others."""
    return [own for own in entries if chosen(own)], [own for own in entries if not chosen(own)]
