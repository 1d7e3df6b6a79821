"""The host's time for calls of many prompts and of many completions, measured on a mock device.

    python scripts/bench_many_prompts.py --prompts 1000 10000 100000 --completions 1000 4000 16000

Each row is one call: `generate`, or with "aborted" a stream that is closed at its first event. The mock device answers
at once, so all of the time is the host's; it is processor time, which other programs hardly change. The last column is
the time per prompt or completion relative to the first row of its kind: it stays near 1 where the time is linear.
"""

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import jax
from bench_host import VOCAB, InstantDevice
from measuring import machine

from dcpjax import LLM, SamplingParams
from dcpjax.checkpoint.model_files import ModelFiles
from dcpjax.engine.scheduler import StepLimits

SEATS = 64
CONTEXT = 64
TOKENS = 2


def main() -> None:
    options = _options()
    print(f"{machine()}; jax {jax.__version__}")
    with instant_llm() as llm:  # imports what the first call needs
        generate_prompts(llm, 1)
    print(f"{TOKENS} tokens each             | seconds | us for each | relative")
    for name, counts, call in (
        ("prompts", options.prompts, generate_prompts),
        ("prompts, aborted", options.prompts, abort_prompts),
        ("completions of one", options.completions, generate_completions),
        ("completions, aborted", options.completions, abort_completions),
    ):
        first = None
        for count in counts:
            with instant_llm() as llm:
                gc.collect()  # what the row before has left
                start = time.process_time()
                call(llm, count)
                took = time.process_time() - start
            first = first or took / count
            print(f"{count:7,} {name:20} | {took:7.2f} | {took / count * 1e6:11.0f} | {took / count / first:8.2f}")


def generate_prompts(llm: LLM, count: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=TOKENS)
    results = llm.generate([[number % VOCAB, 1, 2] for number in range(count)], params)
    assert sum(len(result.outputs[0].token_ids) for result in results) == TOKENS * count


def abort_prompts(llm: LLM, count: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=TOKENS)
    _begin_and_close(llm, [[number % VOCAB, 1, 2] for number in range(count)], params)


def generate_completions(llm: LLM, count: int) -> None:
    outputs = llm.generate([[1, 2, 3]], SamplingParams(n=count, temperature=0, max_tokens=TOKENS))[0].outputs
    assert sum(len(output.token_ids) for output in outputs) == TOKENS * count


def abort_completions(llm: LLM, count: int) -> None:
    _begin_and_close(llm, [[1, 2, 3]], SamplingParams(n=count, temperature=0, max_tokens=TOKENS))


def _begin_and_close(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> None:
    stream = llm.stream(prompts, params)
    next(stream)
    stream.close()
    assert llm.stats().num_waiting == llm.stats().num_running == 0


@contextmanager
def instant_llm(device: Callable[[int, int], Any] = InstantDevice) -> Iterator[LLM]:
    """An `LLM` whose model is a mock device."""
    runner = device(SEATS, CONTEXT)
    limits = StepLimits(max_num_seqs=SEATS, max_num_batched_tokens=SEATS * CONTEXT)
    runner.sizes = SimpleNamespace(num_blocks=2 * SEATS, max_model_len=CONTEXT, limits=limits)
    runner.model = SimpleNamespace(config=SimpleNamespace(vocab_size=VOCAB))
    files = ModelFiles(path=Path("mock"), config={}, generation_config={}, tensors=_no_tensors, tokenizer=lambda: None)
    mocks: dict[str, Any] = {
        "open_model": lambda model: files,
        "load_runner": lambda *arguments, **options: runner,
        "warm_up": lambda *arguments: None,
    }
    with patch.multiple("dcpjax.llm", **mocks):
        yield LLM("mock", progress=False)


def _no_tensors() -> Any:
    raise AssertionError("the mock device has no weights")


def _options() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, nargs="+", default=[1000, 10_000, 100_000])
    parser.add_argument("--completions", type=int, nargs="+", default=[1000, 4000, 16_000])
    return parser.parse_args()


if __name__ == "__main__":
    main()
