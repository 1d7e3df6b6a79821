"""A model of a few lines and what the engine's tests share: it finds wrong blocks, wrong copies and wrong seats."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import lt

import numpy as np

from dcpjax.api.sampling_params import SamplingParams
from dcpjax.engine.engine import Engine
from dcpjax.engine.request import UNKNOWN, Request, Status
from dcpjax.engine.result import StepResult
from dcpjax.engine.scheduler import PrefillBudget, Scheduled, StepLimits
from dcpjax.models.kv_cache import CacheGeometry

VOCAB = 50
GEOMETRY = CacheGeometry(block_size=4)
PRIME = 1_000_003


class Misuse(BaseException):
    """The engine asked for what no device could do. Not an Exception: the engine must not take it for a failed step."""


def mix(state: int, token: int) -> int:
    """What a slot holds: like a key, it depends on the token and on all tokens before."""
    return (state * 31 + token + 1) % PRIME


def next_token(states: Sequence[int]) -> int:
    """The model: any change in any slot, or in their order, changes what comes next."""
    heard = 0
    for state in states:
        heard = (heard * 17 + state) % PRIME
    return heard % VOCAB


def alone(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """What the model says when nobody else is there."""
    states: list[int] = []
    for token in prompt:
        states.append(mix(states[-1] if states else 7, token))
    said: list[int] = []
    for _ in range(max_tokens):
        said.append(next_token(states))
        states.append(mix(states[-1], said[-1]))
    return said


@dataclass
class MockGuide:
    """Allows a token that is at least as large as the last one. The text is complete with the largest token of all;
    one that is nearly as large is a dead end."""

    seen: list[int] = field(default_factory=list)

    @property
    def last(self) -> int:
        return max(self.seen, default=0)

    @property
    def is_finished(self) -> bool:
        return self.last == VOCAB - 1

    def mask(self) -> np.ndarray:
        if self.last >= VOCAB - 3:
            raise ValueError("the text must rise, but cannot go on")
        return np.arange(VOCAB) >= self.last

    def advance(self, token_id: int) -> None:
        assert token_id >= self.last
        self.seen.append(token_id)


def alone_with_guide(prompt: Sequence[int], max_tokens: int) -> list[int]:
    said: list[int] = []
    while len(said) < max_tokens and max(said, default=0) < VOCAB - 3:
        raw = alone([*prompt, *said], 1)[0]
        said.append(max(raw, max(said, default=0)))
    return said


@dataclass
class Row:
    """A request's part of a step, as it was when the step was launched."""

    table: list[int]
    start: int
    tokens: list[int]
    seat: int
    samples: bool
    least: int
    bad: Callable[[int], bool]  # whether the hidden state of the decode step of this number is not finite
    steps: int
    ends: frozenset[int]
    ended: bool = False


@dataclass
class Launch:
    step: Sequence[Scheduled]
    rows: list[Row]
    copies: list[tuple[int, int]]
    result: StepResult | None = None


def nothing(step: Sequence[Scheduled]) -> None:
    return None


@dataclass
class MockRunner:
    """A device with a queue: a step runs, in order, when its result is wanted or another is launched after it."""

    geometry: CacheGeometry = GEOMETRY
    compile_seconds: float = 0.0
    loses_cache: bool = False
    before_launch: Callable[[Sequence[Scheduled]], None] = nothing
    after_launch: Callable[[Sequence[Scheduled]], None] = nothing
    before_collect: Callable[[Sequence[Scheduled]], None] = nothing
    bad_rows: Callable[[Scheduled], bool] = lambda entry: False
    slots: dict[tuple[int, int], tuple[int, int] | None] = field(default_factory=dict)  # None: not a number
    latest: dict[int, int] = field(default_factory=dict)
    queue: list[Launch] = field(default_factory=list)
    steps: int = 0
    copied: int = 0  # blocks
    computed: int = 0  # tokens

    def launch(self, step: Sequence[Scheduled]) -> Launch:
        self.before_launch(step)
        self.run_queue()
        launched = Launch(step, [self.row(entry) for entry in step], [entry.copy for entry in step if entry.copy])
        self.check(launched)
        self.queue.append(launched)
        self.steps += 1
        self.after_launch(step)
        return launched

    def collect(self, launched: Launch) -> StepResult:
        self.before_collect(launched.step)
        while launched.result is None:
            self.run(self.queue.pop(0))
        return launched.result

    def restore_cache(self) -> bool:
        self.run_queue()
        if self.loses_cache:
            self.slots.clear()
            self.latest.clear()
        return self.loses_cache

    def row(self, entry: Scheduled) -> Row:
        request, least = entry.request, 0
        if request.guide is not None and entry.samples:
            assert not request.num_in_flight, "a guide must have seen every token"
            least = int(np.argmax(request.guide.mask()))
        tokens = request.tokens(entry.start, entry.start + entry.count)
        bad = [self.bad_rows(replace(entry, start=entry.start + step)) for step in range(entry.steps)]
        table, ends = list(entry.block_table), request.end_token_ids
        return Row(table, entry.start, tokens, request.seat, entry.samples, least, bad.__getitem__, entry.steps, ends)

    def check(self, launched: Launch) -> None:
        """A step's rows have seats of their own, and write to blocks of their own."""
        size = self.geometry.block_size
        seats = [row.seat for row in launched.rows]
        written = [block for row in launched.rows for block in row.table[row.start // size :]]
        if len(set(seats)) < len(seats) or min(seats) < 0:
            raise Misuse(f"seats {seats}")
        if len(set(written)) < len(written):
            raise Misuse(f"blocks {written} are written by two requests")
        sizes = [row.start + len(row.tokens) + row.steps - 1 for row in launched.rows]
        held = [len(row.table) * size for row in launched.rows]
        if any(not row.tokens for row in launched.rows) or any(map(lt, held, sizes)):
            raise Misuse("a request has no tokens, or no block for one")
        if any(row.steps > 1 and (len(row.tokens) > 1 or not row.samples) for row in launched.rows):
            raise Misuse("a prompt has several decode steps")

    def run_queue(self) -> None:
        while self.queue:
            self.run(self.queue.pop(0))

    def run(self, launched: Launch) -> None:
        before = dict(self.slots)
        for source, target in launched.copies:
            self.copied += 1
            for offset in range(self.geometry.block_size):
                self.slots.pop((target, offset), None)
                if (source, offset) in before:
                    self.slots[target, offset] = before[source, offset]
        steps = max(row.steps for row in launched.rows)
        first, *following = [self.run_step(launched.rows, number) for number in range(steps)]
        launched.result = replace(first, following=following)

    def run_step(self, rows: Sequence[Row], number: int) -> StepResult:
        """The decode step of this number, or the only step. A row that has ended keeps still."""
        active = [row for row in rows if number < row.steps and not row.ended]
        for row in active:
            if number:
                row.start, row.tokens = row.start + 1, [UNKNOWN]
            self.write(row, row.bad(number))
        found = [self.sample(row) if row in active else 0 for row in rows]
        for row, token in zip(rows, found, strict=True):
            row.ended = row.ended or token is None or token in row.ends
        return StepResult([token or 0 for token in found], [token is not None for token in found])

    def write(self, row: Row, bad: bool) -> None:
        self.computed += len(row.tokens)
        for position, token in enumerate(row.tokens, row.start):
            known = self.latest[row.seat] if token == UNKNOWN else token
            before = (0, 7) if position == 0 else self.read(row, position - 1)
            value = None if bad or before is None else (known, mix(before[1], known))
            self.slots[self.slot(row, position)] = value

    def sample(self, row: Row) -> int | None:
        """The row's next token, None if its logits are not finite."""
        held = [self.read(row, position) for position in range(row.start + len(row.tokens))]
        states = [value[1] for value in held if value is not None]
        finite = len(states) == len(held)
        token = max(next_token(states), row.least) if finite else 0
        if row.samples:
            self.latest[row.seat] = token
        return token if finite else None

    def read(self, row: Row, position: int) -> tuple[int, int] | None:
        slot = self.slot(row, position)
        if slot not in self.slots:
            raise Misuse(f"position {position} of {row} was never written")
        return self.slots[slot]

    def slot(self, row: Row, position: int) -> tuple[int, int]:
        block, offset = divmod(position, self.geometry.block_size)
        return row.table[block], offset


def engine(
    runner: MockRunner | None = None,
    *,
    num_blocks: int = 50,
    seats: int = 8,
    budget: int = 16,
    async_scheduling: bool = True,
    caching: bool = True,
    least_copied: int = 1,
    prefill_budget: PrefillBudget | None = None,
    num_decode_steps: int = 1,
    num_streamed_steps: int | None = None,
) -> Engine:
    limits = StepLimits(
        max_num_seqs=seats,
        max_num_batched_tokens=budget,
        prefill_budget=prefill_budget,
        enable_prefix_caching=caching,
        least_copied=least_copied,
        num_decode_steps=num_decode_steps,
        num_streamed_steps=num_streamed_steps or num_decode_steps,
    )
    return Engine(runner or MockRunner(), num_blocks=num_blocks, limits=limits, async_scheduling=async_scheduling)


def request(
    number: int,
    prompt: Sequence[int],
    max_tokens: int = 5,
    ends: Sequence[int] = (),
    first_sibling: Request | None = None,
    salt: str | None = None,
    priority: int = 0,
    guide: MockGuide | None = None,
    **params,
) -> Request:
    options = SamplingParams(max_tokens=max_tokens, **params)
    return Request(
        number=number,
        prompt_token_ids=list(prompt),
        params=options,
        max_tokens=max_tokens,
        end_token_ids=frozenset([*ends, *options.stop_tokens]),
        first_sibling=first_sibling,
        cache_salt=salt,
        priority=priority,
        guide=guide,
    )


def prompts(count: int, seed: int = 0, most: int = 12) -> list[list[int]]:
    """Random ones that often begin alike."""
    dice, made = random.Random(seed), list[list[int]]()
    for _ in range(count):
        prompt = [dice.randrange(VOCAB) for _ in range(dice.randint(1, most))]
        if made and dice.random() < 0.5:
            other = dice.choice(made)
            prompt = (other[: dice.randint(1, len(other))] + prompt)[:most]
        made.append(prompt)
    return made


def expected(requests: Sequence[Request]) -> dict[int, list[int]]:
    return {each.number: alone(each.prompt_token_ids, each.max_tokens) for each in requests}


def finish(running: Engine, requests: Sequence[Request] = ()) -> dict[int, list[int]]:
    """Add requests, run to the end, and collect what the engine reported, by request."""
    for each in requests:
        running.add(each)
    news: dict[int, list[int]] = {each.number: [] for each in requests}
    ended: list[int] = []
    while running.has_work:
        for changed in running.step():
            news[changed.number] = list(changed.output_token_ids)
            ended += [changed.number] * (changed.status is Status.FINISHED)
        running.blocks.check_integrity()
    assert len(set(ended)) == len(ended), "a request ended twice"
    check_idle(running)
    return news


def check_idle(running: Engine) -> None:
    """Nothing is owned any more, every seat is free, and the blocks hold what they are said to hold."""
    assert not running.has_work
    assert running.blocks.num_used == 0
    assert sorted(running.scheduler._seats) == list(range(running.scheduler.limits.max_num_seqs))
    running.blocks.check_integrity()
    runner = running.runner
    assert isinstance(runner, MockRunner)
    runner.run_queue()
    for block in range(running.blocks.num_blocks):
        content = running.blocks.content(block)
        for offset, token in enumerate(content.tokens if content else ()):
            held = runner.slots[block, offset]
            assert held is None or held[0] == token
