"""What a batch job has done so far, in numbers."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dcpjax.api.outputs import RequestOutput

State = Literal["loading", "running", "stopping", "finished", "stopped", "failed"]
SHOWN_ERRORS = 3
SHOWN_CHARACTERS = 200


@dataclass
class JobStatistics:
    """Counters of one run. `resumed` and `resumed_errors` count records that earlier runs wrote."""

    total: int | None = None  # lines that are not blank; None while a pipe has not ended
    resumed: int = 0
    resumed_errors: int = 0
    written: int = 0
    new_errors: int = 0
    blank: int = 0
    running: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    first_errors: list[str] = field(default_factory=list)
    engine: Mapping[str, float] = field(default_factory=dict)
    state: State = "loading"
    clock: Callable[[], float] = time.monotonic
    started_at: float | None = None

    @property
    def done(self) -> int:
        return self.resumed + self.written

    @property
    def errors(self) -> int:
        return self.resumed_errors + self.new_errors

    @property
    def seconds(self) -> float:
        """Since the engine was ready: loading a model does not count."""
        return 0.0 if self.started_at is None else max(self.clock() - self.started_at, 1e-9)

    @property
    def seconds_left(self) -> float | None:
        if self.total is None or not self.written:
            return None
        return (self.total - self.done) * self.seconds / self.written

    def start(self) -> None:
        self.state, self.started_at = "running", self.clock()

    def add_tokens(self, output: RequestOutput) -> None:
        """Count the tokens of a request that was run."""
        self.prompt_tokens += len(output.prompt_token_ids)
        self.cached_tokens += output.num_cached_tokens
        self.new_tokens += sum(len(one.token_ids) for one in output.outputs)

    def add_error(self, line: int, message: str) -> None:
        self.new_errors += 1
        if len(self.first_errors) < SHOWN_ERRORS:
            self.first_errors.append(f"line {line}: {' '.join(message.split())[:SHOWN_CHARACTERS]}")

    def per_second(self, count: int) -> float:
        return count / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For the status file and the JSON logs."""
        return {
            "state": self.state,
            "total": self.total,
            "done": self.done,
            "resumed": self.resumed,
            "errors": self.errors,
            "blank": self.blank,
            "running": self.running,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.new_tokens,
            "prompt_tokens_per_second": round(self.per_second(self.prompt_tokens), 1),
            "completion_tokens_per_second": round(self.per_second(self.new_tokens), 1),
            "seconds": round(self.seconds, 3),
            "seconds_left": None if self.seconds_left is None else round(self.seconds_left, 1),
            "engine": dict(self.engine),
        }
