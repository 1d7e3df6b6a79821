"""Decode steps beside transformers: the same weights, batch and context, alternating in one process.

    python scripts/bench_decode.py --model smollm2-135m --batch 1 8 32 --context 512 --dtype float32 bfloat16

Prints, per dtype and batch, the median step of each side, their ratio, tokens per second, and which fraction of
the machine's measured memory bandwidth the bytes of our step need. Needs torch: pip install '.[gguf,reference]'.
"""

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from dcpjax.config import EngineConfig
from dcpjax.model_files import ModelFiles, open_model
from dcpjax.outputs import RequestMetrics
from dcpjax.request import Request
from dcpjax.runner import Runner
from dcpjax.sampling_params import SamplingParams
from dcpjax.scheduler import Scheduled

Step = Callable[[], None]


def main() -> None:
    options = _options()
    files = open_model(options.model)
    bandwidth = measured_bandwidth()
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
        f"reads {bandwidth / 1e9:.1f} GB/s; jax {jax.__version__}, context {options.context}"
    )
    print("dtype     batch | ours ms  [spread]  tok/s  bandwidth | transformers ms  [spread]  tok/s | ratio")
    for dtype in options.dtype:
        reference = None if options.alone else Reference(files, dtype)
        for batch in options.batch:
            ours, bytes_read = our_step(files, dtype, batch, options.context)
            theirs = reference.step(batch, options.context) if reference else None
            times = alternate([ours, *([theirs] if theirs else [])], options.rounds)
            print(_row(dtype, batch, times, bytes_read, bandwidth))


def our_step(files: ModelFiles, dtype: str, batch: int, context: int) -> tuple[Step, int]:
    """One decode step at this context, and the bytes it has to read: weights once, live cache once."""
    options = {"dtype": dtype, "max_num_seqs": batch}
    options["kv_cache_memory_bytes"] = _cache_bytes(files, dtype, batch, context)
    config = EngineConfig.from_options(options)
    runner = Runner(files, config)
    blocks = runner.geometry.blocks(context)
    step = [
        Scheduled(_request(row, context), context - 1, 1, list(range(row * blocks, (row + 1) * blocks)), True)
        for row in range(batch)
    ]
    weights = sum(array.nbytes for array in jax.tree.leaves(runner.weights))
    cache = batch * context * runner.block_bytes_per_device() // runner.geometry.block_size
    return lambda: runner.collect(runner.launch(step)) and None, weights + cache


def _cache_bytes(files: ModelFiles, dtype: str, batch: int, context: int) -> int:
    config = files.config
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    values = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim
    return values * (4 if dtype == "float32" else 2) * batch * (context + 256)


def _request(number: int, context: int) -> Request:
    greedy = SamplingParams(temperature=0)
    return Request(number, [1] * context, greedy, 1, 0, frozenset(), RequestMetrics(0.0))


class Reference:
    """transformers' model of the same weights with a static cache."""

    def __init__(self, files: ModelFiles, dtype: str) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        self.torch = torch
        source = files.tensors()
        self.model: Any = LlamaForCausalLM(LlamaConfig(**files.config))
        state = {
            name: torch.from_numpy(np.array(source.read(name, (slice(None),) * len(source.shape(name))), np.float32))
            for name in source.names()
        }
        self.model.load_state_dict(state, strict=False)
        self.model.tie_weights()
        self.model.to(getattr(torch, dtype)).eval()

    def step(self, batch: int, context: int) -> Step:
        from transformers import StaticCache

        cache = StaticCache(config=self.model.config, max_cache_len=context)
        prompt = self.torch.ones((batch, context - 1), dtype=self.torch.long)
        token = prompt[:, :1]
        position = self.torch.full((batch, 1), context - 1)
        with self.torch.inference_mode():
            self.model(input_ids=prompt, cache=cache, use_cache=True)

        def run() -> None:
            with self.torch.inference_mode():
                _rewind(cache, context - 1)
                scores = self.model(input_ids=token, cache=cache, position_ids=position, use_cache=True).logits[:, -1]
                scores.argmax(-1).tolist()

        return run


def _rewind(cache: Any, length: int) -> None:
    """Let the next token overwrite the last one, so that every step is at the same context."""
    for layer in cache.layers:
        layer.cumulative_length.fill_(length) if hasattr(layer.cumulative_length, "fill_") else setattr(
            layer, "cumulative_length", length
        )


def alternate(steps: Sequence[Step], rounds: int) -> list[list[float]]:
    """Seconds per call of each side, in alternating rounds of five calls after a warm-up."""
    times: list[list[float]] = [[] for _ in steps]
    for step in steps:
        for _ in range(3):
            step()
    for _ in range(rounds):
        for side, step in zip(times, steps, strict=True):
            for _ in range(5):
                start = time.perf_counter()
                step()
                side.append(time.perf_counter() - start)
    return times


def measured_bandwidth() -> float:
    """Bytes per second of the best of several sums over 1 GiB, on all cores."""
    data = jax.numpy.ones((os.cpu_count() or 1, 2**28 // (os.cpu_count() or 1)), jax.numpy.float32)
    total = jax.jit(lambda x: x.sum(axis=1))
    total(data).block_until_ready()
    best = min(_seconds(lambda: total(data).block_until_ready()) for _ in range(7))
    return data.nbytes / best


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _row(dtype: str, batch: int, times: list[list[float]], bytes_read: int, bandwidth: float) -> str:
    ours = statistics.median(times[0])
    row = (
        f"{dtype:9} {batch:5} | {ours * 1e3:7.1f}  {_spread(times[0])} {batch / ours:6.0f} "
        f"{bytes_read / ours / bandwidth:9.0%} |"
    )
    if len(times) == 1:
        return row
    theirs = statistics.median(times[1])
    return f"{row} {theirs * 1e3:15.1f}  {_spread(times[1])} {batch / theirs:6.0f} | {theirs / ours:.2f}"


def _spread(times: list[float]) -> str:
    low, high = np.percentile(times, [10, 90]) * 1e3
    return f"[{low:.0f}-{high:.0f}]"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--alone", action="store_true", help="time our side only; needs no torch")
    return parser.parse_args()


if __name__ == "__main__":
    main()
