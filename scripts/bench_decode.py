"""Decode steps beside other runtimes: the same weights, batch and context, alternating in one process.

    python scripts/bench_decode.py --model smollm2-135m --batch 1 8 32 --context 512 --dtype float32 bfloat16

Prints for each dtype and batch the median time of a step in each runtime, its 10th and 90th percentile and tokens per
second. Ours is followed by the fraction of the machine's measured memory bandwidth that reading its weights and cache
takes, each other runtime by its time over ours.

transformers needs torch: pip install '.[gguf,reference]'. `--llama-cpp` adds llama.cpp: pip install llama-cpp-python,
and a model in a GGUF file. It reads the same values from a file written in the measured dtype; its cache is float16
where ours is bfloat16, which is the same number of bytes.
"""

import argparse
import os
import statistics

import jax
from measuring import alternate, heading, machine, row, seconds
from other_runtimes import add_options, check_options, make_runtimes, runtime_names, versions
from runner_steps import Step, decode_step, make_runner

from dcpjax.checkpoint.model_files import ModelFiles, open_model
from dcpjax.runtime.memory import block_bytes_per_device


def main() -> None:
    options = _options()
    files = open_model(options.model)
    bandwidth = measured_bandwidth()
    print(f"{machine()}, reads {bandwidth / 1e9:.1f} GB/s; {versions(options)}; context {options.context}")
    print(f"dtype     batch {heading(runtime_names(options), 'bandwidth')}")
    for dtype in options.dtype:
        others = make_runtimes(files, dtype, options)
        for batch in options.batch:
            ours, bytes_read = our_step(files, dtype, batch, options.context)
            times = alternate([ours, *(other.step(batch, options.context) for other in others)], options.rounds)
            share = bytes_read / statistics.median(times[0]) / bandwidth
            print(f"{dtype:9} {batch:5} {row(times, batch, share)}", flush=True)


def our_step(files: ModelFiles, dtype: str, batch: int, context: int) -> tuple[Step, int]:
    """A decode step of `batch` requests, and the bytes it has to read: the weights once and the live cache once."""
    runner = make_runner(files, dtype, batch, context)
    weights = sum(array.nbytes for array in jax.tree.leaves(runner.weights))
    cache = batch * context * block_bytes_per_device(runner.model) // runner.geometry.block_size
    return decode_step(runner, [context] * batch), weights + cache


def measured_bandwidth() -> float:
    """Bytes per second of the fastest of several sums over 1 GiB, on all cores."""
    data = jax.numpy.ones((os.cpu_count() or 1, 2**28 // (os.cpu_count() or 1)), jax.numpy.float32)
    total = jax.jit(lambda x: x.sum(axis=1))
    total(data).block_until_ready()
    best = min(seconds(lambda: total(data).block_until_ready()) for _ in range(7))
    return data.nbytes / best


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=512)
    return check_options(parser, parser.parse_args())


if __name__ == "__main__":
    main()
