"""When the requests of a trace arrive, and their prompts. A prompt is made when its request arrives, to save memory."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from dcpjax.simulation.options import SimOptions
from dcpjax.simulation.trace import TraceRequest


@dataclass(frozen=True)
class Arrival:
    """A request and when it arrives."""

    time: float  # seconds
    request: TraceRequest


class Arrivals:
    """The requests of a trace that have not arrived yet."""

    def __init__(self, requests: Sequence[TraceRequest], options: SimOptions) -> None:
        self._max_unfinished = options.concurrency or math.inf
        self._pending: deque[Arrival] = deque(Arrival(0.0, request) for request in requests)
        if options.arrivals == "trace":
            self._pending = deque(_recorded(requests, options.speedup))

    def __bool__(self) -> bool:
        return bool(self._pending)

    @property
    def next_time(self) -> float:
        return self._pending[0].time

    def take_arrived(self, now: float, unfinished: int) -> list[Arrival]:
        """Remove and return the requests that have arrived by `now`, while `unfinished` others are in the engine.

        With a fixed number of users a request arrives at `now`, as soon as fewer than that many are unfinished.
        """
        arrived: list[Arrival] = []
        while self._pending and self._pending[0].time <= now and unfinished + len(arrived) < self._max_unfinished:
            arrival = self._pending.popleft()
            arrived.append(arrival if math.isinf(self._max_unfinished) else Arrival(now, arrival.request))
        return arrived


def prompt(request: TraceRequest) -> list[int]:
    """Token ids of a prompt; two prompts have the same first tokens exactly as far as their hash ids are the same.

    The ids are not meant for a model, see `trace.synthesise` for those. The first token of each hash id is unique to
    it and all others are the same integer object, which makes prompts fast to build and small.
    """
    filling = [0] * (request.tokens_per_hash - 1)
    tokens: list[int] = []
    for hash_id in request.hash_ids:
        tokens.append(hash_id + 1)
        tokens += filling
    del tokens[request.input_length :]
    return tokens


def _recorded(requests: Sequence[TraceRequest], speedup: float) -> list[Arrival]:
    """Arrivals in order of time; the first is at 0."""
    first = min((request.timestamp for request in requests), default=0.0)
    arrivals = [Arrival((request.timestamp - first) / 1000 / speedup, request) for request in requests]
    return sorted(arrivals, key=lambda arrival: arrival.time)
