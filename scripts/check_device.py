"""Whether a machine's accelerator computes what a CPU computes, and how fast: one command, under 12 minutes.

    python scripts/check_device.py --json device.json

Checks, each on its own, so that one that fails does not hide the others:

    versions     of Python, JAX and this package; devices, their kind and memory
    smoke        a product on every device, and a sum over all of them
    kernel       attention by the kernel for this platform beside plain XLA operations, grouped-query and latent, in
                 float32 and bfloat16: the largest difference of a log-probability
    tokens       greedy tokens of three small families and of SmolLM2-135M, in float32, beside a CPU's
    speed        decode and prefill of SmolLM2-135M in bfloat16; the share of the measured memory bandwidth that
                 reading weights and cache takes
    memory       the cache that an engine takes by default, and what the device has left beside it
    exchanges    on several devices: latency and bandwidth of each collective, and tokens of (1, n) beside (n, 1)

Prints a table and writes the same as JSON: attach it to a report. Exit code 1 if a check failed. A check that would
begin after `--minutes` is left out. It runs in a clone, because the small families are in tests/goldens. On a machine
without an accelerator it checks the CPU.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from measuring import seconds

from dcpjax import LLM, SamplingParams
from dcpjax.checkpoint.model_files import open_model
from dcpjax.cli.env import environment
from dcpjax.planning.measure import BenchSizes, bench
from dcpjax.sharding.link import measured
from dcpjax.sharding.mesh import Layout, make_mesh

GOLDENS = Path(__file__).parent.parent / "tests" / "goldens"
FAMILIES = ("llama3", "qwen3-moe", "deepseek-v3")
SMOLLM2 = "smollm2-135m"
TINY = {"block_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 2**20}
ATTENTION = {  # two layers with the heads of real models
    "gqa": ("llama-3.1-8b", {"num_hidden_layers": 2, "hidden_size": 512, "intermediate_size": 512, "vocab_size": 512}),
    "mla": (
        "deepseek-v3",
        {
            "num_hidden_layers": 2,
            "hidden_size": 512,
            "intermediate_size": 512,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "n_routed_experts": None,
            "first_k_dense_replace": 2,
            "vocab_size": 512,
        },
    ),
}
CONTEXT = 700  # tokens of the longest prompt of `check_kernel`: several pages, and a part of one
MOST_DIFFERENT = {"float32": 1e-3, "bfloat16": 0.1}  # log-probabilities by the kernel and by XLA's operations
BATCH_SIZES, DECODE_CONTEXT = (1, 8, 32), 512
TIMED_BYTES = 2**29  # read to measure the memory's bandwidth

Finding = dict[str, Any]


def main() -> int:
    options = _options()
    if options.tokens_only:
        print(json.dumps(tokens(options.model)))
        return 0
    report = run_checks(CHECKS, options)
    for name, found in report.items():
        print(_line(name, found))
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return any(found["result"] == "failed" for found in report.values())


def run_checks(checks: Mapping[str, Callable[..., Finding]], options: argparse.Namespace) -> dict[str, Finding]:
    """The finding of each check, with "result": "passed", "failed" or "left out"."""
    report, started = dict[str, Finding](), time.monotonic()
    for name, check in checks.items():
        begun = time.monotonic()
        if begun - started > 60 * options.minutes:
            report[name] = {"result": "left out", "seconds": 0.0, "why": f"{options.minutes} minutes are over"}
            continue
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            found = {"result": "passed"} | check(options)
        except Exception as error:  # the report is to hold every fault
            found = {"result": "failed", "why": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        report[name] = found | {"seconds": round(time.monotonic() - begun, 1)}
    return report


# --- checks


def check_versions(_: argparse.Namespace) -> Finding:
    return environment() | {"memory_stats": jax.devices()[0].memory_stats()}


def check_smoke(_: argparse.Namespace) -> Finding:
    """A product on every device, and their sum by an all-reduce."""
    devices, size = jax.devices(), 256
    mesh = jax.make_mesh((len(devices),), ("all",), axis_types=(jax.sharding.AxisType.Auto,))

    def body(x: jax.Array) -> jax.Array:
        return jax.lax.psum(jnp.matmul(x[0], x[0], precision="highest"), "all")

    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=PartitionSpec("all"), out_specs=PartitionSpec()))
    x = np.random.default_rng(0).normal(size=(len(devices), size, size)).astype(np.float32)
    difference = float(np.abs(np.asarray(run(x)) - (x @ x).sum(0)).max())
    return _judged(difference < 1e-2, devices=len(devices), largest_difference=difference)


def check_kernel(_: argparse.Namespace) -> Finding:
    if jax.default_backend() == "cpu":
        return {"result": "left out", "why": "a CPU has other kernels, which the tests check"}
    differences = {
        f"{family} {dtype}": _difference_of_bodies(preset, overrides, dtype)
        for family, (preset, overrides) in ATTENTION.items()
        for dtype in MOST_DIFFERENT
    }
    sound = all(found < MOST_DIFFERENT[name.split()[1]] for name, found in differences.items())
    return _judged(sound, largest_difference=differences)


def _difference_of_bodies(preset: str, overrides: dict[str, Any], dtype: Any) -> float:
    """Between log-probabilities of prompts and of decodes, by the kernel and by XLA's operations."""
    draw = np.random.default_rng(1)
    prompts = [draw.integers(0, 512, length).tolist() for length in (1, 16, 130, CONTEXT)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=0, logprobs=0)

    def scores(body: Any) -> np.ndarray:
        llm = LLM(
            preset,
            load_format="dummy",
            hf_overrides=overrides | {"dtype": dtype},
            attention_body=body,
            max_model_len=1024,
            max_num_seqs=4,
            kv_cache_memory_bytes=2**26,
            progress=False,
        )
        results = llm.generate(prompts, params)
        _raise_first_error(results)
        positions = [position for each in results for position in (each.prompt_logprobs or [])[1:] if position]
        return np.array([entry.logprob for position in positions for entry in position.values()])

    kernel, loop = scores("pallas"), scores("loop")
    return float(np.abs(kernel - loop).max())


def check_tokens(options: argparse.Namespace) -> Finding:
    """The same script on a CPU, in a process of its own, is the reference."""
    ours = tokens(options.model)
    command = [sys.executable, __file__, "--tokens-only", "--model", options.model]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    if done.returncode:
        raise RuntimeError(f"the CPU's run failed: {done.stderr[-2000:]}")
    expected = json.loads(done.stdout)
    equal = {name: ours[name] == expected[name] for name in expected}
    return _judged(all(equal.values()), equal=equal)


def tokens(model: str) -> dict[str, list[list[int]]]:
    """Greedy tokens in float32 of each family, and of `model` unless it is empty."""
    draw, found = np.random.default_rng(0), {}
    with jax.default_matmul_precision("highest"):
        for family in FAMILIES:
            vocab = open_model(GOLDENS / family).config["vocab_size"]
            prompts = [draw.integers(0, vocab, length).tolist() for length in (1, 9, 40)]
            found[family] = _greedy(LLM(GOLDENS / family, dtype="float32", progress=False, **TINY), prompts, 16)
        if model:
            llm = LLM(model, dtype="float32", progress=False, max_model_len=1024, kv_cache_memory_bytes=2**27)
            text = ["The capital of France is", "def fibonacci(n):\n", "Light is " * 60]
            found[model] = _greedy(llm, text, 48)
    return found


def _greedy(llm: LLM, prompts: list[Any], count: int) -> list[list[int]]:
    results = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
    _raise_first_error(results)
    return [list(result.outputs[0].token_ids) for result in results]


def check_speed(options: argparse.Namespace) -> Finding:
    """A floor of the decode step is the time to read weights and cache once."""
    model = options.model or str(GOLDENS / FAMILIES[0])
    sizes = BenchSizes(batch_sizes=BATCH_SIZES, context_length=DECODE_CONTEXT if options.model else 32, steps=20)
    found = bench(model, [Layout()], sizes, {"dtype": "bfloat16"})
    bandwidth, config = _bandwidth(), open_model(model).config
    rows = [
        {
            "batch": row.batch_size,
            "step_ms": 1e3 * row.step_seconds,
            "decode_tokens_per_second": row.tokens_per_second,
            "prefill_tokens_per_second": row.prefill_tokens_per_second,
            "share_of_bandwidth": _bytes_of_step(config, row.batch_size, sizes) / row.step_seconds / bandwidth,
        }
        for row in found.rows
    ]
    return {"bandwidth_bytes_per_second": bandwidth, "rows": rows}


def _bytes_of_step(config: Mapping[str, Any], batch: int, sizes: BenchSizes) -> float:
    """Of a dense model with grouped queries, in bfloat16."""
    width, layers = config["hidden_size"], config["num_hidden_layers"]
    head_dim = config.get("head_dim") or width // config["num_attention_heads"]
    kv = 2 * config["num_key_value_heads"] * head_dim
    layer = width * (2 * config["num_attention_heads"] * head_dim + kv + 3 * config["intermediate_size"])
    return 2 * (layers * layer + config["vocab_size"] * width + batch * sizes.context_length * layers * kv)


def _bandwidth() -> float:
    """Bytes per second of the fastest of several sums over one array."""
    data = jnp.ones(TIMED_BYTES // 4, jnp.float32)
    total = jax.jit(jnp.sum)
    total(data).block_until_ready()
    return data.nbytes / min(seconds(lambda: total(data).block_until_ready()) for _ in range(7))


def check_memory(_: argparse.Namespace) -> Finding:
    """A small model whose cache has the size that an engine takes by default."""
    before = jax.devices()[0].memory_stats() or {}
    llm = LLM(GOLDENS / FAMILIES[0], dtype="float32", progress=False)
    _greedy(llm, [[1] * 16], 4)
    after, blocks = jax.devices()[0].memory_stats() or {}, llm.stats().num_blocks
    limit, peak = after.get("bytes_limit"), after.get("peak_bytes_in_use")
    cache = sum(array.nbytes for array in jax.tree.leaves(llm.runner.cache))
    sound = limit is None or peak is None or peak <= limit
    return _judged(sound, blocks=blocks, cache_bytes=cache, limit=limit, peak=peak, before=before.get("bytes_in_use"))


def check_exchanges(_: argparse.Namespace) -> Finding:
    count = math.gcd(len(jax.devices()), 8)
    if count == 1:
        return {"result": "left out", "why": "there is one device"}
    link = measured(make_mesh(Layout(tensor_parallel_size=count, decode_context_parallel_size=count)))
    family, prompts = GOLDENS / "deepseek-v3", [[1] * 7, [5, 3] * 20]
    tensor, context = (
        LLM(
            family,
            dtype="float32",
            tensor_parallel_size=count,
            decode_context_parallel_size=dcp,
            progress=False,
            **TINY,
        )
        for dcp in (1, count)
    )
    equal = _greedy(tensor, prompts, 16) == _greedy(context, prompts, 16)
    speeds = {} if link is None else {kind: speed._asdict() for kind, speed in link._asdict().items()}
    return _judged(equal, devices=count, tokens_equal=equal, measured=speeds)


CHECKS: dict[str, Callable[[argparse.Namespace], Finding]] = {
    "versions": check_versions,
    "smoke": check_smoke,
    "kernel": check_kernel,
    "tokens": check_tokens,
    "speed": check_speed,
    "memory": check_memory,
    "exchanges": check_exchanges,
}


# --- what they share


def _judged(passed: bool, **found: Any) -> Finding:
    return {"result": "passed" if passed else "failed"} | found


def _raise_first_error(results: Any) -> None:
    for result in results:
        if result.error:
            raise RuntimeError(result.error)


def _line(name: str, found: Finding) -> str:
    rest = {key: value for key, value in found.items() if key not in ("result", "seconds", "traceback")}
    return f"{name:10} {found['result']:9} {found['seconds']:6.1f} s  {json.dumps(rest, default=str)}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report here")
    parser.add_argument("--model", default=SMOLLM2, help='for tokens and speed; "" leaves it out')
    parser.add_argument("--minutes", type=float, default=11, help="begin no check after so many (default: 11)")
    parser.add_argument("--tokens-only", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
