"""A model on its mesh: weights, cache and compiled programs. Runs what the scheduler chose, returns sampled ids.

Knows arrays and batches; knows nothing about queues or text.
"""

import atexit
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial as bind
from typing import Any
from weakref import WeakSet

import jax
import numpy as np

from dcpjax.api.config import EngineConfig
from dcpjax.api.progress import status
from dcpjax.checkpoint.hub import cache_folder
from dcpjax.checkpoint.model_files import ModelFiles
from dcpjax.checkpoint.weights import dummy_weights, load_weights
from dcpjax.engine.limits import step_limits
from dcpjax.engine.result import StepResult
from dcpjax.engine.scheduler import Limits, Scheduled
from dcpjax.models import decoder
from dcpjax.models.attention.up_projected import up_projection_threshold
from dcpjax.models.attention.work import Runtime
from dcpjax.models.config import ModelConfig, from_hf
from dcpjax.models.kv_cache import CacheGeometry, storage_dtype
from dcpjax.runtime.batch import Batch, Shapes, build
from dcpjax.runtime.devices import ensure_devices, keep_compiled_programs
from dcpjax.runtime.logit_rows import Choice, Scoring
from dcpjax.runtime.programs import (
    compile_choice,
    compile_copy,
    compile_on_demand,
    compile_pick,
    compile_prompt_scores,
    forward,
    head_of,
    padded_pairs,
)
from dcpjax.runtime.step_result import step_result
from dcpjax.sampling.sampler import Sampled
from dcpjax.sampling.scoring import Logprobs
from dcpjax.sharding import arrays
from dcpjax.sharding.arrays import is_spec
from dcpjax.sharding.link import find_link
from dcpjax.sharding.mesh import Layout, check_layout, make_mesh
from dcpjax.sharding.rules import Placement, Rules

CPU_CACHE_BYTES = 2**30  # default cache of all virtual CPU devices together

ProgramKey = tuple[Any, ...]


@dataclass
class Launched:
    """A step on its way, and where its results will be."""

    step: Sequence[Scheduled]
    sound: jax.Array | None  # [R] bool: whether the hidden states are finite; None if all entries choose
    sampled: Sampled | None  # a row for each entry that chooses
    prompt_scores: Logprobs | None

    @property
    def arrays(self) -> tuple[Any, ...]:
        return self.sound, self.sampled, self.prompt_scores


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the engine may hold, resolved from the user's choice, the model and the memory."""

    num_blocks: int
    max_model_len: int
    limits: Limits


_runners: WeakSet["Runner"] = WeakSet()


@atexit.register
def _wait_for_runners() -> None:
    """XLA's threads and those of Numba wait for each other for ever if a process ends while a step runs."""
    for runner in list(_runners):
        runner.wait()


class Runner:
    """Loads a model onto the mesh and runs steps on it."""

    def __init__(self, files: ModelFiles, engine: EngineConfig, *, progress: bool = False) -> None:
        self.config = from_hf(overridden(files.config, engine.hf_overrides or {}))
        layout = Layout(
            tensor_parallel_size=engine.tensor_parallel_size,
            decode_context_parallel_size=engine.decode_context_parallel_size,
        )
        check_layout(layout, self.config.num_heads, self.config.cache_heads, whole_heads=self.config.mla is not None)
        ensure_devices(layout.devices)
        keep_compiled_programs(engine.compilation_cache)
        self.layout, self.progress = layout, progress
        self.runtime = _runtime(layout, engine)
        self.platform = self.place.mesh.devices.flat[0].platform
        self.dtype = resolve_dtype(engine.dtype, self.config)
        self.kv_dtype = self.dtype if engine.kv_cache_dtype == "auto" else engine.kv_cache_dtype
        self.sizes = self._sizes(engine)  # refuses what cannot be before any weight is read
        self.weights = self._weights(files, engine)
        self.cache = self._empty_cache()
        self.shapes = Shapes(
            max_rows=self.sizes.limits.max_num_seqs,
            max_tokens=self.sizes.limits.max_num_batched_tokens,
            table_width=self._table_width(),
            # elsewhere a kernel serves prompts as they are absorbed; up-projected ones would run the loop
            whole_prompts_from=up_projection_threshold(self.config.mla)
            if self.config.mla and self.platform == "cpu"
            else None,
        )
        self.latest = self._no_tokens()
        self._forward = compile_on_demand(forward, self.config, self.runtime, self.cache)
        self._pick = compile_pick(self.place)
        self._choose = compile_choice(self.config, self.place)
        self._score_prompt = compile_prompt_scores(self.config, self.place)
        self._copy = compile_copy(self.cache, self.place)
        self._compiled: set[ProgramKey] = set()
        self.compile_seconds = 0.0
        _runners.add(self)

    @property
    def place(self) -> Placement:
        return self.runtime.place

    @property
    def geometry(self) -> CacheGeometry:
        return self.runtime.geometry

    def launch(self, step: Sequence[Scheduled]) -> Launched:
        """Start a step and return at once with what it will have sampled."""
        batch = build(step, self.shapes, self.geometry)
        choice = Choice.of(step, batch, self.shapes, self.config.vocab_size)
        scoring = Scoring.of(step, self.config.vocab_size)
        with self._noting_compilation(batch, choice, scoring):
            self._copy_blocks([entry.copy for entry in step if entry.copy])
            (hidden, sound), self.cache = self._forward(self.weights, self.cache, self.latest, batch)
            launched = Launched(
                step,
                None if all(entry.samples for entry in step) else sound,
                choice and self._sampled(hidden, choice),
                scoring and self._prompt_scores(hidden, scoring),
            )
        jax.tree.map(lambda array: array.copy_to_host_async(), launched.arrays)
        return launched

    def collect(self, launched: Launched) -> StepResult:
        """Wait for a step; its results in the order of its entries."""
        return step_result(launched.step, *jax.device_get(launched.arrays))

    def programs_of(self, step: Sequence[Scheduled]) -> dict[ProgramKey, Callable[[], Any]]:
        """What compiles each program of a step without running it. Later calls of that shape find it compiled."""
        batch = build(step, self.shapes, self.geometry)
        choice = Choice.of(step, batch, self.shapes, self.config.vocab_size)
        keys = _keys(batch, choice, None)
        programs = {next(keys): bind(_compile, self._forward, self.weights, self.cache, self.latest, batch)}
        if choice is not None:
            hidden, picked = self._hidden(batch.tokens.size), self._hidden(choice.indices.size)
            head = head_of(self.weights)
            programs[next(keys)] = bind(_compile, self._pick, hidden, choice.indices)
            programs[next(keys)] = bind(_compile, self._choose, head, picked, self.latest, choice.options)
        return programs

    def copy_programs(self) -> dict[ProgramKey, Callable[[], Any]]:
        """The same for copies of blocks: at most one for each request."""
        programs, size = dict[ProgramKey, Callable[[], Any]](), 0
        while size < self.sizes.limits.max_num_seqs:
            sources, targets = padded_pairs([(0, 0)] * (size + 1), self.sizes.num_blocks)
            size = len(sources)
            programs["copy", size] = bind(_compile, self._copy, self.cache, sources, targets)
        return programs

    def note_compiled(self, keys: Iterable[ProgramKey]) -> None:
        """From now on a step of these programs is not said to compile."""
        self._compiled.update(keys)

    def restore_cache(self) -> bool:
        """Make an empty cache if a step that failed or was cut short took the old one along; True if it did."""
        lost = not self.wait()
        if lost:
            self.cache, self.latest = self._empty_cache(), self._no_tokens()
        return lost

    def wait(self) -> bool:
        """Until no step runs; whether the last one left the cache and the newest tokens whole."""
        try:
            jax.block_until_ready((self.cache, self.latest))
            return not any(array.is_deleted() for array in jax.tree.leaves((self.cache, self.latest)))
        except Exception:
            return False

    def __del__(self) -> None:
        self.wait()

    def _copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        if pairs:
            self.cache = self._copy(self.cache, *padded_pairs(pairs, self.sizes.num_blocks))

    def _sampled(self, hidden: jax.Array, choice: Choice) -> Sampled:
        picked = self._pick(hidden, choice.indices)
        sampled, self.latest = self._choose(head_of(self.weights), picked, self.latest, choice.options)
        return sampled

    def _prompt_scores(self, hidden: jax.Array, scoring: Scoring) -> Logprobs:
        picked = self._pick(hidden, scoring.indices)
        return self._score_prompt(head_of(self.weights), picked, scoring.targets, scoring.num_logprobs)

    @contextmanager
    def _noting_compilation(self, batch: Batch, choice: Choice | None, scoring: Scoring | None) -> Generator[None]:
        """Say so and keep the time when a step has a shape not seen before."""
        keys = set(_keys(batch, choice, scoring))
        if keys <= self._compiled:
            yield
            return
        started = time.monotonic()
        with status(f"compiling the step for {batch.tokens.size} tokens", shown=self.progress):
            yield
        self.compile_seconds += time.monotonic() - started
        self.note_compiled(keys)

    def _hidden(self, tokens: int) -> jax.ShapeDtypeStruct:
        """[tokens, M], as `forward` and `pick` give it."""
        shape = tokens, self.config.hidden_size
        return jax.ShapeDtypeStruct(shape, np.float32, sharding=self.place.sharding())

    def _no_tokens(self) -> jax.Array:
        """Each seat's newest token, before there is any."""
        return jax.device_put(np.zeros(self.sizes.limits.max_num_seqs, np.int32), self.place.sharding())

    def _weights(self, files: ModelFiles, engine: EngineConfig) -> Any:
        specs = decoder.weight_specs(self.config, self.layout, self.dtype)
        if engine.load_format == "dummy":
            return dummy_weights(specs, self.place, engine.seed)
        names = decoder.weight_names(self.config)
        return load_weights(specs, names, files.tensors(), self.place, progress=self.progress)

    def _empty_cache(self) -> Any:
        specs = self._cache_specs(self.sizes.num_blocks)
        return jax.tree.map(lambda spec: arrays.zeros(spec, self.place), specs, is_leaf=is_spec)

    def _cache_specs(self, num_blocks: int) -> Any:
        dtype = storage_dtype(self.kv_dtype, self.platform)
        return decoder.cache_specs(self.config, self.layout, num_blocks, self.geometry.slots, dtype)

    def _sizes(self, engine: EngineConfig) -> Sizes:
        budget = engine.kv_cache_memory_bytes or self._default_cache_bytes(engine)
        num_blocks = count_blocks(budget, self.block_bytes_per_device(), self.geometry)
        capacity = num_blocks * self.geometry.block_size
        limit = self.config.max_position_embeddings
        if engine.max_model_len is not None and engine.max_model_len > min(limit, capacity):
            which = (
                f"the model's {limit} positions"
                if limit <= capacity
                else (f"the KV cache of {capacity} tokens ({budget} bytes per device; raise kv_cache_memory_bytes)")
            )
            raise ValueError(
                f"max_model_len must be at most {which}, but is {engine.max_model_len}; use {min(limit, capacity)}"
            )
        return Sizes(
            num_blocks=num_blocks,
            max_model_len=engine.max_model_len or min(limit, capacity),
            limits=step_limits(
                self.config,
                self.platform,
                max_num_seqs=engine.max_num_seqs,
                max_num_batched_tokens=engine.max_num_batched_tokens,
                max_mixed_prefill_tokens=engine.max_mixed_prefill_tokens,
                enable_prefix_caching=engine.enable_prefix_caching,
            ),
        )

    def block_bytes_per_device(self) -> int:
        """Bytes that one block takes on each device, over all layers, copies of KV heads included."""
        specs = jax.tree.leaves(self._cache_specs(1), is_leaf=is_spec)
        return sum(spec.bytes_per_device(self.place) for spec in specs)

    def _default_cache_bytes(self, engine: EngineConfig) -> int:
        device = self.place.mesh.devices.flat[0]
        stats = device.memory_stats() if self.platform != "cpu" else None
        if not stats:
            return CPU_CACHE_BYTES // self.layout.devices
        specs = jax.tree.leaves(decoder.weight_specs(self.config, self.layout, self.dtype), is_leaf=is_spec)
        weights = sum(spec.bytes_per_device(self.place) for spec in specs)
        return int(stats["bytes_limit"] * engine.gpu_memory_utilization) - stats["bytes_in_use"] - weights

    def _table_width(self) -> int:
        """W: blocks of the longest request, rounded up to whole chunks."""
        blocks = self.geometry.blocks(self.sizes.max_model_len)
        return -(-blocks // self.geometry.chunk_blocks) * self.geometry.chunk_blocks


def _keys(batch: Batch, choice: Choice | None, scoring: Scoring | None) -> Iterator[ProgramKey]:
    """What tells the programs of a step from those of others: forward, pick and choose, pick and score."""
    size = batch.tokens.size
    yield _shape(batch)
    if choice is not None:
        yield size, choice.indices.size
        yield _shape(choice.options)
    if scoring is not None:
        yield size, scoring.indices.size
        yield scoring.indices.size, "scored", scoring.num_logprobs


def _compile(program: Any, *arguments: Any) -> None:
    program.lower(*arguments).compile()


def _shape(tree: Any) -> ProgramKey:
    leaves, structure = jax.tree.flatten(tree)
    return structure, *(leaf.shape for leaf in leaves)


def count_blocks(budget: int, block_bytes: int, geometry: CacheGeometry) -> int:
    """Whole blocks in `budget` bytes. Raises ValueError if there is not even one."""
    if budget < block_bytes:
        raise ValueError(
            f"kv_cache_memory_bytes must hold at least one block of {geometry.block_size} tokens "
            f"({block_bytes} bytes per device), but is {budget}; use {block_bytes} or a smaller block_size"
        )
    return budget // block_bytes


def overridden(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with entries replaced; a mapping changes only the entries it names."""
    merged = dict(config)
    for key, value in changes.items():
        old = merged.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            value = overridden(old, value)
        merged[key] = value
    return merged


def resolve_dtype(choice: str, config: ModelConfig) -> str:
    """The weights' dtype: the user's choice, or the checkpoint's with float16 read as bfloat16."""
    if choice != "auto":
        return choice
    return "float32" if config.dtype == "float32" else "bfloat16"


def _runtime(layout: Layout, engine: EngineConfig) -> Runtime:
    mesh = make_mesh(layout)
    return Runtime(
        place=Placement(mesh, Rules.for_attention(replicate_q=engine.dcp_replicate_q)),
        geometry=CacheGeometry(
            block_size=engine.block_size, dcp=layout.dcp, interleave=engine.cp_kv_cache_interleave_size
        ),
        dcp_comm_backend=engine.dcp_comm_backend,
        dcp_replicate_q=engine.dcp_replicate_q,
        dcp_overlap=engine.dcp_overlap,
        link=find_link(mesh, cache_folder()) if engine.dcp_comm_backend == "auto" else None,
    )
