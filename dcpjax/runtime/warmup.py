"""Compiling a model's programs before the first request: one example step of each shape that an engine can meet.

A step's shape is its rows and its tokens, rounded up to buckets. Sampling is compiled for greedy requests; other
sampling options compile at their first use.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from dcpjax.api.config import Warmup
from dcpjax.api.progress import status
from dcpjax.api.sampling_params import SamplingParams
from dcpjax.engine.request import Request
from dcpjax.engine.scheduler import Scheduled
from dcpjax.runtime.batch import ShapeBuckets
from dcpjax.runtime.compiling import run_all
from dcpjax.runtime.runner import Runner

Step = list[Scheduled]
Span = tuple[int, int]  # tokens cached before, tokens of the step


def warm_up(runner: Runner, choice: Warmup, *, threads: int | None = None) -> None:
    """Compile what `choice` asks for, in as many threads as there are cores."""
    if choice == "none":
        return
    programs: dict[Any, Callable[[], Any]] = {}
    for step in steps(runner.shapes, runner.sizes.max_model_len, choice, runner.sizes.limits.num_decode_steps):
        programs |= runner.programs_of(step)
    if choice == "all" and runner.sizes.limits.enable_prefix_caching:
        programs |= runner.copy_programs()
    with status(f"compiling {len(programs)} programs", shown=runner.progress):
        run_all(programs.values(), threads)
    runner.note_compiled(programs)


def steps(shapes: ShapeBuckets, max_model_len: int, choice: Warmup, num_decode_steps: int = 1) -> list[Step]:
    """An example step of each shape, the largest first."""
    found = list(decode_steps(shapes))
    if num_decode_steps > 1:
        whole = [step for step in found if all(entry.samples for entry in step)]
        found += [[replace(entry, steps=num_decode_steps) for entry in step] for step in whole]
    if choice == "all":
        found += prompt_steps(shapes, max_model_len)
    return sorted(found, key=lambda step: -sum(entry.count for entry in step))


def decode_steps(shapes: ShapeBuckets) -> Iterator[Step]:
    for rows in _buckets(shapes.rows, _most_rows(shapes)):
        yield from _steps([(0, 1)] * rows, shapes)


def prompt_steps(shapes: ShapeBuckets, max_model_len: int) -> Iterator[Step]:
    """Steps of each number of tokens, with each number of rows that can hold so many."""
    fewer = 0  # tokens that still fit the bucket before
    for tokens in _buckets(shapes.tokens, shapes.max_tokens):
        for bucket in _buckets(shapes.prompt_rows, _most_rows(shapes)):
            rows = min(bucket, tokens - 1)  # at least one has several tokens
            if rows >= 1 and shapes.prompt_rows(rows) == bucket and rows * max_model_len > fewer:
                for entries in _prompts(rows, tokens, shapes, max_model_len):
                    yield from _steps(entries, shapes)
        fewer = tokens


def _prompts(rows: int, tokens: int, shapes: ShapeBuckets, max_model_len: int) -> Iterator[list[Span]]:
    """Decodes and a prompt; where a prompt's keys or queries can be gathered, also with queries, and with both."""
    count = tokens - rows + 1
    decodes: list[Span] = [(0, 1)] * (rows - 1)
    yield [*decodes, (0, count)]
    exchange, context = shapes.prompt_exchange, max_model_len - count
    if exchange is None:
        return
    if context > 0 and not exchange.keys_travel(context, count):
        yield [*decodes, (context, count)]
    context, more = max_model_len - 2, count - 1  # two tokens of another prompt in place of a decode
    if decodes and more > 1 and exchange.keys_travel(0, more) and not exchange.keys_travel(context, 2):
        yield [*decodes[1:], (context, 2), (0, more)]


def _steps(spans: list[Span], shapes: ShapeBuckets) -> Iterator[Step]:
    """Entries of these tokens. All are sampled, or fewer, so that the sampled rows have a smaller shape."""
    for sampled in _buckets(shapes.rows, len(spans)):
        yield [_entry(number, *span, number < sampled) for number, span in enumerate(spans)]


def _entry(number: int, cached: int, count: int, samples: bool) -> Scheduled:
    greedy = SamplingParams(temperature=0)
    request = Request(number=number, prompt_token_ids=[0] * (cached + count), params=greedy, max_tokens=1, seat=number)
    return Scheduled(request, cached, count, [], samples)


def _buckets(rounded: Callable[[int], int], most: int) -> list[int]:
    return sorted({rounded(count) for count in range(1, most + 1)})


def _most_rows(shapes: ShapeBuckets) -> int:
    return min(shapes.max_rows, shapes.max_tokens)
