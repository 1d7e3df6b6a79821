"""Measures decode steps and prefill of a model on one layout after the other.

A timed step is a whole call of the `Runner`: building the batch, the model, greedy sampling, and copying the tokens to
the host. Programs are compiled and have run before the clock starts.
"""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from dcpjax.api.config import EngineConfig
from dcpjax.api.outputs import counted
from dcpjax.api.sampling_params import SamplingParams
from dcpjax.checkpoint.model_config import read_model_config, resolve_dtype
from dcpjax.checkpoint.model_files import open_model
from dcpjax.engine.request import Request
from dcpjax.engine.scheduler import Scheduled
from dcpjax.models.config import ModelConfig
from dcpjax.models.kv_cache import CacheGeometry
from dcpjax.planning.sizes import block_bytes
from dcpjax.runtime.devices import ensure_devices
from dcpjax.runtime.runner import Runner, load_runner
from dcpjax.sharding.mesh import Layout, check_layout

WARM_UP = 2  # steps that run before the timed ones
PROMPTS = 3  # prompts that are timed


@dataclass(frozen=True, kw_only=True)
class BenchSizes:
    """What is measured on each layout."""

    batch_sizes: tuple[int, ...]
    context_length: int  # tokens of each request
    steps: int  # timed


@dataclass(frozen=True, kw_only=True)
class BenchRow:
    """Medians for one layout and batch size."""

    tp: int
    dcp: int
    batch_size: int
    step_seconds: float
    prefill_tokens_per_second: float  # of a single prompt

    @property
    def tokens_per_second(self) -> float:
        return self.batch_size / self.step_seconds


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """The rows of all layouts, and what they were measured on."""

    model: str
    machine: str
    dtype: str
    kv_cache_dtype: str
    sizes: BenchSizes
    rows: tuple[BenchRow, ...]  # layout after layout

    def ratios(self, row: BenchRow) -> tuple[float, float]:
        """Decode and prefill speed over the first layout's, at the same batch size."""
        first = next(one for one in self.rows if one.batch_size == row.batch_size)
        return (
            row.tokens_per_second / first.tokens_per_second,
            row.prefill_tokens_per_second / first.prefill_tokens_per_second,
        )

    def to_dict(self) -> dict[str, Any]:
        rows = [
            asdict(row)
            | {"tokens_per_second": row.tokens_per_second}
            | dict(zip(("decode_ratio", "prefill_ratio"), self.ratios(row), strict=True))
            for row in self.rows
        ]
        return asdict(self) | {"rows": rows}


def bench(
    model: str, layouts: Sequence[Layout], sizes: BenchSizes, options: dict[str, Any], *, progress: bool = False
) -> BenchResult:
    """Measure each layout in turn; `options` are those of `EngineConfig`.

    Raises ValueError for an illegal layout before any weight is read.
    """
    files = open_model(model)
    config = read_model_config(files.config, options.get("hf_overrides"))
    engines = [_engine(config, layout, sizes, options) for layout in layouts]
    ensure_devices(max(layout.devices for layout in layouts))
    runner, rows = None, []
    for engine in engines:
        del runner  # frees its weights before the next layout allocates its own
        runner = load_runner(files, engine, progress=progress)
        rows += _measure(runner, sizes)
    assert runner is not None
    return BenchResult(
        model=model,
        machine=f"{counted(len(jax.devices()), f'{runner.model.platform} device')}, "
        f"{counted(os.cpu_count() or 1, 'core')}, jax {jax.__version__}",
        dtype=runner.model.dtype,
        kv_cache_dtype=runner.model.kv_dtype,
        sizes=sizes,
        rows=tuple(rows),
    )


def _engine(config: ModelConfig, layout: Layout, sizes: BenchSizes, options: dict[str, Any]) -> EngineConfig:
    """The options of one layout. Unless they name a cache size, the cache just holds the largest batch."""
    check_layout(layout, config.num_heads, config.cache_heads, whole_heads=config.mla is not None)
    if sizes.context_length > config.max_position_embeddings:
        raise ValueError(
            f"context_length must be at most the model's {config.max_position_embeddings} positions, but is "
            f"{sizes.context_length}; use {config.max_position_embeddings}"
        )
    engine = EngineConfig.from_options(
        options
        | {
            "tensor_parallel_size": layout.tensor_parallel_size,
            "decode_context_parallel_size": layout.decode_context_parallel_size,
            "max_num_seqs": max(sizes.batch_sizes),
        }
    )
    geometry = CacheGeometry(block_size=engine.block_size, dcp=layout.dcp)
    kv_dtype = resolve_dtype(engine.dtype, config) if engine.kv_cache_dtype == "auto" else engine.kv_cache_dtype
    blocks = max(sizes.batch_sizes) * geometry.blocks(sizes.context_length)
    needed = blocks * block_bytes(config, layout, engine.block_size, kv_dtype)
    if engine.kv_cache_memory_bytes is None:
        return replace(engine, kv_cache_memory_bytes=needed)
    if engine.kv_cache_memory_bytes < needed:
        raise ValueError(
            f"kv_cache_memory_bytes must hold {max(sizes.batch_sizes)} requests of {sizes.context_length} tokens "
            f"({needed} bytes per device), but is {engine.kv_cache_memory_bytes}; use {needed}"
        )
    return engine


def _measure(runner: Runner, sizes: BenchSizes) -> list[BenchRow]:
    rows = _rows(runner, sizes)
    prefill = _prefill(runner, rows[0])
    seconds = statistics.median(_timed(prefill, PROMPTS, warm_up=1))
    _share_prompt(runner, rows)
    return [
        BenchRow(
            tp=runner.model.layout.tp,
            dcp=runner.model.layout.dcp,
            batch_size=size,
            step_seconds=statistics.median(_timed(partial(_run, runner, rows[:size]), sizes.steps, warm_up=WARM_UP)),
            prefill_tokens_per_second=sizes.context_length / seconds,
        )
        for size in sizes.batch_sizes
    ]


def _rows(runner: Runner, sizes: BenchSizes) -> list[Scheduled]:
    """One decode step per request: random prompts that differ in the last token only, each in blocks of its own."""
    random, length = np.random.default_rng(0), sizes.context_length
    vocab_size = runner.model.config.vocab_size
    prompt = random.integers(vocab_size, size=length).tolist()
    blocks = runner.geometry.blocks(length)
    rows = []
    for number, last in enumerate(random.integers(vocab_size, size=max(sizes.batch_sizes)).tolist()):
        tokens, greedy = [*prompt[:-1], last], SamplingParams(temperature=0)
        request = Request(number=number, prompt_token_ids=tokens, params=greedy, max_tokens=1, seat=number)
        rows.append(Scheduled(request, length - 1, 1, list(range(number * blocks, (number + 1) * blocks)), True))
    return rows


def _prefill(runner: Runner, row: Scheduled) -> Callable[[], None]:
    """A function that computes the whole prompt of one request, in the same chunks as the engine."""
    length, most = len(row.request.prompt_token_ids), runner.sizes.limits.max_num_batched_tokens
    chunks = [
        replace(row, start=start, count=min(most, length - start), samples=start + most >= length)
        for start in range(0, length, most)
    ]

    def run() -> None:
        for chunk in chunks:
            _run(runner, [chunk])

    return run


def _share_prompt(runner: Runner, rows: Sequence[Scheduled]) -> None:
    """Copy the cache of the first request to all others, one block of each per step."""
    for index, source in enumerate(rows[0].block_table):
        _run(
            runner,
            [replace(row, copy=(source, row.block_table[index]) if row is not rows[0] else None) for row in rows],
        )


def _run(runner: Runner, step: Sequence[Scheduled]) -> None:
    runner.collect(runner.launch(step))


def _timed(call: Callable[[], None], times: int, *, warm_up: int) -> list[float]:
    """Seconds of each of `times` calls that follow `warm_up` untimed ones."""
    seconds = []
    for _ in range(warm_up + times):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return seconds[warm_up:]
