"""Who comes when, and with which prompt. Prompts are made as they come: a long trace would not fit in memory.

Works on a trace's lengths and ids; knows no engine.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from dcpjax.simulation.options import SimOptions
from dcpjax.simulation.trace import TraceRequest


@dataclass(frozen=True)
class Arrival:
    """A request and the second it comes."""

    time: float
    request: TraceRequest


class Arrivals:
    """The requests of a trace that have not come yet."""

    def __init__(self, requests: Sequence[TraceRequest], options: SimOptions) -> None:
        self._most = options.concurrency or math.inf  # requests that are there at once
        self._left: deque[Arrival] = deque(Arrival(0.0, request) for request in requests)
        if options.arrivals == "trace":
            self._left = deque(_recorded(requests, options.speedup))

    def __bool__(self) -> bool:
        return bool(self._left)

    @property
    def next_time(self) -> float:
        return self._left[0].time

    def come(self, now: float, there: int) -> list[Arrival]:
        """Those that have come by `now`, where so many others are there. A user's next request comes now."""
        come: list[Arrival] = []
        while self._left and self._left[0].time <= now and there + len(come) < self._most:
            arrival = self._left.popleft()
            come.append(arrival if math.isinf(self._most) else Arrival(now, arrival.request))
        return come


def prompt(request: TraceRequest) -> list[int]:
    """Token ids that begin like another prompt's exactly as far as the hash ids do.

    Unlike `trace.synthesise` it makes no tokens for a model: a unit's first token tells it apart, the others are
    one and the same object, so that prompts are made fast and stay small.
    """
    filling = [0] * (request.tokens_per_hash - 1)
    tokens: list[int] = []
    for hash_id in request.hash_ids:
        tokens.append(hash_id + 1)
        tokens += filling
    del tokens[request.input_length :]
    return tokens


def _recorded(requests: Sequence[TraceRequest], speedup: float) -> list[Arrival]:
    """In the order of their times, from 0 on."""
    first = min((request.timestamp for request in requests), default=0.0)
    arrivals = [Arrival((request.timestamp - first) / 1000 / speedup, request) for request in requests]
    return sorted(arrivals, key=lambda arrival: arrival.time)
