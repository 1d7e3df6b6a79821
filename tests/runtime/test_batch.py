from typing import Any

import numpy as np
import pytest
from entries import GEOMETRY, SHAPES, entry, steps
from hypothesis import given
from hypothesis import strategies as st

from dcpjax.engine.request import UNKNOWN
from dcpjax.engine.scheduler import Scheduled
from dcpjax.runtime.batch import PREFILL_TILE, SHORT_TILE, ShapeBuckets, build


def built(*step: Scheduled, shapes: ShapeBuckets = SHAPES) -> Any:
    return build(step, shapes, GEOMETRY)


def test_tokens_lie_one_after_another_with_their_positions_rows_and_seats():
    batch = built(entry(0, 5, 1), entry(1, 0, 3), entry(2, 7, 4))
    assert batch.tokens.tolist()[:9] == [5, 1000, 1001, 1002, 2007, 2008, 2009, 2010, -1]
    assert batch.work.positions.tolist()[:9] == [5, 0, 1, 2, 7, 8, 9, 10, -1]
    assert batch.work.rows.tolist()[:9] == [0, 1, 1, 1, 2, 2, 2, 2, -1]
    assert batch.last.tolist() == [0, 3, 7, 0, 0, 0, 0, 0]
    assert batch.seats.tolist() == [31, 30, 29, 0, 0, 0, 0, 0]
    assert batch.work.block_table[:4, :2].tolist() == [[0, -1], [40, -1], [80, -1], [-1, -1]]


def test_padding_is_told_by_minus_one_everywhere():
    batch = built(entry(0, 5, 1), entry(1, 0, 3))
    for array in (batch.tokens, batch.work.positions, batch.work.rows):
        assert array.shape == (32,)
        assert (array[4:] == -1).all()
    assert (batch.work.block_table[2:] == -1).all()


def test_a_token_in_flight_is_left_to_the_device():
    batch = built(entry(0, 5, 1, in_flight=1), entry(1, 5, 1), entry(2, 0, 3, in_flight=1))
    assert batch.tokens.tolist()[:5] == [UNKNOWN, 1005, 2000, 2001, UNKNOWN]
    assert batch.work.positions.tolist()[:5] == [5, 5, 0, 1, 2]


def test_known_output_tokens_follow_the_prompt():
    assert built(entry(0, 2, 6, prompt=4)).tokens.tolist()[:6] == [2, 3, 4, 5, 6, 7]
    assert built(entry(0, 6, 2, prompt=4, in_flight=1)).tokens.tolist()[:2] == [6, UNKNOWN]


def test_steps_of_single_tokens_are_as_long_as_their_rows_and_have_tiles_of_one():
    batch = built(*(entry(number, 20, 1) for number in range(9)))
    assert batch.tokens.shape == batch.seats.shape == (16,)
    (tiles,) = batch.work.tiles
    assert (tiles.size, tiles.count) == (1, 9)
    assert tiles.start[:9].tolist() == tiles.row[:9].tolist() == list(range(9))
    assert tiles.chunks[:9].tolist() == [1] * 9


def test_decodes_and_prompts_of_one_step_have_tiles_of_their_own():
    batch = built(entry(0, 5, 1), entry(1, 300, 1), entry(2, 0, PREFILL_TILE + 6), entry(3, 10, 2))
    decodes, prompts = batch.work.tiles
    assert (decodes.size, decodes.count) == (1, 2)
    assert decodes.chunks[:2].tolist() == [1, 3]  # a chunk is 128 slots
    assert (prompts.size, prompts.count) == (PREFILL_TILE, 3)
    assert prompts.start[:3].tolist() == [2, 2 + PREFILL_TILE, 8 + PREFILL_TILE]
    assert prompts.row[:3].tolist() == [2, 2, 3]


@pytest.mark.parametrize(
    ("counts", "tile"),
    [
        ((1, 2, 3), SHORT_TILE),
        ((1, 2, 29), SHORT_TILE),  # the largest of the smallest steps
        ((1, 2, 30), PREFILL_TILE),
        ((1, 2, 400), PREFILL_TILE),
    ],
)
def test_tiles_are_short_in_the_smallest_steps_alone(counts, tile):
    assert built(*(entry(number, 5, count) for number, count in enumerate(counts))).work.tiles[1].size == tile


@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(1, 600))
def test_every_token_is_in_exactly_one_tile_that_sees_all_its_context(seed, max_rows, max_tokens):
    shapes = ShapeBuckets(max_rows=max_rows, max_tokens=max(max_rows, max_tokens), table_width=64)
    step = steps(seed, shapes)
    batch = built(*step, shapes=shapes)
    total, rows = sum(each.count for each in step), np.asarray(batch.work.rows)
    assert total <= len(batch.tokens) <= shapes.max_tokens
    assert len(step) <= len(batch.seats) <= max_rows
    seen = np.zeros(total, int)
    for tiles in batch.work.tiles:
        assert tiles.count <= len(tiles.start)
        for first, row, chunks in zip(
            tiles.start[: tiles.count], tiles.row[: tiles.count], tiles.chunks[: tiles.count], strict=True
        ):
            mine = [index for index in range(first, min(first + tiles.size, len(rows))) if rows[index] == row]
            assert mine[0] == first
            seen[mine] += 1
            assert chunks == GEOMETRY.chunks(int(batch.work.positions[mine[-1]]) + 1)
    assert (seen == 1).all()


@given(st.integers(0, 2**32 - 1))
def test_the_shape_of_a_batch_does_not_depend_on_what_is_chosen_or_scored(seed):
    step = steps(seed, SHAPES)
    batch = built(*step)
    assert batch.last.shape == batch.seats.shape
    assert batch.last[: len(step)].tolist() == (np.cumsum([each.count for each in step]) - 1).tolist()


def test_shapes_are_few():
    shapes = ShapeBuckets(max_rows=300, max_tokens=2000, table_width=8)
    assert sorted({shapes.rows(count) for count in range(1, 301)}) == [1, 8, 16, 32, 64, 128, 256, 300]
    assert sorted({shapes.prompt_rows(count) for count in range(1, 301)}) == [1, 8, 32, 64, 128, 256, 300]
    assert sorted({shapes.tokens(count) for count in range(1, 2001)}) == [32, 64, 128, 256, 512, 1024, 2000]


def test_the_block_table_of_a_request_that_fills_it_is_whole():
    shapes = ShapeBuckets(max_rows=4, max_tokens=64, table_width=8)
    batch = built(entry(1, 127, 1), shapes=shapes)
    assert batch.work.block_table.tolist() == [list(range(40, 48))]
