"""What paging and mixed lengths cost: decode steps of the same number of live tokens, in tidy order and out of it.

    python scripts/bench_lengths.py --model smollm2-135m --batch 8 32 --context 512 --dtype bfloat16

Tidy: all requests equally long, the blocks of each side by side. Mixed: lengths between an eighth and nearly twice
the mean, the same sum, blocks scattered over the whole cache. Both alternate in one process; 1.00 is no cost at all.
"""

import argparse
import random
import statistics

import jax
from bench_decode import Step, alternate, greedy_request, machine, make_runner, spread

from dcpjax.checkpoint.model_files import open_model
from dcpjax.engine.scheduler import Scheduled
from dcpjax.runtime.runner import Runner


def main() -> None:
    options = _options()
    files = open_model(options.model)
    print(f"{machine()}; jax {jax.__version__}; context {options.context} in the mean")
    print("dtype     batch | tidy ms  [10%-90%] | mixed ms  [10%-90%] | tidy / mixed")
    for dtype in options.dtype:
        for batch in options.batch:
            runner = make_runner(files, dtype, batch, 2 * options.context)
            lengths = mixed_lengths(batch, options.context)
            sides = [step(runner, [options.context] * batch), step(runner, lengths, shuffled=True)]
            tidy, mixed = alternate(sides, options.rounds)
            ratio = statistics.median(tidy) / statistics.median(mixed)
            print(f"{dtype:9} {batch:5} | {_cell(tidy)} | {_cell(mixed)} | {ratio:.2f}", flush=True)


def mixed_lengths(batch: int, mean: int) -> list[int]:
    """`batch` lengths that add up to `batch` x `mean`: each pair is a short one and what it leaves for the other."""
    dice = random.Random(batch)
    short = [dice.randint(mean // 8, mean) for _ in range(batch // 2)]
    pairs = [length for each in short for length in (each, 2 * mean - each)]
    return pairs + [mean] * (batch % 2)


def step(runner: Runner, lengths: list[int], *, shuffled: bool = False) -> Step:
    """One decode step in which each request has so many tokens."""
    blocks = list(range(runner.sizes.num_blocks))
    if shuffled:
        random.Random(0).shuffle(blocks)
    scheduled = []
    for row, length in enumerate(lengths):
        count = runner.geometry.blocks(length)
        own, blocks = blocks[:count], blocks[count:]
        scheduled.append(Scheduled(greedy_request(row, length), length - 1, 1, own, True))
    return lambda: runner.collect(runner.launch(scheduled)) and None


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
