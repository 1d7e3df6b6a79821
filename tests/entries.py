"""Entries of a step, made without a scheduler."""

import random
from dataclasses import replace

from dcpjax.api.sampling_params import SamplingParams
from dcpjax.engine.request import Request
from dcpjax.engine.scheduler import Scheduled
from dcpjax.models.kv_cache import CacheGeometry
from dcpjax.runtime.batch import ShapeBuckets

GEOMETRY = CacheGeometry(block_size=16)


SHAPES = ShapeBuckets(max_rows=32, max_tokens=512, table_width=64)


def entry(number: int, start: int, count: int, *, prompt: int | None = None, in_flight: int = 0, **params) -> Scheduled:
    """`count` tokens from `start` on; tokens, blocks and seat tell the request by its number."""
    known = start + count - in_flight
    ids = [1000 * number + position for position in range(known)]
    split = known if prompt is None else prompt
    made = Request(number=number, prompt_token_ids=ids[:split], params=SamplingParams(**params), max_tokens=4)
    made.output_token_ids, made.num_in_flight, made.seat = ids[split:], in_flight, 31 - number
    blocks = GEOMETRY.blocks(start + count)
    return Scheduled(made, start, count, [40 * number + block for block in range(blocks)], samples=True)


def steps(seed: int, shapes: ShapeBuckets) -> list[Scheduled]:
    """Any step that fits: single tokens first."""
    dice, left = random.Random(seed), shapes.max_tokens
    counts: list[int] = []
    longest = dice.choice([1, 3, 16, 100, shapes.max_tokens])
    while left and len(counts) < shapes.max_rows and dice.random() < 0.9:
        counts.append(dice.choice([1, dice.randint(1, min(left, longest))]))
        left -= counts[-1]
    counts = sorted(counts or [1], key=lambda count: count > 1)
    most = shapes.table_width * GEOMETRY.block_size
    made = [entry(number, dice.randint(0, most - count), count) for number, count in enumerate(counts)]
    for each in made:
        each.request.params = SamplingParams(prompt_logprobs=dice.choice([None, None, 1]))
    return [replace(each, samples=dice.random() < 0.7) for each in made]
