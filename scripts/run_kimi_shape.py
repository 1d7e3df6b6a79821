"""Runs a model with Kimi-K2's widths, but only two layers, fewer experts and random weights, without accelerators.

    python scripts/run_kimi_shape.py --experts 128

Loads one dense layer and one layer with experts in bfloat16 on virtual CPU devices and decodes a few tokens. Prints the
memory of weights and cache, and the time. All 384 experts of one layer take 33.8 GB, 128 take 11.3 GB; the rest of the
model takes 6.4 GB.
"""

import argparse
import resource
import sys
import time

import jax

from dcpjax import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description="a model with Kimi-K2's widths, two layers and random weights")
    parser.add_argument("--experts", type=int, default=128, help="of the published 384 (default: 128)")
    parser.add_argument("--tp", type=int, default=8, help="tensor_parallel_size (default: 8)")
    parser.add_argument("--dcp", type=int, default=8, help="decode_context_parallel_size (default: 8)")
    parser.add_argument("--tokens", type=int, default=4, help="to decode (default: 4)")
    choice = parser.parse_args()
    started = time.monotonic()
    llm = LLM(
        "kimi-k2",
        load_format="dummy",
        hf_overrides={"num_hidden_layers": 2, "n_routed_experts": choice.experts},
        tensor_parallel_size=choice.tp,
        decode_context_parallel_size=choice.dcp,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        kv_cache_memory_bytes=16 * 2**20,
    )
    jax.block_until_ready(llm.runner.weights)
    loaded = time.monotonic() - started
    weights = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(llm.runner.weights))
    print(f"{llm!r}, {choice.experts} experts")
    print(f"weights: {weights / 1e9:.2f} GB per device, {loaded:.0f} s; peak memory {peak_gib():.1f} GiB", flush=True)
    for turn in ("first run, with compiling", "second run"):
        started = time.monotonic()
        (output,) = llm.generate([[1, 2, 3, 4]], SamplingParams(max_tokens=choice.tokens, temperature=0))
        seconds = time.monotonic() - started
        print(f"{turn}: tokens {output.outputs[0].token_ids} in {seconds:.1f} s; peak memory {peak_gib():.1f} GiB")


def peak_gib() -> float:
    """The largest memory this process has used."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


if __name__ == "__main__":
    main()
