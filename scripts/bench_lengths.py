"""The cost of paging and mixed lengths: decode steps with the same number of cached tokens, arranged in two ways.

    python scripts/bench_lengths.py --model smollm2-135m --batch 8 32 --context 512 --dtype bfloat16

Equal: all requests have the same length and consecutive blocks. Mixed: lengths between an eighth of the mean and nearly
twice the mean, with the same sum, and blocks scattered over the whole cache. Both alternate in one process. Prints the
median step of each with its 10th and 90th percentile, and equal / mixed; a ratio of 1.00 means no cost.
"""

import argparse
import random
import statistics

import jax
from measuring import alternate, machine, spread
from runner_steps import decode_step, make_runner

from dcpjax.checkpoint.model_files import open_model


def main() -> None:
    options = _options()
    files = open_model(options.model)
    print(f"{machine()}; jax {jax.__version__}; mean context {options.context}")
    print("dtype     batch | equal ms  [10%-90%] | mixed ms  [10%-90%] | equal / mixed")
    for dtype in options.dtype:
        for batch in options.batch:
            runner = make_runner(files, dtype, batch, 2 * options.context)
            scattered = list(range(runner.sizes.num_blocks))
            random.Random(0).shuffle(scattered)
            sides = [
                decode_step(runner, [options.context] * batch),
                decode_step(runner, mixed_lengths(batch, options.context), scattered),
            ]
            equal, mixed = alternate(sides, options.rounds)
            ratio = statistics.median(equal) / statistics.median(mixed)
            print(f"{dtype:9} {batch:5} | {_cell(equal)} | {_cell(mixed)} | {ratio:.2f}", flush=True)


def mixed_lengths(batch: int, mean: int) -> list[int]:
    """`batch` lengths with the given mean, in pairs of a short length and 2 * mean minus it."""
    dice = random.Random(batch)
    short = [dice.randint(mean // 8, mean) for _ in range(batch // 2)]
    pairs = [length for each in short for length in (each, 2 * mean - each)]
    return pairs + [mean] * (batch % 2)


def _cell(times: list[float]) -> str:
    return f"{statistics.median(times) * 1e3:7.1f}  {spread(times)}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=10)
    return parser.parse_args()


if __name__ == "__main__":
    main()
