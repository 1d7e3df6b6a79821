"""Times decode steps and prefill of a model on one layout after the other, as the engine runs them.

A step is a whole call of the `Runner`: laying out the batch, the model, choosing greedily, bringing the tokens back.
Programs are compiled and warm before the clock starts. Knows models and layouts; knows nothing about text or flags.
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
from dcpjax.api.outputs import RequestMetrics, counted
from dcpjax.api.sampling_params import SamplingParams
from dcpjax.checkpoint.model_config import read_model_config, resolve_dtype
from dcpjax.checkpoint.model_files import open_model
from dcpjax.engine.request import Request
from dcpjax.engine.scheduler import Scheduled
from dcpjax.models.config import ModelConfig
from dcpjax.models.kv_cache import CacheGeometry
from dcpjax.planning.sizes import block_bytes
from dcpjax.runtime.devices import ensure_devices
from dcpjax.runtime.runner import Runner
from dcpjax.sharding.mesh import Layout, check_layout

WARM_UP, PROMPTS = 2, 3  # steps that are not timed; prompts that are


@dataclass(frozen=True, kw_only=True)
class BenchSizes:
    """What is measured on each layout."""

    batch_sizes: tuple[int, ...]
    context_length: int  # tokens of each request
    steps: int  # timed


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Medians of one layout at one batch size."""

    tp: int
    dcp: int
    batch_size: int
    step_seconds: float
    prefill_tokens_per_second: float  # of one prompt that runs alone

    @property
    def tokens_per_second(self) -> float:
        return self.batch_size / self.step_seconds


@dataclass(frozen=True, kw_only=True)
class Bench:
    """All rows, and what they were measured on."""

    model: str
    machine: str
    dtype: str
    kv_cache_dtype: str
    sizes: BenchSizes
    rows: tuple[Measured, ...]  # layout after layout

    def ratios(self, row: Measured) -> tuple[float, float]:
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
) -> Bench:
    """Measure each layout in turn. Raises ValueError for an illegal one before any weight is read."""
    files = open_model(model)
    config = read_model_config(files.config, options.get("hf_overrides"))
    engines = [_engine(config, layout, sizes, options) for layout in layouts]
    ensure_devices(max(layout.devices for layout in layouts))
    runner, rows = None, []
    for engine in engines:
        del runner  # its weights go before the next layout's come
        runner = Runner(files, engine, progress=progress)
        rows += _measure(runner, sizes)
    assert runner is not None
    return Bench(
        model=model,
        machine=f"{counted(len(jax.devices()), f'{runner.platform} device')}, {counted(os.cpu_count() or 1, 'core')}, "
        f"jax {jax.__version__}",
        dtype=runner.dtype,
        kv_cache_dtype=runner.kv_dtype,
        sizes=sizes,
        rows=tuple(rows),
    )


def _engine(config: ModelConfig, layout: Layout, sizes: BenchSizes, options: dict[str, Any]) -> EngineConfig:
    """The user's options, with a cache that just holds the largest batch unless they say how large."""
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


def _measure(runner: Runner, sizes: BenchSizes) -> list[Measured]:
    rows = _rows(runner, sizes)
    prefill = _prefill(runner, rows[0])
    seconds = statistics.median(_timed(prefill, PROMPTS, warm_up=1))
    _share_prompt(runner, rows)
    return [
        Measured(
            tp=runner.layout.tp,
            dcp=runner.layout.dcp,
            batch_size=size,
            step_seconds=statistics.median(_timed(partial(_run, runner, rows[:size]), sizes.steps, warm_up=WARM_UP)),
            prefill_tokens_per_second=sizes.context_length / seconds,
        )
        for size in sizes.batch_sizes
    ]


def _rows(runner: Runner, sizes: BenchSizes) -> list[Scheduled]:
    """Requests of equal random prompts but for the last token, each about to compute that one, in blocks of its own."""
    drawn, length = np.random.default_rng(0), sizes.context_length
    prompt = drawn.integers(runner.config.vocab_size, size=length).tolist()
    blocks = runner.geometry.blocks(length)
    rows = []
    for number, last in enumerate(drawn.integers(runner.config.vocab_size, size=max(sizes.batch_sizes)).tolist()):
        tokens, greedy = [*prompt[:-1], last], SamplingParams(temperature=0)
        request = Request(number, tokens, greedy, 1, 0, frozenset(), RequestMetrics(0.0), seat=number)
        rows.append(Scheduled(request, length - 1, 1, list(range(number * blocks, (number + 1) * blocks)), True))
    return rows


def _prefill(runner: Runner, row: Scheduled) -> Callable[[], None]:
    """The whole prompt of one request, in chunks as the engine cuts them."""
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
    """Copy the cache of the first request into all others', a block of each at a time."""
    for index, source in enumerate(rows[0].block_table):
        _run(
            runner,
            [replace(row, copy=(source, row.block_table[index]) if row is not rows[0] else None) for row in rows],
        )


def _run(runner: Runner, step: Sequence[Scheduled]) -> None:
    runner.collect(runner.launch(step))


def _timed(call: Callable[[], None], times: int, *, warm_up: int) -> list[float]:
    """Seconds of each call after the first few."""
    seconds = []
    for _ in range(warm_up + times):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return seconds[warm_up:]
