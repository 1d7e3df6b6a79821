"""A long prompt beside requests that are decoding: how much it slows them, and how much they slow it.

    python scripts/bench_fairness.py --prompts 8192 32768 --decodes 8 --layers 2

Some requests decode; then a long prompt arrives and is computed in chunks beside them. Prints the 50th and 99th
percentile of the gaps between tokens, first as usual, then while the prompt runs, and the ratio of each percentile to
the usual one; then how long the prompt takes alone and beside the decodes, and beside / alone. Once with the engine's
own limit on prefill tokens beside decodes, for which the ratios should be at most 3, and once without a limit. Half of
the usual gaps are from before the prompt and half from after it, because the contexts grow by thousands of tokens
meanwhile.

A dense model with dummy weights and SmolLM2's width runs. Fewer layers make all gaps shorter by the same factor.
"""

import argparse
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np
from measuring import machine

from dcpjax import LLM, SamplingParams
from dcpjax.frontend.completion import RunningPrompt

SHAPE = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "rope_scaling": None,
    "tie_word_embeddings": True,
}
USUAL_GAPS = 256  # before the prompt, and as many after it


def main() -> None:
    options = _options()
    print(f"{machine()}; jax {jax.__version__}")
    print(
        "limit    | prompt | usual gap ms p50   p99 | beside the prompt p50   p99   worst | ratio p50   p99 | "
        "prompt alone, beside s | beside / alone"
    )
    for name, tokens in (("engine's", None), ("none", options.max_num_batched_tokens)):
        for prompt in options.prompts:
            llm = _llm(options, prompt, tokens)
            run(llm, options, min(prompt, 4096))  # compiles most shapes
            _print_row(name, prompt, run_alone(llm, prompt), run(llm, options, prompt))


def _print_row(name: str, prompt: int, alone: float, measured: "Measured") -> None:
    usual, beside = (np.percentile(gaps, (50, 99)) * 1e3 for gaps in (measured.usual, measured.beside))
    usual_columns = f"{usual[0]:16.1f} {usual[1]:5.1f}"
    beside_columns = f"{beside[0]:21.1f} {beside[1]:5.1f} {max(measured.beside) * 1e3:7.1f}"
    ratios = f"{beside[0] / usual[0]:9.2f} {beside[1] / usual[1]:5.2f}"
    seconds = f"{alone:13.1f} {measured.seconds:8.1f} | {measured.seconds / alone:14.2f}"
    print(f"{name:8} | {prompt:6} | {usual_columns} | {beside_columns} | {ratios} | {seconds}", flush=True)


class Measured(NamedTuple):
    """Seconds between tokens of a request that decodes, and the time that the long prompt takes beside it."""

    usual: list[float]
    beside: list[float]
    seconds: float


def run(llm: LLM, options: argparse.Namespace, prompt: int) -> Measured:
    llm.reset_prefix_cache()
    prompts = [[3 + number, *range(100, 131)] for number in range(options.decodes)]
    answers = llm.stream(prompts, SamplingParams(temperature=0, max_tokens=prompt, ignore_eos=True))
    moments = (time.perf_counter() for event in answers if event.prompt_index == 0)
    for _ in range(8):
        next(moments)
    before = _differences([next(moments) for _ in range(USUAL_GAPS + 1)])
    (submission,) = llm.intake.submissions([_long_prompt(prompt)], SamplingParams(max_tokens=1))
    long = RunningPrompt(submission, deque())
    llm.start(long)
    beside, done = list(_until_done(moments, long)), time.perf_counter()
    after = _differences([next(moments) for _ in range(USUAL_GAPS + 1)])
    answers.close()
    assert not llm.engine.has_work
    return Measured(before + after, _differences(beside), done - beside[0])


def run_alone(llm: LLM, prompt: int) -> float:
    """Seconds that the long prompt takes while nothing else runs."""
    llm.reset_prefix_cache()
    started = time.perf_counter()
    llm.generate([_long_prompt(prompt)], SamplingParams(max_tokens=1))
    return time.perf_counter() - started


def _long_prompt(tokens: int) -> list[int]:
    return [7 + place % 40_000 for place in range(tokens)]


def _until_done(moments: Iterator[float], prompt: RunningPrompt) -> Iterator[float]:
    while not prompt.output.finished:
        yield next(moments)


def _differences(moments: list[float]) -> list[float]:
    return np.diff(moments).tolist()


def _llm(options: argparse.Namespace, prompt: int, mixed: int | None) -> LLM:
    length = prompt + 16
    return LLM(
        "llama-3.1-8b",
        load_format="dummy",
        hf_overrides=SHAPE | {"num_hidden_layers": options.layers, "max_position_embeddings": 2 * length},
        dtype="float32",
        max_model_len=2 * length - 32,
        kv_cache_memory_bytes=2 * 4 * options.layers * 3 * 64 * (2 * length + options.decodes * 2048),
        max_num_seqs=options.decodes + 1,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_mixed_prefill_tokens=mixed,
        progress=False,
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, nargs="+", default=[8192, 32768], help="tokens of the long prompts")
    parser.add_argument("--decodes", type=int, default=8, help="requests that decode")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    return parser.parse_args()


if __name__ == "__main__":
    main()
