"""Running prompts through a real step, keeping the logits: what the equivalence tests compare."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from dcpjax.api.config import EngineConfig
from dcpjax.api.sampling_params import SamplingParams
from dcpjax.checkpoint.model_files import open_model
from dcpjax.engine.blocks import BlockManager
from dcpjax.engine.request import Request
from dcpjax.engine.scheduler import Scheduled, Scheduler
from dcpjax.models import decoder
from dcpjax.runtime.batch import Batch, ShapeBuckets, build
from dcpjax.runtime.programs import compile_on_demand, known_tokens
from dcpjax.runtime.runner import Runner, load_runner

GOLDENS = Path(__file__).parent / "goldens"


@dataclass
class Trace:
    """What one prompt gave: greedy tokens, and the float32 logits [V] after each token of prompt and completion."""

    prompt_length: int
    tokens: list[int] = field(default_factory=list)
    every_logits: list[np.ndarray] = field(default_factory=list)

    @property
    def prompt_logits(self) -> np.ndarray:
        """[n, V]: after each prompt token; the last row chose the first token."""
        return np.array(self.every_logits[: self.prompt_length])

    @property
    def logits(self) -> np.ndarray:
        """[count, V]: what each greedy token was chosen from."""
        return np.array(self.every_logits[self.prompt_length - 1 :])


def all_logits(weights: Any, cache: Any, latest: Any, batch: Batch, *, config: Any, runtime: Any) -> tuple[Any, Any]:
    """`forward`, but giving the logits [N, V] of every token."""
    hidden, cache = decoder.forward(weights, cache, known_tokens(batch, latest), batch.work, config, runtime)
    return decoder.logits(weights, hidden, config, runtime.place), cache


def sample(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """The same cases for `parametrize`: those `kept` run by default, the others in the sweep (`pytest -m sweep`)."""
    cases = list(cases)
    assert all(case in cases for case in kept), f"{kept} must be among {cases}"
    return [case if case in kept else swept(case) for case in cases]


def swept(case: Any) -> Any:
    return pytest.param(*case if isinstance(case, tuple) else (case,), marks=pytest.mark.sweep)


def golden(family: str) -> dict[str, np.ndarray]:
    return dict(np.load(GOLDENS / family / "golden.npz"))


def golden_runner(family: str, tp: int, dcp: int, **options: Any) -> Runner:
    """A golden checkpoint on a mesh, for steps of few and short requests."""
    usual = {
        "dtype": "float32",
        "block_size": 16,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "kv_cache_memory_bytes": 2**20,
    }
    layout = {"tensor_parallel_size": tp * dcp, "decode_context_parallel_size": dcp}
    return load_runner(open_model(GOLDENS / family), EngineConfig.from_options(usual | layout | options))


@cache
def loaded(family: str, **options: Any) -> "Stepper":
    """A golden checkpoint on a layout; options are those of `EngineConfig`."""
    return Stepper(GOLDENS / family, **options)


class OneShape(ShapeBuckets):
    """Every step in the largest shape: one program for each layout to be compared."""

    def decode_only(self, step: Sequence[Scheduled]) -> bool:
        return False

    def rows(self, count: int) -> int:
        return self.max_rows

    def tokens(self, count: int) -> int:
        return self.max_tokens


class Stepper:
    """A model whose steps give logits."""

    def __init__(self, path: Path, *, one_shape: bool = False, **options: Any) -> None:
        options = {"dtype": "float32", "block_size": 16, "max_num_seqs": 4, "kv_cache_memory_bytes": 2**20} | options
        self.runner = load_runner(open_model(path), EngineConfig(**options))
        runner = self.runner
        if one_shape:
            runner.shapes = OneShape(**vars(runner.shapes))
        self.step = compile_on_demand(all_logits, runner.model.config, runner.model.runtime, runner.cache)

    def greedy(self, prompts: Sequence[Sequence[int]], count: int) -> list[Trace]:
        """`count` greedy tokens for each prompt, all running together through the project's own scheduler."""
        scheduler, requests = self._queue(prompts, count)
        traces = [Trace(len(prompt)) for prompt in prompts]
        while scheduler.has_work:
            step = scheduler.schedule()
            batch = build(step, self.runner.shapes, self.runner.geometry)
            runner = self.runner
            scores, runner.cache = self.step(runner.weights, runner.cache, runner.latest, batch)
            scheduler.update(step)
            rows = iter(np.asarray(scores))
            for entry in step:
                trace = traces[requests.index(entry.request)]
                trace.every_logits.extend(next(rows) for _ in range(entry.count))
                if entry.samples:
                    self._append(scheduler, entry.request, trace, count)
            scheduler.blocks.check_integrity()
        return traces

    def poison(self, value: float) -> None:
        """Fill every slot of the cache with `value`."""
        self.runner.cache = jax.tree.map(lambda array: array.at[:].set(value), self.runner.cache)

    def _queue(self, prompts: Sequence[Sequence[int]], count: int) -> tuple[Scheduler, list[Request]]:
        sizes = self.runner.sizes
        limits = replace(sizes.limits, prefill_budget=None, enable_prefix_caching=False)
        scheduler = Scheduler(BlockManager(sizes.num_blocks), self.runner.geometry, limits)
        requests = [
            Request(
                number=number,
                prompt_token_ids=[int(token) for token in prompt],
                params=SamplingParams(),
                max_tokens=count,
            )
            for number, prompt in enumerate(prompts)
        ]
        for request in requests:
            scheduler.add(request)
        return scheduler, requests

    @staticmethod
    def _append(scheduler: Scheduler, request: Request, trace: Trace, count: int) -> None:
        request.num_in_flight = 0
        token = int(np.argmax(trace.every_logits[-1]))
        request.output_token_ids.append(token)
        trace.tokens.append(token)
        if len(trace.tokens) == count:
            request.finish("length")
            scheduler.release(request)


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Each program that XLA compiles, or the compilation cache gives, meanwhile."""
    found: list[str] = []

    def note(event: str, duration: float, **tags: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(str(tags.get("fun_name", event)))

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
