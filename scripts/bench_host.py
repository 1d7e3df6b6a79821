"""The host's time per step, measured on a mock device, and what `async_scheduling` and `num_decode_steps` save on the
real one.

    python scripts/bench_host.py --batch 1 8 32 --steps 200
    python scripts/bench_host.py --model smollm2-135m --batch 8

The first table runs the engine (scheduling, batch layout, collecting results) on a mock device that answers at once,
and prints microseconds per step. With `--model` a second table decodes on the real device, alternating between
`async_scheduling` off and on in one process, and prints milliseconds per token and their ratio; a third alternates
between one decode step per call and `--decode-steps`.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from measuring import machine, seconds

from dcpjax import LLM, SamplingParams
from dcpjax.engine.engine import Engine
from dcpjax.engine.request import Request
from dcpjax.engine.result import StepResult
from dcpjax.engine.scheduler import Scheduled, StepLimits
from dcpjax.models.kv_cache import CacheGeometry
from dcpjax.runtime.batch import ShapeBuckets, build
from dcpjax.runtime.logit_rows import SampledRows

VOCAB = 49152
TOKENS = 65  # of each request: one from the prompt, then whole calls of several steps


class InstantDevice:
    """A mock of the runner: lays out every batch as the real one does, then returns token 5 for every request."""

    compile_seconds = 0.0

    def __init__(self, batch: int, context: int) -> None:
        self.geometry = CacheGeometry(block_size=256)
        width = 2 * self.geometry.blocks(context)
        self.shapes = ShapeBuckets(max_rows=max(32, batch), max_tokens=512, table_width=width)

    def restrict(self, known: np.ndarray) -> None:
        """Token 5 is sampled whatever is known."""

    def launch(self, step: Sequence[Scheduled]) -> int:
        SampledRows.of(step, build(step, self.shapes, self.geometry), self.shapes, VOCAB)
        return len(step)

    def collect(self, launched: int) -> StepResult:
        return StepResult([5] * launched, [True] * launched)

    def restore_cache(self) -> bool:
        return False


def main() -> None:
    options = _options()
    print(f"{machine()}; jax {jax.__version__}")
    print("host alone, context 512   batch | us per step, median  [fastest .. slowest tenth]")
    for sampling in ("greedy", "random"):
        for batch in options.batch:
            times = host_times(batch, options.steps, sampling)
            low, middle, high = (float(np.quantile(times, share)) * 1e6 for share in (0.0, 0.5, 0.9))
            print(f"{sampling:25} {batch:5} | {middle:8.0f}  [{low:.0f} .. {high:.0f}]")
    if options.model:
        llm = LLM(
            options.model,
            max_num_seqs=max(options.batch),
            max_model_len=512,
            num_decode_steps=options.decode_steps,
            progress=False,
        )
        _compare_scheduling(llm, options)
        _compare_steps(llm, options)


def host_times(batch: int, steps: int, sampling: str, context: int = 512) -> list[float]:
    """Seconds of each decode step of the engine on the mock device."""
    engine = Engine(
        InstantDevice(batch, context + steps),
        num_blocks=batch * (2 + (context + steps) // 256),
        limits=StepLimits(max_num_seqs=batch, max_num_batched_tokens=512 * batch),
    )
    params = SamplingParams(temperature=0) if sampling == "greedy" else SamplingParams(temperature=0.8, top_p=0.9)
    for number in range(batch):
        prompt = [(number * 7919 + place) % VOCAB for place in range(context)]
        engine.add(
            Request(
                number=number,
                prompt_token_ids=prompt,
                params=params,
                max_tokens=steps + 10,
                seed=number,
                end_token_ids=frozenset([2]),
            )
        )
    for _ in range(5):
        engine.step()
    return [seconds(engine.step) for _ in range(steps)]


def _compare_scheduling(llm: LLM, options: argparse.Namespace) -> None:
    """Decoding on the real device, where the next step is scheduled after (off) or while (on) the last one runs."""
    _set_decode_steps(llm, 1)
    print("real device               batch | off ms  | on ms   | ratio of times, off / on")

    def decode(ahead: bool, batch: int) -> float:
        llm.engine.async_scheduling = ahead
        return _decode(llm, batch, 24)

    for batch in options.batch:
        sides = [partial(decode, ahead, batch) for ahead in (False, True)]
        print(_row(llm, batch, [statistics.median(each) for each in _in_turn(sides, options.rounds)]))


def _compare_steps(llm: LLM, options: argparse.Namespace) -> None:
    """The same with one decode step per call, and with several."""
    most = options.decode_steps
    print(f"{most} decode steps per call   batch | 1 ms    | {most} ms    | ratio of times, 1 / {most}")

    def decode(steps: int, batch: int) -> float:
        _set_decode_steps(llm, steps)
        return seconds(lambda: llm.generate(_prompts(batch), _greedy(TOKENS), use_tqdm=False)) / TOKENS

    for batch in options.batch:
        sides = [partial(decode, steps, batch) for steps in (1, most)]
        print(_row(llm, batch, [statistics.median(each) for each in _in_turn(sides, options.rounds)]))


def _in_turn(sides: Sequence[Callable[[], float]], rounds: int) -> list[list[float]]:
    """What each side gives in every round but the first, in which programs compile."""
    found = [[side() for side in sides] for _ in range(rounds + 1)]
    return [list(times) for times in zip(*found[1:], strict=True)]


def _row(llm: LLM, batch: int, times: Sequence[float]) -> str:
    first, second = (time * 1e3 for time in times)
    return f"{llm.runner.model.dtype:25} {batch:5} | {first:7.3f} | {second:7.3f} | {first / second:.3f}"


def _set_decode_steps(llm: LLM, steps: int) -> None:
    scheduler = llm.engine.scheduler
    scheduler.limits = replace(scheduler.limits, num_decode_steps=steps, num_streamed_steps=steps)


def _decode(llm: LLM, batch: int, steps: int) -> float:
    """Median seconds between tokens."""
    stream = llm.stream(_prompts(batch), _greedy(steps))
    moments = [time.perf_counter() for event in stream if event.prompt_index == 0]
    return float(np.median(np.diff(moments)))


def _prompts(batch: int) -> list[list[int]]:
    return [[5 + number, *range(60, 90)] for number in range(batch)]


def _greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def _options() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--model", help="also decode with this model, with and without async_scheduling")
    parser.add_argument("--decode-steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
