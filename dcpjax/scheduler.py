"""Which tokens of which requests run in the next step. Plain integers; knows no arrays and no text.

Decodes go first, one token each; prompts share what is left of `max_num_batched_tokens`, in chunks. When the
pool is full the youngest running request gives its blocks back and is computed again later, from its prompt and
what it had generated.
"""

from collections import deque
from dataclasses import dataclass

from dcpjax.blocks import BlockManager
from dcpjax.models.kv_cache import CacheGeometry
from dcpjax.request import Request, Status


@dataclass(frozen=True)
class Scheduled:
    """Tokens `start .. start + count - 1` of one request, and its blocks."""

    request: Request
    start: int
    count: int
    block_table: list[int]
    samples: bool  # whether the last of these tokens is the request's newest, so that the next one follows from it


class Scheduler:
    """Queues of waiting and running requests over one block pool."""

    def __init__(
        self, blocks: BlockManager, geometry: CacheGeometry, max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        self.blocks, self.geometry = blocks, geometry
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError if it can never fit, even with the whole pool to itself."""
        longest = len(request.prompt_token_ids) + request.max_tokens
        needed = self.geometry.blocks(longest)
        if needed > self.blocks.num_blocks:
            capacity = self.blocks.num_blocks * self.geometry.block_size
            raise ValueError(
                f"prompt and max_tokens must fit the KV cache of {capacity} tokens "
                f"({self.blocks.num_blocks} blocks of {self.geometry.block_size}), but "
                f"{len(request.prompt_token_ids)} + {request.max_tokens} tokens need {needed} blocks; "
                f"raise kv_cache_memory_bytes or shorten the request"
            )
        self.waiting.append(request)

    def schedule(self) -> list[Scheduled]:
        """Choose the next step's tokens and give them blocks. Entries of one token come first in the list."""
        budget = self.max_num_batched_tokens
        chosen: list[Scheduled] = []
        for request in sorted(self.running, key=lambda request: (request.num_pending > 1, request.number)):
            if request.status is Status.RUNNING and budget and self._make_room(request, chosen):
                budget -= self._take(request, budget, chosen)
        while budget and self._admit():
            budget -= self._take(self.running[-1], budget, chosen)
        return sorted(chosen, key=lambda entry: entry.count > 1)

    def update(self, step: list[Scheduled]) -> None:
        """Note that the step has run: its tokens are in the cache."""
        for scheduled in step:
            scheduled.request.num_computed = scheduled.start + scheduled.count

    def release(self, request: Request) -> None:
        """Forget a finished or aborted request and free its blocks."""
        self.blocks.free(request.number)
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def preempt_all(self) -> None:
        """Send every running request back to the queue, to be computed again from its tokens."""
        for request in sorted(self.running, key=lambda request: -request.number):
            self._preempt(request, [])

    def _take(self, request: Request, budget: int, chosen: list[Scheduled]) -> int:
        count = min(request.num_pending, budget)
        table = self.blocks.table(request.number)
        chosen.append(Scheduled(request, request.num_computed, count, table, count == request.num_pending))
        return count

    def _admit(self) -> bool:
        """Move the oldest waiting request to running if a seat and blocks for all its tokens are free."""
        if not self.waiting or len(self.running) >= self.max_num_seqs:
            return False
        request = self.waiting[0]
        total = self.geometry.blocks(request.num_tokens)
        if not self.blocks.can_allocate(request.number, total):
            return False
        self.waiting.popleft()
        self.blocks.allocate(request.number, total)
        request.status = Status.RUNNING
        self.running.append(request)
        return True

    def _make_room(self, request: Request, chosen: list[Scheduled]) -> bool:
        """Give the request blocks for all its tokens, preempting younger ones; False if it preempted itself."""
        total = self.geometry.blocks(request.num_tokens)
        while not self.blocks.can_allocate(request.number, total):
            youngest = max(self.running, key=lambda candidate: candidate.number)
            self._preempt(youngest, chosen)
            if youngest is request:
                return False
        self.blocks.allocate(request.number, total)
        return True

    def _preempt(self, request: Request, chosen: list[Scheduled]) -> None:
        self.running.remove(request)
        self.blocks.free(request.number)
        chosen[:] = [scheduled for scheduled in chosen if scheduled.request is not request]
        request.num_computed = 0
        request.status = Status.WAITING
        request.metrics.preemptions += 1
        self.waiting.appendleft(request)
