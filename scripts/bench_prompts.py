"""What a prompt costs in several layouts of the same devices: time to its first token.

    python scripts/bench_prompts.py --layouts 8,1 1,8 --prompts 4096 16384

Small models with dummy weights (MLA, and GQA with two KV heads) run on this machine's devices, on CPU virtual ones.
For each model and prompt the layouts alternate. Prints for each layout the median time with its 10th and 90th
percentile and the ratio of medians to the first layout. "queries" after a layout: the queries of prompts are gathered
instead of the keys, whatever is cheaper.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace

import jax
from bench_trace import SHAPES
from measuring import alternate, layout, machine, spread

from dcpjax import LLM, SamplingParams


def main() -> None:
    options = _options()
    print(f"{machine()}; jax {jax.__version__}")
    print(
        f"{options.layers} layers, chunks of at most {options.max_num_batched_tokens} tokens, {options.rounds} rounds"
    )
    print("model prompt | tp x dcp         |      ms  [10%-90%]   ratio")
    for kind in options.models:
        for tokens in options.prompts:
            compare(kind, tokens, options)


def compare(kind: str, tokens: int, options: argparse.Namespace) -> None:
    """One line for each layout."""
    sides = [(tp, dcp, False) for tp, dcp in options.layouts]
    if options.queries:
        sides += [(tp, dcp, True) for tp, dcp in options.layouts if dcp > 1]
    calls = [_call(kind, tokens, *side, options) for side in sides]
    times = alternate(calls, options.rounds, calls=1, warm_up=1)
    medians = [statistics.median(taken) for taken in times]
    for (tp, dcp, queries), taken, median in zip(sides, times, medians, strict=True):
        name = f"{tp:2} x {dcp:<3}" + (" queries" if queries else "")
        print(
            f"{kind:5} {tokens:6} | {name:16} | {median * 1e3:7.0f}  {spread(taken):11} {median / medians[0]:5.2f}",
            flush=True,
        )


def _call(
    kind: str, tokens: int, tp: int, dcp: int, queries: bool, options: argparse.Namespace
) -> Callable[[], object]:
    preset, shape = SHAPES[kind]
    llm = LLM(
        preset,
        load_format="dummy",
        hf_overrides=shape | {"num_hidden_layers": options.layers, "dtype": "float32"},
        tensor_parallel_size=tp * dcp,
        decode_context_parallel_size=dcp,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_num_seqs=1,
        max_model_len=tokens + 256,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=2**26,
        progress=False,
    )
    if queries:
        llm.runner.shapes = replace(llm.runner.shapes, prompt_exchange=None)
    prompt = [3 + place % 4_000 for place in range(tokens)]
    return lambda: llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--layouts", type=layout, nargs="+", default=[(8, 1), (1, 8)], metavar="TP,DCP")
    parser.add_argument("--prompts", type=int, nargs="+", default=[4096, 16384], help="tokens")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--max-num-batched-tokens", type=int, default=1024)
    parser.add_argument("--queries", action="store_true", help="also measure gathered queries")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
