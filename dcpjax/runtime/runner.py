"""Runs the steps that the scheduler chose on a model on its mesh: launch now, collect the sampled tokens later."""

import atexit
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial as bind
from typing import Any
from weakref import WeakSet

import jax
import numpy as np

from dcpjax.api.config import EngineConfig
from dcpjax.api.progress import status
from dcpjax.checkpoint.model_files import ModelFiles
from dcpjax.engine.result import StepResult
from dcpjax.engine.scheduler import Scheduled, StepLimits, is_repeated
from dcpjax.models.attention.up_projected import up_projection_threshold
from dcpjax.models.kv_cache import CacheGeometry
from dcpjax.runtime.batch import Batch, ShapeBuckets, build
from dcpjax.runtime.compiling import CompileTimes, run_all
from dcpjax.runtime.decode_loop import Ahead
from dcpjax.runtime.logit_rows import SampledRows, ScoredTokens
from dcpjax.runtime.memory import Sizes, resolve_sizes, table_width
from dcpjax.runtime.model import MeshModel, lay_out
from dcpjax.runtime.programs import Programs, head_weights, padded_pairs
from dcpjax.runtime.read_back import read_back, read_back_all
from dcpjax.sampling.known_tokens import KnownIds, KnownTokens
from dcpjax.sampling.sampler import Sampled, SamplingBatch
from dcpjax.sampling.scoring import Logprobs

ProgramKey = tuple[Any, ...]


@dataclass
class LaunchedStep:
    """A step that runs, and where its results will be."""

    step: Sequence[Scheduled]
    finite: jax.Array | None  # [B] bool: whether the hidden states are finite; None if every entry is sampled
    sampled: Sampled | None  # a row for each entry that is sampled; of several decode steps, for each of them
    prompt_scores: Logprobs | None

    @property
    def arrays(self) -> tuple[Any, ...]:
        return self.finite, self.sampled, self.prompt_scores


_runners: WeakSet["Runner"] = WeakSet()


@atexit.register
def _wait_for_runners() -> None:
    """XLA's threads and Numba's threads deadlock if the process exits while a step runs."""
    for runner in list(_runners):
        runner.wait()


def load_runner(files: ModelFiles, engine: EngineConfig, *, progress: bool = False) -> "Runner":
    """Lay a model out, size its cache and load its weights: a runner ready for its first step.

    Raises ValueError, before any weight is read, for what cannot be.
    """
    model = lay_out(files, engine)
    sizes = resolve_sizes(model, engine)
    return Runner(model, sizes, model.load(files, engine, progress=progress), progress=progress)


class Runner:
    """A model's weights and cache on the mesh, and the steps that run on them."""

    def __init__(self, model: MeshModel, sizes: Sizes, weights: Any, *, progress: bool = False) -> None:
        self.model, self.sizes, self.weights, self.progress = model, sizes, weights, progress
        self.cache = model.empty_cache(sizes.num_blocks)
        self.latest = self._no_tokens()  # each seat's newest token
        self.shapes = _shape_buckets(model, sizes)
        self.programs = Programs(model.config, model.runtime, self.cache)
        self.known: KnownTokens | None = None  # the ids that are sampled and listed; None: all
        self.compile_times = CompileTimes()
        self._compiled: set[ProgramKey] = set()
        _runners.add(self)

    @property
    def geometry(self) -> CacheGeometry:
        return self.model.geometry

    @property
    def compile_seconds(self) -> float:
        """Spent on compiling and on reading kept programs, since the first step."""
        return self.compile_times.seconds

    def restrict(self, known: np.ndarray) -> None:
        """From now on sample and list only ids in known [V] bool. Other programs compile for that."""
        self.known = None if known.all() else KnownTokens.on(self.model.place.sharding(), known)

    @property
    def _known_ids(self) -> KnownIds | None:
        return None if self.known is None else self.known.ids

    def launch(self, step: Sequence[Scheduled]) -> LaunchedStep:
        """Start a step and return at once with what it will have sampled."""
        if is_repeated(step):
            return self._launch_repeated(step)
        batch = build(step, self.shapes, self.geometry)
        sampled_rows = self._sampled_rows(step, batch)
        scored_tokens = ScoredTokens.of(step, self.model.config.vocab_size)
        if not self._compiled.issuperset(_keys(batch, sampled_rows, scored_tokens)):
            self._compile(step, batch.tokens.size)
        self._copy_blocks([entry.copy for entry in step if entry.copy])
        (hidden, finite), self.cache = self.programs.forward(self.weights, self.cache, self.latest, batch)
        launched = LaunchedStep(
            step,
            None if all(entry.samples for entry in step) else finite,
            sampled_rows and self._sample(hidden, sampled_rows),
            scored_tokens and self._score(hidden, scored_tokens),
        )
        return _copied_to_host(launched)

    def _launch_repeated(self, step: Sequence[Scheduled]) -> LaunchedStep:
        inputs = self._repeated(step)
        if _shape(inputs) not in self._compiled:
            self._compile(step, inputs[0].tokens.size)
        sampled, self.latest, self.cache = self.programs.decode(self.weights, self.cache, self.latest, *inputs)
        return _copied_to_host(LaunchedStep(step, None, sampled, None))

    def collect(self, launched: LaunchedStep) -> StepResult:
        """Wait for a step; its results in the order of its entries."""
        step, arrays = launched.step, jax.device_get(launched.arrays)
        return read_back_all(step, arrays[1]) if is_repeated(step) else read_back(step, *arrays)

    def programs_of(self, step: Sequence[Scheduled]) -> dict[ProgramKey, Callable[[], Any]]:
        """What compiles each program of a step without running it. Later calls of that shape find it compiled."""
        if is_repeated(step):
            inputs, state = self._repeated(step), (self.weights, self.cache, self.latest)
            return {_shape(inputs): bind(_compile, self.programs.decode, *state, *inputs)}
        batch = build(step, self.shapes, self.geometry)
        rows = self._sampled_rows(step, batch)
        scored = ScoredTokens.of(step, self.model.config.vocab_size)
        keys = _keys(batch, rows, scored)
        programs, forward = dict[ProgramKey, Callable[[], Any]](), self.programs.forward
        programs[next(keys)] = bind(_compile, forward, self.weights, self.cache, self.latest, batch)
        hidden, head = self._hidden(batch.tokens.size), head_weights(self.weights)
        if rows is not None:
            gathered = self._hidden(rows.indices.size)
            programs[next(keys)] = bind(_compile, self.programs.gather, hidden, rows.indices)
            programs[next(keys)] = bind(_compile, self.programs.sample, head, gathered, self.latest, rows.options)
        if scored is not None:
            gathered, program = self._hidden(scored.indices.size), self.programs.score
            programs[next(keys)] = bind(_compile, self.programs.gather, hidden, scored.indices)
            arguments = scored.targets, scored.num_logprobs, self._known_ids
            programs[next(keys)] = bind(_compile, program, head, gathered, *arguments)
        return programs

    def copy_programs(self) -> dict[ProgramKey, Callable[[], Any]]:
        """The same for copies of blocks: at most one for each request."""
        programs, size = dict[ProgramKey, Callable[[], Any]](), 0
        while size < self.sizes.limits.max_num_seqs:
            sources, targets = padded_pairs([(0, 0)] * (size + 1), self.sizes.num_blocks)
            size = len(sources)
            programs["copy", size] = bind(_compile, self.programs.copy, self.cache, sources, targets)
        return programs

    def note_compiled(self, keys: Iterable[ProgramKey]) -> None:
        """From now on a step of these programs is not reported as compiling."""
        self._compiled.update(keys)

    def restore_cache(self) -> bool:
        """Make an empty cache if a step that failed or was interrupted took the old one along; True if it did."""
        lost = not self.wait()
        if lost:
            self.cache, self.latest = self.model.empty_cache(self.sizes.num_blocks), self._no_tokens()
        return lost

    def wait(self) -> bool:
        """Wait until no step runs. Whether the last one left the cache and the newest tokens whole."""
        try:
            jax.block_until_ready((self.cache, self.latest))
            return not any(array.is_deleted() for array in jax.tree.leaves((self.cache, self.latest)))
        except Exception:
            return False

    def __del__(self) -> None:
        if hasattr(self, "latest"):
            self.wait()

    def _copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        if pairs:
            self.cache = self.programs.copy(self.cache, *padded_pairs(pairs, self.sizes.num_blocks))

    def _sampled_rows(self, step: Sequence[Scheduled], batch: Batch) -> SampledRows | None:
        return SampledRows.of(step, batch, self.shapes, self.model.config.vocab_size, self.known)

    def _repeated(self, step: Sequence[Scheduled]) -> tuple[Batch, SamplingBatch, Ahead]:
        """What `decode` takes besides the weights and the state on the device."""
        batch = build(step, self.shapes, self.geometry)
        rows = self._sampled_rows(step, batch)
        assert rows is not None
        ahead = Ahead.of(step, rows.indices.size, self.sizes.limits.num_decode_steps)
        return batch, rows.options, ahead

    def _sample(self, hidden: jax.Array, rows: SampledRows) -> Sampled:
        gathered = self.programs.gather(hidden, rows.indices)
        sampled, self.latest = self.programs.sample(head_weights(self.weights), gathered, self.latest, rows.options)
        return sampled

    def _score(self, hidden: jax.Array, tokens: ScoredTokens) -> Logprobs:
        gathered = self.programs.gather(hidden, tokens.indices)
        arguments = tokens.targets, tokens.num_logprobs, self._known_ids
        return self.programs.score(head_weights(self.weights), gathered, *arguments)

    def _compile(self, step: Sequence[Scheduled], tokens: int) -> None:
        """Compile what a step of a new shape runs, and beside it the decodes that follow: they are needed next."""
        programs = self.programs_of(step)
        if following := _next_decodes(step, self.sizes.limits):
            programs |= self.programs_of(following)
        new = {key: program for key, program in programs.items() if key not in self._compiled}
        with status(f"compiling the step for {tokens} tokens", shown=self.progress), self.compile_times.noting():
            run_all(new.values())
        self.note_compiled(new)

    def _hidden(self, tokens: int) -> jax.ShapeDtypeStruct:
        """[tokens, M], as `forward` and `gather` give it."""
        shape = tokens, self.model.config.hidden_size
        return jax.ShapeDtypeStruct(shape, np.float32, sharding=self.model.place.sharding())

    def _no_tokens(self) -> jax.Array:
        return jax.device_put(np.zeros(self.sizes.limits.max_num_seqs, np.int32), self.model.place.sharding())


def _shape_buckets(model: MeshModel, sizes: Sizes) -> ShapeBuckets:
    mla = model.config.mla
    return ShapeBuckets(
        max_rows=sizes.limits.max_num_seqs,
        max_tokens=sizes.limits.max_num_batched_tokens,
        table_width=table_width(sizes.max_model_len, model.geometry),
        # only on CPU: elsewhere a kernel takes absorbed prompts, and up-projected ones would run the slower loop
        whole_prompts_from=up_projection_threshold(mla) if mla and model.platform == "cpu" else None,
        prompt_exchange=model.prompt_exchange,
    )


def _copied_to_host(launched: LaunchedStep) -> LaunchedStep:
    jax.tree.map(lambda array: array.copy_to_host_async(), launched.arrays)
    return launched


def _next_decodes(step: Sequence[Scheduled], limits: StepLimits) -> list[Scheduled]:
    """A step of the shape of the next one, if no request comes or stops: the next tokens of each that goes on."""
    goes_on = [entry for entry in step if entry.samples and entry.request.num_left > entry.steps]
    most = limits.decode_steps([entry.request for entry in goes_on])
    return [_next_decode(entry, min(most, entry.request.num_left - entry.steps)) for entry in goes_on]


def _next_decode(entry: Scheduled, steps: int) -> Scheduled:
    return replace(entry, start=entry.start + entry.count - 1, count=1, copy=None, steps=steps)


def _keys(batch: Batch, sampled: SampledRows | None, scored: ScoredTokens | None) -> Iterator[ProgramKey]:
    """What tells the programs of a step from those of others: forward; gather and sample; gather and score."""
    size = batch.tokens.size
    yield _shape(batch)
    if sampled is not None:
        yield size, sampled.indices.size
        yield _shape(sampled.options)
    if scored is not None:
        yield size, scored.indices.size
        yield scored.indices.size, "scored", scored.num_logprobs


def _compile(program: Any, *arguments: Any) -> None:
    program.lower(*arguments).compile()


def _shape(tree: Any) -> ProgramKey:
    leaves, structure = jax.tree.flatten(tree)
    return structure, *(leaf.shape for leaf in leaves)
