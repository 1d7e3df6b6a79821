"""Which tokens of which requests run in the next step. Plain integers; knows no arrays and no text.

Decodes go first, one token each; prompts share what is left of `max_num_batched_tokens`, in chunks. Beside decodes
that are streamed only so much prompt work runs that nobody waits long for the next token (Agrawal et al. 2024,
Sarathi-Serve, section 4.2). When the pool is full the youngest running request gives its blocks back and is computed
again later, from its prompt and what it had generated; whatever the pool still holds of it then is not computed twice.
"""

import heapq
from bisect import insort
from dataclasses import dataclass, field

from dcpjax.engine.blocks import BlockManager, Content, Match
from dcpjax.engine.request import Request, Status
from dcpjax.engine.stats import Counters
from dcpjax.models.kv_cache import CacheGeometry

LEAST_COPIED = 64  # tokens worth copying from a partly matching block: a tile of prefill
SCORED_CHUNK = 128  # prompt tokens per step when their log-probabilities are wanted: each needs a row of logits


@dataclass(slots=True)  # not frozen: one is made for every token, and that would take three times as long
class Scheduled:
    """Tokens `start .. start + count - 1` of one request, and its blocks."""

    request: Request
    start: int
    count: int
    block_table: list[int]
    samples: bool  # whether the last of these tokens is the request's newest, so that the next one follows from it
    copy: tuple[int, int] | None = None  # (from, to): a block whose content is wanted before the step


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How much prompt work runs beside decodes, in tokens at the beginning of a prompt."""

    tokens: int
    # what a token's attention to one position costs, as a fraction of the rest of the token's work
    per_position: float = 0.0
    step_tokens: int | None = None  # most tokens of such a step, however cheap; None: as many as fit
    always: bool = False  # also when nobody waits for each of the decodes' tokens

    def fitting(self, work: float, start: int) -> int:
        """Tokens of a prompt, from position `start` on, that `work` pays for."""
        return int(work / (1.0 + self.per_position * start))

    def work(self, start: int, count: int) -> float:
        return count * (1.0 + self.per_position * start)


@dataclass
class Draft:
    """A step while it is being chosen."""

    tokens_left: int
    prompt_work_left: float = float("inf")
    entries: list[Scheduled] = field(default_factory=list)
    advances: bool = False  # whether a prompt runs in it
    preempted: bool = False


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one step may hold."""

    max_num_seqs: int
    max_num_batched_tokens: int
    pace: Pace | None = None  # None: as much prompt work beside decodes as without
    enable_prefix_caching: bool = True
    least_copied: int = LEAST_COPIED


class Scheduler:
    """Queues of waiting and running requests over one block pool."""

    def __init__(self, blocks: BlockManager, geometry: CacheGeometry, limits: Limits) -> None:
        self.blocks, self.geometry, self.limits = blocks, geometry, limits
        self.counters = Counters()
        self.waiting: list[Request] = []  # in the order they are to be served
        self.running: list[Request] = []  # in the same order: the last gives way first
        self._seats = list(range(limits.max_num_seqs))  # a heap: the lowest seat is taken first

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError if it can never fit, even with the whole pool to itself."""
        longest = len(request.prompt_token_ids) + request.max_tokens - 1  # nothing follows from the last token
        needed = self.geometry.blocks(longest)
        if needed > self.blocks.num_blocks:
            capacity = self.blocks.num_blocks * self.geometry.block_size
            raise ValueError(
                f"prompt and max_tokens must fit the KV cache of {capacity} tokens "
                f"({self.blocks.num_blocks} blocks of {self.geometry.block_size}), but "
                f"{len(request.prompt_token_ids)} + {request.max_tokens} tokens need {needed} blocks; "
                f"raise kv_cache_memory_bytes or shorten the request"
            )
        insort(self.waiting, request, key=_order)

    def schedule(self) -> list[Scheduled]:
        """Choose the next step's tokens and give them blocks. Entries of one token come first in the list."""
        draft = Draft(self.limits.max_num_batched_tokens)
        prompts, decodes = list[Request](), list[Request]()
        for request in self.running:
            if request.num_pending > 1:
                prompts.append(request)
            elif request.num_pending == 1 and not request.waits_for_token:
                decodes.append(request)
        for request in decodes:
            self._continue(request, draft)
        self._set_pace(draft)
        for request in prompts:
            self._continue(request, draft)
        while not draft.preempted and (request := self._next_waiting()):
            if not self._admit(request, draft):
                break
        return sorted(draft.entries, key=lambda entry: entry.count > 1)

    def update(self, step: list[Scheduled]) -> None:
        """Note that the step has been started: from the next step on, its tokens are in the cache."""
        self.counters.steps += 1
        for entry in step:
            request, prompt = entry.request, len(entry.request.prompt_token_ids)
            request.num_computed = entry.start + entry.count
            request.num_in_flight += entry.samples
            self.counters.prompt_tokens += max(0, min(prompt, request.num_computed) - entry.start)
            self._hold(request, last=entry.start < prompt <= request.num_computed)

    def release(self, request: Request) -> None:
        """Forget a finished or aborted request and free its blocks."""
        if request in self.running:
            self._leave(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def preempt_all(self) -> None:
        """Send every running request back to the queue, to be computed again from its tokens."""
        for request in list(self.running):
            self._preempt(request)

    def tokens_per_rank(self) -> tuple[int, ...]:
        """Slots of the running requests' blocks that are filled, on each dcp rank; a shared block counts once."""
        size, filled = self.geometry.block_size, dict[int, int]()
        for request in self.running:
            for index, block in enumerate(self.blocks.table(request.number)):
                tokens = min(size, max(0, request.num_computed - index * size))
                filled[block] = max(tokens, filled.get(block, 0))
        counts = [self.geometry.tokens_per_rank(tokens) for tokens in filled.values()]
        return tuple(map(sum, zip(*counts, strict=True))) or (0,) * self.geometry.dcp

    # --- running requests

    def _set_pace(self, draft: Draft) -> None:
        """Allow prompts a bucket's remainder beside decodes that somebody waits for, at least half of it."""
        decodes, pace = len(draft.entries), self.limits.pace
        awaited = (request for request in self.running if request.num_pending == 1 and request.goes_on)
        if pace and any(pace.always or request.streamed for request in awaited):
            draft.prompt_work_left = _beside(decodes, pace.tokens)
            if pace.step_tokens:
                draft.tokens_left = min(draft.tokens_left, _beside(decodes, pace.step_tokens))

    def _continue(self, request: Request, draft: Draft) -> None:
        """Put a running request's next tokens into the step, if it still runs once there is room."""
        if request.status is not Status.RUNNING or not draft.tokens_left:
            return
        count = self._fitting(request, draft, request.num_computed)
        if count and self._make_room(request, draft):
            self._take(request, count, draft)

    def _fitting(self, request: Request, draft: Draft, start: int) -> int:
        """Tokens from `start` on that fit the step: at least one prompt advances, however late in its context."""
        pending = request.num_tokens - start
        count = min(pending, draft.tokens_left)
        if pending == 1:
            return count
        if request.scores_prompt:
            count = min(count, SCORED_CHUNK)
        if self.limits.pace and draft.prompt_work_left < float("inf"):
            paid = self.limits.pace.fitting(draft.prompt_work_left, start)
            count = min(count, paid if draft.advances else max(paid, 1))
        return count

    def _take(self, request: Request, count: int, draft: Draft, copy: tuple[int, int] | None = None) -> None:
        start, pending, table = request.num_computed, request.num_pending, self.blocks.table(request.number)
        if pending > 1 and self.limits.pace:
            draft.advances = True
            draft.prompt_work_left = max(0.0, draft.prompt_work_left - self.limits.pace.work(start, count))
        draft.tokens_left -= count
        draft.entries.append(Scheduled(request, start, count, table, count == pending, copy))

    def _make_room(self, request: Request, draft: Draft) -> bool:
        """Give the request blocks for all its tokens, preempting younger ones; False if it preempted itself."""
        total = self.geometry.blocks(request.num_tokens)
        if total == len(self.blocks.table(request.number)):
            return True
        while not self.blocks.can_allocate(request.number, total):
            youngest = self.running[-1]
            draft.entries = [entry for entry in draft.entries if entry.request is not youngest]
            draft.preempted = True
            self._preempt(youngest)
            if youngest is request:
                return False
        self.blocks.allocate(request.number, total)
        return True

    # --- waiting requests

    def _next_waiting(self) -> Request | None:
        """The first to be served. One that can share its leader's cache waits until that is filled."""
        return next((request for request in self.waiting if not self._follows(request)), None)

    def _follows(self, request: Request) -> bool:
        leader = request.leader
        if leader is None or leader.status is Status.FINISHED or not self.limits.enable_prefix_caching:
            return False
        return leader.num_held < len(leader.prompt_token_ids)

    def _admit(self, request: Request, draft: Draft) -> bool:
        """Move a request to running if it fits the step, and a seat and blocks for all its tokens are free."""
        if not self._seats or not draft.tokens_left:
            return False
        match, total = self._match(request), self.geometry.blocks(request.num_tokens)
        found = len(match.blocks) * self.geometry.block_size + match.copied
        count = self._fitting(request, draft, found)
        if not count or not self.blocks.can_allocate(request.number, total, match):
            return False
        self.waiting.remove(request)
        insort(self.running, request, key=_order)
        request.status, request.seat = Status.RUNNING, heapq.heappop(self._seats)
        table = self.blocks.allocate(request.number, total, match)
        self._reuse(request, found)
        copy = None if match.source is None else (match.source, table[len(match.blocks)])
        self._take(request, count, draft, copy)
        return True

    def _match(self, request: Request) -> Match:
        """What the cache holds of a request. Its last token runs in any case: the next one follows from it."""
        if not self.limits.enable_prefix_caching or request.scores_prompt:
            return Match()
        size, last = self.geometry.block_size, request.num_tokens - 1
        return self.blocks.match(
            request.keys(last // size, size),
            lambda block: request.tokens(block * size, min(block * size + size, last)),
            self.limits.least_copied,
        )

    def _reuse(self, request: Request, found: int) -> None:
        request.num_computed = request.num_held = found
        self.counters.prefix_queries += request.num_tokens
        self.counters.prefix_hits += found
        if request.metrics.first_scheduled_time is None:
            request.metrics.num_cached_tokens = found

    # --- giving back

    def _preempt(self, request: Request) -> None:
        self._leave(request)
        self.counters.preemptions += 1
        request.metrics.preemptions += 1
        request.status = Status.WAITING
        insort(self.waiting, request, key=_order)

    def _leave(self, request: Request) -> None:
        """Give back the blocks and the seat; the blocks keep what they hold."""
        self._hold(request, last=True)
        self.blocks.free(request.number)
        self.running.remove(request)
        heapq.heappush(self._seats, request.seat)
        request.seat, request.num_computed, request.num_held = -1, 0, 0

    def _hold(self, request: Request, *, last: bool) -> None:
        """Name what the request's blocks hold: full ones, and on the `last` call the partly filled one too."""
        size, stop = self.geometry.block_size, min(request.num_computed, request.num_known)
        if not self.limits.enable_prefix_caching or stop <= request.num_held:
            return
        if stop // size == request.num_held // size and not last:
            return
        table, keys = self.blocks.table(request.number), request.keys(stop // size, size)
        for index in range(request.num_held // size, stop // size):
            held = tuple(request.tokens(index * size, (index + 1) * size))
            self.blocks.hold(table[index], Content(keys[index], held, keys[index + 1]))
        if last and stop % size:
            self.blocks.hold(table[stop // size], Content(keys[-1], tuple(request.tokens(stop // size * size, stop))))
        request.num_held = stop if last else stop // size * size


def _beside(decodes: int, size: int) -> int:
    """What `size` leaves beside the decodes; at least half of it, doubled as often as that takes."""
    while size - decodes < size // 2:
        size *= 2
    return size - decodes


def _order(request: Request) -> tuple[int, int]:
    return request.order
