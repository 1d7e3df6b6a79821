"""Replays a trace on the engine itself: its scheduler, its block manager and its queues, on a simulated device.

The engine's own metrics hold the time of this machine; what is told here is watched from outside on the virtual
clock.
"""

from array import array
from collections.abc import Sequence
from itertools import count

from dcpjax.api.outputs import RequestMetrics
from dcpjax.api.sampling_params import SamplingParams
from dcpjax.engine.engine import Engine
from dcpjax.engine.request import Request, Status
from dcpjax.engine.scheduler import Scheduled, StepLimits
from dcpjax.models.kv_cache import CacheGeometry
from dcpjax.simulation.arrivals import Arrival, Arrivals, prompt
from dcpjax.simulation.cost import StepFloor
from dcpjax.simulation.device import Clock, Launched, SimulatedDevice
from dcpjax.simulation.result import SimulatedStep

PARAMS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)


class Replay:
    """One trace on one engine. Times are seconds on the virtual clock."""

    def __init__(
        self, arrivals: Arrivals, geometry: CacheGeometry, *, num_blocks: int, limits: StepLimits, floor_of: StepFloor
    ) -> None:
        self.arrivals, self.clock = arrivals, Clock()
        self.engine = Engine(
            SimulatedDevice(geometry, self.clock, floor_of, self._watch), num_blocks=num_blocks, limits=limits
        )
        self.timeline: list[SimulatedStep] = []
        self.metrics: list[RequestMetrics] = []  # by the number of the request
        self.gaps = array("d")  # between two tokens of a request
        self._numbers = count()
        self._there = 0
        self._told = (0, 0)  # preemptions and prefix hits in the timeline so far

    def run(self) -> None:
        while self.arrivals or self.engine.has_work:
            if not self.engine.has_work:
                self.clock.now = max(self.clock.now, self.arrivals.next_time)
            for arrival in self.arrivals.come(self.clock.now, self._there):
                self._add(arrival)
            for request in self.engine.step():
                self._note_token(request)

    def _add(self, arrival: Arrival) -> None:
        self.metrics.append(RequestMetrics(arrival.time))
        self._there += 1
        self.engine.add(
            Request(
                number=next(self._numbers),
                prompt_token_ids=prompt(arrival.request),
                params=PARAMS,
                max_tokens=arrival.request.output_length,
            )
        )

    def _watch(self, launched: Launched) -> None:
        """Note a step as it is launched: chosen at the clock's time, to start when the device is free."""
        for entry in launched.entries:
            metrics = self.metrics[entry.request.number]
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = self.clock.now
        scheduler, (preemptions, hits) = self.engine.scheduler, self._told
        counters = scheduler.counters
        self._told = counters.preemptions, counters.prefix_hits
        decodes = sum(_decodes(entry) for entry in launched.entries)
        self.timeline.append(
            SimulatedStep(
                time=launched.start,
                seconds=launched.floor.seconds,
                exchange_seconds=launched.floor.exchange_seconds + launched.floor.latency_seconds,
                running=len(scheduler.running),
                waiting=len(scheduler.waiting),
                used_blocks=self.engine.blocks.num_used,
                prefill_tokens=sum(entry.count for entry in launched.entries) - decodes,
                decode_tokens=decodes,
                found_tokens=counters.prefix_hits - hits,
                preempted=counters.preemptions - preemptions,
                lacks_blocks=self._lacks_blocks(scheduler.waiting),
            )
        )

    def _lacks_blocks(self, waiting: Sequence[Request]) -> bool:
        """Whether the next request, or one that just gave way, has to wait for more blocks than are free."""
        if not waiting:
            return False
        return self.engine.runner.geometry.blocks(waiting[0].num_tokens) > self.engine.blocks.num_free

    def _note_token(self, request: Request) -> None:
        metrics, now = self.metrics[request.number], self.clock.now
        if metrics.first_token_time is None:
            metrics.first_token_time = now
        else:
            assert metrics.last_token_time is not None
            self.gaps.append(now - metrics.last_token_time)
        metrics.last_token_time = now
        if request.status is Status.FINISHED:
            assert request.error is None, request.error
            metrics.finished_time = now
            self._there -= 1


def _decodes(entry: Scheduled) -> bool:
    """Whether it is one generated token: anything else fills the cache, for the first time or again."""
    return entry.count == 1 and entry.samples and entry.start >= len(entry.request.prompt_token_ids)
