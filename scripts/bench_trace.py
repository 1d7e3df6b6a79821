"""Replays recorded traffic on the real engine in several layouts that have the same bytes of KV cache per device.

    python scripts/bench_trace.py TRACE.jsonl --layouts 8,1 1,8 --scale 32 --limit 200 --kv-cache-memory-bytes 4MiB

TRACE is a Mooncake file: the lengths of prompts and answers, and hash ids that are equal where prompts share a prefix.
Lengths are divided by `--scale`; synthetic prompts share prefixes as the trace says. All requests are submitted at once
and at most `--max-num-seqs` run at a time; how many do depends on the cache. Without `--model` a small model with dummy
weights runs (`--preset`) with `--layers` layers.

Prints for each layout: tokens per second, prefix hit rate, cache usage, time to the first token, gaps between tokens,
and preemptions.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from measuring import byte_count, layout, machine, percentile

from dcpjax import LLM, SamplingParams
from dcpjax.simulation.trace import TraceRequest, ideal_hit_rate, read_trace, scaled, synthesise

TINY_MLA = {  # DeepSeek's architecture with small sizes: one latent for all heads
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 96,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": None,
    "first_k_dense_replace": 2,
    "vocab_size": 4096,
}
TINY_GQA = {  # Llama's architecture with small sizes and two KV heads
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 4096,
}
SHAPES = {"mla": ("deepseek-v3", TINY_MLA), "gqa": ("llama-3.1-8b", TINY_GQA)}


@dataclass
class Replay:
    """The measurements of one replay of the trace."""

    seconds: float
    generated: int
    prompt: int
    hit_rate: float
    cache_usage: list[float]  # at each step
    running: list[int]  # at each step
    first_token: list[float]  # seconds from the start of the replay to each request's first token
    gaps: list[float]  # seconds between tokens of a request


def main() -> None:
    options = _options()
    requests = scaled(read_trace(options.trace, options.limit), options.scale)
    print(f"{machine()}; jax {jax.__version__}")
    print(
        f"{len(requests)} requests, prompts of {_spread([r.input_length for r in requests])} tokens, answers of "
        f"{_spread([r.output_length for r in requests])}; an unlimited cache would hit {_ideal(requests, options):.0%}"
    )
    print(
        " tp x dcp | cache, tokens | tokens/s | vs first | hit rate | cache use | running | first token s  p50  p99 "
        "| gap ms  p50  p99 | preempted"
    )
    first: Replay | None = None
    for tp, dcp in options.layouts:
        llm = _llm(options, tp, dcp)
        _warm_up(llm, requests, options)
        replay = run(llm, requests)
        first = first or replay
        print(_row(llm, tp, dcp, replay, first), flush=True)


def run(llm: LLM, requests: Sequence[TraceRequest]) -> Replay:
    """Run all requests to their end; each generates exactly the trace's number of tokens."""
    vocab = llm.runner.model.config.vocab_size
    prompts = [synthesise(request, vocab) for request in requests]
    params = [SamplingParams(temperature=0, max_tokens=r.output_length, ignore_eos=True) for r in requests]
    llm.reset_prefix_cache()
    before, usage, running = llm.stats(), [], []
    moments: dict[int, list[float]] = {index: [] for index in range(len(requests))}
    started = time.perf_counter()
    for event in llm.stream(prompts, params):
        moments[event.prompt_index].append(time.perf_counter())
        now = llm.engine.scheduler
        usage.append(llm.engine.blocks.num_used / llm.engine.blocks.num_blocks)
        running.append(len(now.running))
    seconds, after = time.perf_counter() - started, llm.stats()
    queries = after.prefix_queries - before.prefix_queries
    return Replay(
        seconds=seconds,
        generated=after.generated_tokens - before.generated_tokens,
        prompt=after.prompt_tokens - before.prompt_tokens,
        hit_rate=(after.prefix_hits - before.prefix_hits) / max(1, queries),
        cache_usage=usage,
        running=running,
        first_token=[times[0] - started for times in moments.values() if times],
        gaps=[gap for times in moments.values() for gap in np.diff(times)],
    )


def _warm_up(llm: LLM, requests: Sequence[TraceRequest], options: argparse.Namespace) -> None:
    """Compile the programs of the replay, by running the first requests of the trace."""
    run(llm, requests[: 2 * options.max_num_seqs])


def _llm(options: argparse.Namespace, tp: int, dcp: int) -> LLM:
    preset, shape = SHAPES[options.preset]
    model: dict[str, Any] = {"model": options.model} if options.model else {"model": preset, "load_format": "dummy"}
    if not options.model:
        model["hf_overrides"] = shape | {"num_hidden_layers": options.layers, "dtype": "float32"}
    return LLM(
        **model,
        tensor_parallel_size=tp * dcp,
        decode_context_parallel_size=dcp,
        block_size=options.block_size,
        kv_cache_memory_bytes=options.kv_cache_memory_bytes,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        progress=False,
    )


def _row(llm: LLM, tp: int, dcp: int, replay: Replay, first: Replay) -> str:
    tokens = llm.runner.sizes.num_blocks * llm.runner.geometry.block_size
    rate, base = replay.generated / replay.seconds, first.generated / first.seconds
    gaps = [gap * 1e3 for gap in replay.gaps]
    first_token, gap = ([percentile(values, percent) for percent in (50, 99)] for values in (replay.first_token, gaps))
    return (
        f" {tp:2} x {dcp:<3} | {tokens:13,} | {rate:8.1f} | {rate / base:7.2f}x | {replay.hit_rate:8.0%} | "
        f"{statistics.mean(replay.cache_usage):9.0%} | {statistics.mean(replay.running):7.1f} | "
        f"{first_token[0]:18.2f} {first_token[1]:5.2f} | {gap[0]:12.1f} {gap[1]:5.1f} | "
        f"{llm.stats().preemptions}"
    )


def _spread(lengths: Sequence[int]) -> str:
    return f"{min(lengths)} .. {max(lengths)} (median {int(statistics.median(lengths))})"


def _ideal(requests: Sequence[TraceRequest], options: argparse.Namespace) -> float:
    return ideal_hit_rate(requests, options.block_size)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", help="a Mooncake file")
    parser.add_argument("--model", help="a folder, alias or hub id; without it the dummy model of --preset runs")
    parser.add_argument("--preset", choices=SHAPES, default="mla")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--layouts", type=layout, nargs="+", default=[(8, 1), (1, 8)], metavar="TP,DCP")
    parser.add_argument("--scale", type=int, default=32, help="divides every length and the 512 tokens of a hash id")
    parser.add_argument("--limit", type=int, default=100, help="number of requests")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--kv-cache-memory-bytes", type=byte_count, default=byte_count("4MiB"), metavar="BYTES")
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--max-num-batched-tokens", type=int, default=256)
    return parser.parse_args()


if __name__ == "__main__":
    main()
