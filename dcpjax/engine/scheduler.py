"""Which tokens of which requests run in the next step.

Decodes go first, one token each; prompts share what is left of `max_num_batched_tokens`, in chunks. In a step with
streamed decodes the prompt work is limited, so that the next token does not wait long (Agrawal et al. 2024,
Sarathi-Serve, section 4.2). When the pool is full the youngest running request is preempted: it gives its blocks back
and is computed again later from its prompt and its generated tokens, except for what the prefix cache still holds.
"""

import heapq
from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from dcpjax.engine.blocks import BlockContent, BlockManager, PrefixMatch
from dcpjax.engine.request import Request, Status
from dcpjax.engine.stats import SchedulerCounters
from dcpjax.engine.waiting import WaitingQueue
from dcpjax.models.kv_cache import CacheGeometry

LEAST_COPIED = 64  # fewest tokens worth copying from a partly matching block: a tile of prefill
SCORED_CHUNK = 128  # prompt tokens per step when their log-probabilities are wanted: each needs a row of logits


@dataclass(slots=True)  # not frozen: one is made for every token, and that would take three times as long
class Scheduled:
    """Tokens `start .. start + count - 1` of one request, and its blocks."""

    request: Request
    start: int
    count: int
    block_table: list[int]
    samples: bool  # whether the last of these tokens is the request's newest, so that the next one follows from it
    copy: tuple[int, int] | None = None  # (source, target): blocks to copy before the step
    steps: int = 1  # decode steps to run in this call, each with the token of the one before; more need `count` 1


def is_repeated(step: Sequence[Scheduled]) -> bool:
    """Whether a step runs several decode steps."""
    return any(entry.steps > 1 for entry in step)


@dataclass(frozen=True, kw_only=True)
class PrefillBudget:
    """How much prompt work runs in a step that also decodes.

    Work is measured in tokens at the beginning of a prompt; later tokens attend to more positions and cost more.
    """

    tokens: int
    cost_per_position: float = 0.0  # attention to one position, as a fraction of the rest of a token's work
    step_sizes: tuple[int, ...] = ()  # tokens of such a step: the largest that a prompt can well afford; (): any
    tile: int = 1  # what a prompt can afford is whole tiles, one at least: a tile that is not full costs the same
    always: bool = False  # whether the budget holds even if no decode is streamed

    def affordable(self, work: float, start: int) -> int:
        """How many tokens of a prompt, from position `start` on, cost at most `work`: whole tiles."""
        return int(work / (1.0 + self.cost_per_position * start)) // self.tile * self.tile

    def room_beside(self, decodes: int, affordable: int, most: int) -> int:
        """Most prompt tokens of a step beside `decodes` decodes: what is left in the largest step size that counts.

        A size counts if the prompt can afford 1.5 times what is left in it, because attention in a larger step takes
        longer for each token. The smallest always counts. At most `most`.
        """
        rooms = [_room_beside(decodes, size) for size in self.step_sizes]
        filled = [room for room in rooms if 1.5 * room <= affordable]
        return min(most, max(filled, default=min(rooms, default=most)))

    def work(self, start: int, count: int) -> float:
        """What `count` tokens of a prompt from position `start` on cost."""
        return count * (1.0 + self.cost_per_position * start)


@dataclass
class StepBuilder:
    """A step while it is being put together."""

    tokens_left: int
    prompt_work_left: float = float("inf")
    entries: list[Scheduled] = field(default_factory=list)
    has_prompt: bool = False
    preempted: bool = False  # whether a request was preempted to make room


@dataclass(frozen=True, kw_only=True)
class StepLimits:
    """What one step may hold."""

    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_budget: PrefillBudget | None = None  # None: prompts are not limited beside decodes
    enable_prefix_caching: bool = True
    least_copied: int = LEAST_COPIED
    num_decode_steps: int = 1  # most decode steps in one call, while nothing but decodes is to be done
    num_streamed_steps: int = 1  # the same while a streamed request decodes

    def decode_steps(self, requests: Sequence[Request]) -> int:
        """Most decode steps of these requests in one call."""
        if self.num_decode_steps == 1 or not all(request.sampled_on_device for request in requests):
            return 1
        streamed = any(request.streamed for request in requests)
        return self.num_streamed_steps if streamed else self.num_decode_steps


class Scheduler:
    """Queues of waiting and running requests over one block pool."""

    def __init__(self, blocks: BlockManager, geometry: CacheGeometry, limits: StepLimits) -> None:
        self.blocks, self.geometry, self.limits = blocks, geometry, limits
        self.counters = SchedulerCounters()
        self.waiting = WaitingQueue()  # in the order in which they will be served
        self.running: list[Request] = []  # in the same order: the last is preempted first
        self._seats = list(range(limits.max_num_seqs))  # a heap: the lowest seat is taken first
        self._launched = deque[list[Scheduled]](maxlen=2)  # the newest steps: no older one is in flight

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
        self.waiting.add(request)

    def schedule(self) -> list[Scheduled]:
        """Choose the next step's tokens and give them blocks. Entries of one token come first in the list."""
        self.waiting.bring_back(lambda request: not self._waits_for_sibling(request))
        step = StepBuilder(self.limits.max_num_batched_tokens)
        prompts, decodes = list[Request](), list[Request]()
        for request in self.running:
            if request.num_pending > 1:
                prompts.append(request)
            elif request.num_pending == 1 and not request.needs_token_on_host:
                decodes.append(request)
        for request in decodes:
            self._schedule_running(request, step)
        self._set_prefill_budget(step)
        for request in prompts:
            self._schedule_running(request, step)
        while not step.preempted and (request := self._next_waiting()):
            if not self._admit(request, step):
                break
        self._add_steps(step)
        return sorted(step.entries, key=lambda entry: entry.count > 1)

    def update(self, step: list[Scheduled]) -> None:
        """Note that the step has been launched: from the next step on, its tokens are in the cache."""
        self.counters.steps += 1
        self.counters.fused_steps += max((entry.steps - 1 for entry in step), default=0)
        self._launched.append(step)
        for entry in step:
            request, prompt = entry.request, len(entry.request.prompt_token_ids)
            request.num_computed = entry.start + entry.count + entry.steps - 1
            request.num_in_flight += entry.steps * entry.samples
            self.counters.prompt_tokens += max(0, min(prompt, request.num_computed) - entry.start)
            self._register_blocks(request, last=entry.start < prompt <= request.num_computed)

    def token_arrived(self, entry: Scheduled) -> None:
        """Note that the result of a launched step has reached the host."""
        entry.request.num_in_flight -= entry.steps * entry.samples

    def ended_after(self, entry: Scheduled, steps: int) -> None:
        """Note that so many of the entry's decode steps have run, because the request ended."""
        if steps < entry.steps:
            entry.request.num_computed = entry.start + steps

    def start_over(self) -> None:
        """Give up the tokens in flight and compute the running requests again."""
        for request in self.touched():
            request.num_in_flight = 0
        self._launched.clear()
        self.preempt_all()

    def touched(self) -> list[Request]:
        """The requests of which a launched step may not have been collected whole."""
        return list(dict.fromkeys(entry.request for step in self._launched for entry in step))

    def release(self, request: Request) -> None:
        """Forget a finished or aborted request and free its blocks."""
        if request in self.running:
            self._give_back(request)
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

    def _set_prefill_budget(self, step: StepBuilder) -> None:
        """Limit prompt work if a decode is streamed: to the budget less the decodes, at least half of it."""
        decodes, budget = len(step.entries), self.limits.prefill_budget
        decoding = (request for request in self.running if request.num_pending == 1 and request.expects_token)
        if budget and any(budget.always or request.streamed for request in decoding):
            step.prompt_work_left = _room_beside(decodes, budget.tokens)

    def _schedule_running(self, request: Request, step: StepBuilder) -> None:
        """Put a running request's next tokens into the step, unless it is preempted meanwhile."""
        if request.seat < 0 or not step.tokens_left:
            return
        count = self._num_fitting(request, step, request.num_computed)
        if count and self._make_room(request, step):
            self._add_entry(request, count, step)

    def _num_fitting(self, request: Request, step: StepBuilder, start: int) -> int:
        """How many tokens from `start` on fit the step. The first prompt gets at least a tile, whatever it costs, and
        sets the size of a step that also decodes."""
        pending = request.num_tokens - start
        count = min(pending, step.tokens_left)
        if pending == 1:
            return count
        if request.scores_prompt:
            count = min(count, SCORED_CHUNK)
        budget = self.limits.prefill_budget
        if budget and step.prompt_work_left < float("inf"):
            affordable = budget.affordable(step.prompt_work_left, start)
            if not step.has_prompt:
                step.tokens_left = budget.room_beside(len(step.entries), affordable, step.tokens_left)
                affordable = max(affordable, budget.tile)
            count = min(count, step.tokens_left, affordable)
        return count

    def _add_entry(self, request: Request, count: int, step: StepBuilder, copy: tuple[int, int] | None = None) -> None:
        start, pending, table = request.num_computed, request.num_pending, self.blocks.table(request.number)
        if pending > 1 and self.limits.prefill_budget:
            step.has_prompt = True
            step.prompt_work_left = max(0.0, step.prompt_work_left - self.limits.prefill_budget.work(start, count))
        step.tokens_left -= count
        step.entries.append(Scheduled(request, start, count, table, count == pending, copy))

    def _make_room(self, request: Request, step: StepBuilder) -> bool:
        """Give the request blocks for all its tokens, preempting younger ones; False if it preempted itself."""
        total = self.geometry.blocks(request.num_tokens)
        if total <= len(self.blocks.table(request.number)):
            return True
        while not self.blocks.can_allocate(request.number, total):
            youngest = self.running[-1]
            step.entries = [entry for entry in step.entries if entry.request is not youngest]
            step.preempted = True
            self._preempt(youngest)
            if youngest is request:
                return False
        self.blocks.allocate(request.number, total)
        return True

    # --- several decode steps in one call

    def _add_steps(self, step: StepBuilder) -> None:
        """Let the decodes run several steps, if nobody waits for less and blocks for their tokens are free."""
        most = self._most_steps(step)
        while most > 1 and self._blocks_for(step, most) > self.blocks.num_free:
            most //= 2
        for entry in step.entries if most > 1 else ():
            entry.steps = min(most, entry.request.num_left)
            self.blocks.allocate(entry.request.number, self._blocks_after(entry, most))

    def _most_steps(self, step: StepBuilder) -> int:
        """One if the next step may have something else to do than these decodes."""
        others_wait = self.waiting or step.preempted or not step.tokens_left
        return 1 if others_wait or not all(map(_decodes, step.entries)) else self.limits.decode_steps(self.running)

    def _blocks_for(self, step: StepBuilder, steps: int) -> int:
        """Blocks that the entries need besides those they have, to run so many steps."""
        return sum(self._blocks_after(entry, steps) - len(entry.block_table) for entry in step.entries)

    def _blocks_after(self, entry: Scheduled, steps: int) -> int:
        """Blocks of a request that has run so many steps; nothing follows from its last token."""
        tokens = entry.start + min(steps, entry.request.num_left)
        return max(len(entry.block_table), self.geometry.blocks(tokens))

    # --- waiting requests

    def _next_waiting(self) -> Request | None:
        """The first to be served. A request waits while its first sibling fills the cache that both will share."""
        while (request := self.waiting.first()) and self._waits_for_sibling(request):
            self.waiting.set_first_aside()
        return request

    def _waits_for_sibling(self, request: Request) -> bool:
        sibling = request.first_sibling
        if sibling is None or sibling.status is Status.FINISHED or not self.limits.enable_prefix_caching:
            return False
        return sibling.num_registered < len(sibling.prompt_token_ids)

    def _admit(self, request: Request, step: StepBuilder) -> bool:
        """Move a request to running if it fits the step, and a seat and blocks for all its tokens are free."""
        if not self._seats or not step.tokens_left:
            return False
        match, total = self._match(request), self.geometry.blocks(request.num_tokens)
        found = len(match.blocks) * self.geometry.block_size + match.copied
        count = self._num_fitting(request, step, found)
        if not count or not self.blocks.can_allocate(request.number, total, match):
            return False
        self.waiting.remove(request)
        insort(self.running, request, key=_order)
        request.seat = heapq.heappop(self._seats)
        table = self.blocks.allocate(request.number, total, match)
        self._note_cached(request, found)
        copy = None if match.source is None else (match.source, table[len(match.blocks)])
        self._add_entry(request, count, step, copy)
        return True

    def _match(self, request: Request) -> PrefixMatch:
        """What the cache holds of a request, except its last token: that one must run, to sample the next."""
        if not self.limits.enable_prefix_caching or request.scores_prompt:
            return PrefixMatch()
        size, last = self.geometry.block_size, request.num_tokens - 1
        return self.blocks.match(
            request.keys(last // size, size),
            lambda block: request.tokens(block * size, min(block * size + size, last)),
            self.limits.least_copied,
        )

    def _note_cached(self, request: Request, found: int) -> None:
        request.num_computed = request.num_registered = found
        self.counters.prefix_queries += request.num_tokens
        self.counters.prefix_hits += found
        if request.metrics.first_scheduled_time is None:
            request.metrics.num_cached_tokens = found

    # --- giving back

    def _preempt(self, request: Request) -> None:
        self._give_back(request)
        self.counters.preemptions += 1
        request.metrics.preemptions += 1
        self.waiting.add(request)

    def _give_back(self, request: Request) -> None:
        """Free a running request's blocks and its seat. The blocks keep what they hold."""
        self._register_blocks(request, last=True)
        self.blocks.free(request.number)
        self.running.remove(request)
        heapq.heappush(self._seats, request.seat)
        request.seat, request.num_computed, request.num_registered = -1, 0, 0

    def _register_blocks(self, request: Request, *, last: bool) -> None:
        """Let other requests find the full blocks; on the `last` call the partly filled one, too."""
        size, stop = self.geometry.block_size, min(request.num_computed, request.num_known)
        if not self.limits.enable_prefix_caching or stop <= request.num_registered:
            return
        if stop // size == request.num_registered // size and not last:
            return
        table, keys = self.blocks.table(request.number), request.keys(stop // size, size)
        for index in range(request.num_registered // size, stop // size):
            held = tuple(request.tokens(index * size, (index + 1) * size))
            self.blocks.register(table[index], BlockContent(keys[index], held, keys[index + 1]))
        if last and stop % size:
            self.blocks.register(
                table[stop // size], BlockContent(keys[-1], tuple(request.tokens(stop // size * size, stop)))
            )
        request.num_registered = stop if last else stop // size * size


def _room_beside(decodes: int, size: int) -> int:
    """Tokens left in a step of `size` beside the decodes. `size` is doubled until at least half of it is left."""
    while size - decodes < size // 2:
        size *= 2
    return size - decodes


def _decodes(entry: Scheduled) -> bool:
    """Whether the entry is one generated token, not the rest of a prompt."""
    return entry.count == 1 and entry.start >= len(entry.request.prompt_token_ids)


def _order(request: Request) -> tuple[int, int]:
    return request.order
