"""Throughput of layouts that have the same bytes of KV cache per device, at rising concurrency.

    python scripts/bench_capacity.py TRACE.jsonl --concurrency 1 8 --kv-cache-memory-bytes 6MiB

TRACE is a Mooncake file, replayed as by `bench_trace.py`. Without one, synthetic agents run; each agent sends its long
history again with every turn. A layout whose cache holds fewer tokens runs fewer requests at once, preempts more, and
evicts histories before they return. Prompts should be longer than a chunk of attention on every rank (128 slots x
dcp); with shorter prompts the ranks have little work to share.

Small models with dummy weights run on this machine's devices, on CPU virtual ones. Prints for each concurrency and
layout: tokens per second, prefix hit rate, cache usage, gaps between tokens and preemptions. The layouts alternate
`--rounds` times; ratios are to the first layout in the same round, median [lowest - highest].
"""

import argparse
import random
import statistics
from collections.abc import Sequence

import jax
from bench_trace import SHAPES, Replay, run
from measuring import byte_count, layout, machine, percentile

from dcpjax import LLM
from dcpjax.simulation.trace import MOONCAKE_TOKENS_PER_HASH, TraceRequest, read_trace, scaled

# No limit: otherwise a layout that has to compute evicted histories again would also be slowed by the limit on
# prefill beside decodes.
NO_PREFILL_LIMIT = 10**9


def main() -> None:
    options = _options()
    trace = read_trace(options.trace, options.limit) if options.trace else agents(options.limit, options.turns, seed=0)
    requests = scaled(trace, options.scale)
    lengths = [request.input_length for request in requests]
    print(f"{machine()}; jax {jax.__version__}")
    print(
        f"{options.model}, {len(requests)} requests of {min(lengths)} .. {max(lengths)} tokens (median "
        f"{int(statistics.median(lengths))}), {options.kv_cache_memory_bytes:,} bytes of cache per device"
    )
    print(
        "requests | tp x dcp | cache, tokens | tokens/s  ratio  [range]     | hit rate | cache use | running | "
        "gap ms  p50  ratio    p99 | preempted"
    )
    for concurrency in options.concurrency:
        llms = [make_llm(tp, dcp, concurrency, options) for tp, dcp in options.layouts]
        for llm in llms:
            run(llm, requests)  # compiles what the trace needs, at every number of running requests
        rounds = [[run(llm, requests) for llm in llms] for _ in range(options.rounds)]
        first, *_ = sides = list(zip(*rounds, strict=True))
        for shape, llm, replays in zip(options.layouts, llms, sides, strict=True):
            print(_row(llm, concurrency, shape, replays, first), flush=True)


def agents(count: int, turns: int, seed: int) -> list[TraceRequest]:
    """`count` requests of agents with a history of 16K to 64K tokens that grows by 1K to 2K with each turn.

    All agents send their first turn, then all their second, and so on.
    """
    draw = random.Random(seed)
    hashes = iter(range(10**9))
    lengths = [int(16384 * 4 ** draw.random()) for _ in range(-(-count // turns))]
    histories: list[list[int]] = [[] for _ in lengths]
    requests = []
    for _ in range(turns):
        for agent, history in enumerate(histories):
            history.extend(next(hashes) for _ in range(lengths[agent] // MOONCAKE_TOKENS_PER_HASH - len(history)))
            requests.append(
                TraceRequest(
                    timestamp=0.0,
                    input_length=len(history) * MOONCAKE_TOKENS_PER_HASH,
                    output_length=draw.randrange(256, 1024),
                    hash_ids=tuple(history),
                )
            )
            lengths[agent] += draw.randrange(1024, 2048)
    return requests[:count]


def make_llm(tp: int, dcp: int, concurrency: int, options: argparse.Namespace) -> LLM:
    preset, shape = SHAPES[options.model]
    return LLM(
        preset,
        load_format="dummy",
        hf_overrides=shape | {"num_hidden_layers": options.layers, "dtype": "float32"},
        tensor_parallel_size=tp * dcp,
        decode_context_parallel_size=dcp,
        block_size=options.block_size,
        kv_cache_memory_bytes=options.kv_cache_memory_bytes,
        max_num_seqs=concurrency,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_mixed_prefill_tokens=NO_PREFILL_LIMIT,
        progress=False,
    )


def _row(
    llm: LLM, concurrency: int, layout: tuple[int, int], replays: Sequence[Replay], first: Sequence[Replay]
) -> str:
    tokens = llm.runner.sizes.num_blocks * llm.runner.geometry.block_size
    rates = [replay.generated / replay.seconds for replay in replays]
    ratios = [rate * base.seconds / base.generated for rate, base in zip(rates, first, strict=True)]
    spread = f"[{min(ratios):.2f}-{max(ratios):.2f}]"
    usage, running = statistics.mean(_pooled(replays, "cache_usage")), statistics.mean(_pooled(replays, "running"))
    gaps, first_gaps = _pooled(replays, "gaps"), _pooled(first, "gaps")
    gap = percentile(gaps, 50)
    return (
        f"{concurrency:8} | {layout[0]:2} x {layout[1]:<3} | {tokens:13,} | "
        f"{statistics.median(rates):8.1f}  {statistics.median(ratios):4.2f}x  {spread:11} | "
        f"{statistics.median(replay.hit_rate for replay in replays):8.0%} | "
        f"{usage:9.0%} | {running:7.1f} | "
        f"{gap * 1e3:11.1f}  {gap / percentile(first_gaps, 50):4.2f}x {percentile(gaps, 99) * 1e3:6.1f} | "
        f"{llm.stats().preemptions:9}"
    )


def _pooled(replays: Sequence[Replay], field: str) -> list[float]:
    """The values of a list field of all replays together."""
    return [value for replay in replays for value in getattr(replay, field)]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="?", help="a Mooncake file; without one synthetic agents run")
    parser.add_argument("--model", choices=SHAPES, default="mla")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--layouts", type=layout, nargs="+", default=[(8, 1), (1, 8)], metavar="TP,DCP")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--scale", type=int, default=16, help="divides every length of the trace")
    parser.add_argument("--limit", type=int, default=32, help="number of requests")
    parser.add_argument("--turns", type=int, default=4, help="of each synthetic agent; with 1 no history returns")
    parser.add_argument("--block-size", type=int, default=256)
    parser.add_argument("--kv-cache-memory-bytes", type=byte_count, default=byte_count("6MiB"), metavar="BYTES")
    parser.add_argument("--max-num-batched-tokens", type=int, default=256)
    return parser.parse_args()


if __name__ == "__main__":
    main()
