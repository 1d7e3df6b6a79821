"""Replays a trace on the real engine (scheduler, block manager and queues) with a simulated device.

The engine's own metrics hold wall-clock times of this machine, so times on the virtual clock are recorded here.
"""

from array import array
from itertools import count

from dcpjax.api.outputs import RequestMetrics
from dcpjax.api.sampling_params import SamplingParams
from dcpjax.engine.engine import Engine
from dcpjax.engine.request import Request, Status
from dcpjax.engine.scheduler import Scheduled, StepLimits
from dcpjax.models.kv_cache import CacheGeometry
from dcpjax.simulation.arrivals import Arrival, Arrivals, prompt
from dcpjax.simulation.cost import StepFloor
from dcpjax.simulation.device import Clock, LaunchedStep, SimulatedDevice
from dcpjax.simulation.result import SimulatedStep

PARAMS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)


class Replay:
    """One run of a trace on one engine. Times are seconds on the virtual clock."""

    def __init__(
        self, arrivals: Arrivals, geometry: CacheGeometry, *, num_blocks: int, limits: StepLimits, floor_of: StepFloor
    ) -> None:
        self.arrivals, self.clock = arrivals, Clock()
        self.engine = Engine(
            SimulatedDevice(geometry, self.clock, floor_of, self._record_step), num_blocks=num_blocks, limits=limits
        )
        self.timeline: list[SimulatedStep] = []
        self.metrics: list[RequestMetrics] = []  # index: number of the request
        self.gaps = array("d")  # seconds between two tokens of the same request
        self._numbers = count()
        self._unfinished = 0
        self._recorded = (0, 0)  # preemptions and prefix hits in the timeline so far

    def run(self) -> None:
        while self.arrivals or self.engine.has_work:
            if not self.engine.has_work:
                self.clock.now = max(self.clock.now, self.arrivals.next_time)
            for arrival in self.arrivals.take_arrived(self.clock.now, self._unfinished):
                self._add(arrival)
            for request in self.engine.step():
                self._record_token(request)

    def _add(self, arrival: Arrival) -> None:
        self.metrics.append(RequestMetrics(arrival.time))
        self._unfinished += 1
        self.engine.add(
            Request(
                number=next(self._numbers),
                prompt_token_ids=prompt(arrival.request),
                params=PARAMS,
                max_tokens=arrival.request.output_length,
            )
        )

    def _record_step(self, launched: LaunchedStep) -> None:
        """Add a step to the timeline when it is launched. Its requests are scheduled now; it may start later."""
        for entry in launched.entries:
            metrics = self.metrics[entry.request.number]
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = self.clock.now
        scheduler, (preemptions, hits) = self.engine.scheduler, self._recorded
        counters = scheduler.counters
        self._recorded = counters.preemptions, counters.prefix_hits
        decodes = sum(_is_decode(entry) for entry in launched.entries)
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
                lacks_blocks=self._lacks_blocks(scheduler.waiting.first()),
            )
        )

    def _lacks_blocks(self, first: Request | None) -> bool:
        """Whether the first waiting request, new or preempted, needs more blocks than are free."""
        if first is None:
            return False
        return self.engine.runner.geometry.blocks(first.num_tokens) > self.engine.blocks.num_free

    def _record_token(self, request: Request) -> None:
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
            self._unfinished -= 1


def _is_decode(entry: Scheduled) -> bool:
    """Whether the entry is one generated token; others compute prompts, or recompute what a preemption dropped."""
    return entry.count == 1 and entry.samples and entry.start >= len(entry.request.prompt_token_ids)
