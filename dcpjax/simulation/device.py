"""A device that computes nothing and takes as long as a step must: the engine runs on it as on a real one.

Time is virtual. A step starts when the one before is done; waiting for it is what moves the clock. Knows no arrays
of a model, and nothing about when requests come.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dcpjax.engine.result import StepResult
from dcpjax.engine.scheduler import Scheduled
from dcpjax.models.kv_cache import CacheGeometry
from dcpjax.planning.floor import Floor
from dcpjax.simulation.cost import StepFloor


@dataclass
class Clock:
    """Seconds since the simulation began."""

    now: float = 0.0


@dataclass(frozen=True)
class Launched:
    """A step on its way."""

    entries: Sequence[Scheduled]
    start: float
    floor: Floor

    @property
    def end(self) -> float:
        return self.start + self.floor.seconds


@dataclass
class SimulatedDevice:
    """A `StepRunner` without a model. What it samples is like no token of any prompt, and tells requests apart."""

    geometry: CacheGeometry
    clock: Clock
    floor_of: StepFloor
    watch: Callable[[Launched], None]  # is shown every step as it is launched
    compile_seconds: float = 0.0
    _free_from: float = 0.0

    def launch(self, step: Sequence[Scheduled]) -> Launched:
        launched = Launched(step, max(self.clock.now, self._free_from), self.floor_of(step))
        self._free_from = launched.end
        self.watch(launched)
        return launched

    def collect(self, launched: Launched) -> StepResult:
        self.clock.now = max(self.clock.now, launched.end)
        sampled = [answer_token(entry.request.number) for entry in launched.entries]
        return StepResult(sampled, [True] * len(sampled))

    def restore_cache(self) -> bool:
        return False


def answer_token(number: int) -> int:
    """What a request generates: -1 is padding and -2 an unknown token."""
    return -3 - number
