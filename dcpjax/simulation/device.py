"""A `StepRunner` for the engine that computes nothing: each step takes its floor on a virtual clock.

A step starts when the one before it has ended. Collecting a step advances the clock to its end.
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
class LaunchedStep:
    """A step that has been launched and not yet collected."""

    entries: Sequence[Scheduled]
    start: float
    floor: Floor

    @property
    def end(self) -> float:
        return self.start + self.floor.seconds


@dataclass
class SimulatedDevice:
    """A `StepRunner` without a model. Its tokens occur in no prompt and differ between requests."""

    geometry: CacheGeometry
    clock: Clock
    floor_of: StepFloor
    on_launch: Callable[[LaunchedStep], None]  # called with every step when it is launched
    compile_seconds: float = 0.0
    _busy_until: float = 0.0

    def launch(self, step: Sequence[Scheduled]) -> LaunchedStep:
        launched = LaunchedStep(step, max(self.clock.now, self._busy_until), self.floor_of(step))
        self._busy_until = launched.end
        self.on_launch(launched)
        return launched

    def collect(self, launched: LaunchedStep) -> StepResult:
        self.clock.now = max(self.clock.now, launched.end)
        sampled = [answer_token(entry.request.number) for entry in launched.entries]
        return StepResult(sampled, [True] * len(sampled))

    def restore_cache(self) -> bool:
        return False


def answer_token(number: int) -> int:
    """The token that a request generates. -1 is padding and -2 an unknown token, so ids start at -3."""
    return -3 - number
