"""Start-up time: from a new process to the first tokens, with an empty (cold) and a filled (warm) compilation cache.

    python scripts/bench_startup.py --model smollm2-135m --warmup all
    python scripts/bench_startup.py --loading 1024

Every row is a process of its own and shows the seconds of each stage. Then follow ratios, and for each program the
seconds of tracing, of lowering, and of compiling it or reading it from the compilation cache. With several threads
these overlap and add up to more than the wall time.

`--loading MIB` instead writes a checkpoint of that size and compares loading it with plainly reading the file. Both
find the file in the operating system's page cache.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial as bind
from pathlib import Path
from typing import Any

PROMPT = list(range(100, 120))
PROGRAMS = ("forward", "gather_rows", "sample_next", "copy_blocks")
STAGES = ("python", "import", "open", "weights", "rest of LLM", "warm-up", "first token", "second token")
EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile or read",
}


def main() -> None:
    options = _options()
    if options.child:
        print(json.dumps(child(options)))
        return
    from importlib.metadata import version

    from measuring import machine  # imports numpy, which is part of what a child measures

    print(
        f"{machine()}; jax {version('jax')}, "
        f"python {platform.python_version()}; {options.model}, max_num_seqs {options.max_num_seqs}"
    )
    if options.loading:
        loading(options.loading << 20, options.rounds)
    else:
        startup(options)


# --- from import to the first token


def startup(options: argparse.Namespace) -> None:
    print("seconds                       " + " ".join(f"{stage:>13}" for stage in ("total", *STAGES)))
    with (
        tempfile.TemporaryDirectory() as plain,
        tempfile.TemporaryDirectory() as one,
        tempfile.TemporaryDirectory() as all_,
    ):
        cold = _measure("cold", options, plain)
        warm = _measure("warm", options, plain)
        serial = _measure(f"cold, {options.warmup}, 1 thread", options, one, options.warmup, threads=1)
        threads = os.cpu_count() or 1
        parallel = _measure(f"cold, {options.warmup}, {threads} threads", options, all_, options.warmup, threads)
        again = _measure(f"warm, {options.warmup}, {threads} threads", options, all_, options.warmup, threads)
    print(f"ratio of totals, cold / warm: {cold['total'] / warm['total']:.2f}")
    one_thread, all_threads, kept = (found["stages"]["warm-up"] for found in (serial, parallel, again))
    print(f"ratio of warm-ups, 1 thread / {threads} threads: {one_thread / all_threads:.2f}")
    print(f"ratio of warm-ups, cold / warm: {all_threads / kept:.2f}")
    for name, found in {"cold": cold, "warm": warm, "cold warm-up, 1 thread": serial, "warm warm-up": again}.items():
        print(f"{name}:")
        for program, (count, times) in found["programs"].items():
            print(f"  {program:12} x {count:3}  " + "  ".join(f"{kind} {times[kind]:6.2f}" for kind in EVENTS.values()))


def _measure(
    name: str, options: argparse.Namespace, folder: str, warmup: str = "none", threads: int = 1
) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", folder, "--model", options.model, "--warmup", warmup]
    command += ["--threads", str(threads), "--max-num-seqs", str(options.max_num_seqs), "--started", str(time.time())]
    answer = subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(answer.stdout.splitlines()[-1])
    times = [found["total"], *(found["stages"][stage] for stage in STAGES)]
    print(f"{name:30}" + " ".join(f"{seconds:13.2f}" for seconds in times), flush=True)
    return found


def child(options: argparse.Namespace) -> dict[str, Any]:
    """The stages of one start-up, in a process that has imported neither jax nor dcpjax yet."""
    stages = {"python": time.time() - options.started}
    with _stage(stages, "import"):
        import jax

        from dcpjax import SamplingParams, llm
        from dcpjax.runtime import model as model_module
    programs: dict[str, Any] = defaultdict(lambda: [0, dict.fromkeys(EVENTS.values(), 0.0)])
    jax.monitoring.register_event_duration_secs_listener(_noting(programs))
    with _stage(stages, "LLM"):
        _time_calls(stages, llm, "open_model", "open")
        _time_calls(stages, model_module, "load_weights", "weights")
        llm.warm_up = bind(llm.warm_up, threads=options.threads)
        _time_calls(stages, llm, "warm_up", "warm-up")
        model = llm.LLM(
            options.model,
            progress=False,
            warmup=options.warmup,
            max_num_seqs=options.max_num_seqs,
            compilation_cache=options.child,
        )
    stages["rest of LLM"] = stages.pop("LLM") - stages["open"] - stages["weights"] - stages["warm-up"]
    stream = model.stream([PROMPT], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    for stage in ("first token", "second token"):
        with _stage(stages, stage):
            next(stream)
    return {"total": sum(stages.values()), "stages": stages, "programs": programs}


def _noting(programs: dict[str, Any]) -> Any:
    """A listener for JAX's events that adds the time of each event to that of its program."""

    def note(event: str, duration_secs: float, **tags: str | int) -> None:
        name = str(tags.get("fun_name", "")).removeprefix("jit(").removesuffix(")")
        if event in EVENTS and name != "_layer":  # tracing a layer is part of tracing `forward`
            entry = programs[name if name in PROGRAMS else "others"]
            entry[0] += EVENTS[event] == "compile or read"
            entry[1][EVENTS[event]] += duration_secs

    return note


@contextmanager
def _stage(stages: dict[str, float], name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    stages[name] = time.perf_counter() - started


def _time_calls(stages: dict[str, float], module: Any, name: str, stage: str) -> None:
    """Replace a module's function by one that notes the time of its call as a stage."""
    function: Callable[..., Any] = getattr(module, name)

    def timed(*arguments: Any, **named: Any) -> Any:
        with _stage(stages, stage):
            return function(*arguments, **named)

    setattr(module, name, timed)


# --- loading weights


def loading(size: int, rounds: int) -> None:
    """Load a checkpoint of about `size` bytes in bfloat16, and one in float32, each in its own dtype."""
    from measuring import alternate

    print("loading, GB/s, page cache warm | plain reading | load_weights | ratio of times, load / read")
    for dtype in ("bfloat16", "float32"):
        with tempfile.TemporaryDirectory() as folder:
            file = _checkpoint(Path(folder), dtype, size)
            sides = [bind(_read, file), bind(_load, Path(folder), dtype)]
            plain, ours = map(statistics.median, alternate(sides, rounds, calls=1, warm_up=1))
            speeds = [file.stat().st_size / seconds / 1e9 for seconds in (plain, ours)]
            print(f"{dtype:30} | {speeds[0]:13.2f} | {speeds[1]:12.2f} | {ours / plain:.2f}")


def _checkpoint(folder: Path, dtype: str, size: int) -> Path:
    """Random weights in the shape of a small llama, with as many layers as fill `size`."""
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import save_file

    hidden, ffn, heads, vocab = 1024, 4096, 16, 32000
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden // 2, hidden),
        "self_attn.v_proj": (hidden // 2, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    kind: Any = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
    values = sum(int(np.prod(shape)) for shape in shapes.values())
    layers = max(1, round(size / np.dtype(kind).itemsize / values))
    noise = np.random.default_rng(0).normal(size=ffn * hidden).astype(kind)
    tensors = {
        f"model.layers.{layer}.{name}.weight": noise[: int(np.prod(shape))].reshape(shape)
        for layer in range(layers)
        for name, shape in shapes.items()
    }
    tensors["model.norm.weight"] = noise[:hidden]
    tensors["model.embed_tokens.weight"] = np.resize(noise, (vocab, hidden))
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": dtype,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder / "model.safetensors"


def _read(file: Path) -> None:
    """Read every byte once, into one buffer."""
    buffer = bytearray(64 << 20)
    with file.open("rb", buffering=0) as stream:
        while stream.readinto(buffer):
            pass


def _load(folder: Path, dtype: str) -> None:
    import jax

    from dcpjax.checkpoint.model_files import open_model
    from dcpjax.checkpoint.weights import load_weights
    from dcpjax.models import decoder
    from dcpjax.models.config import from_hf
    from dcpjax.sharding.mesh import Layout, make_mesh
    from dcpjax.sharding.rules import Placement

    files, layout = open_model(folder), Layout(tensor_parallel_size=1, decode_context_parallel_size=1)
    config = from_hf(files.config)
    specs = decoder.weight_specs(config, layout, dtype)
    names, place = decoder.weight_names(config), Placement(make_mesh(layout))
    weights = load_weights(config, specs, names, files.tensors(), place)
    jax.block_until_ready(weights)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--warmup", default="all", help="what to compile before the first request: decode or all")
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument(
        "--loading", type=int, metavar="MIB", help="time the loading of a checkpoint of this size instead"
    )
    parser.add_argument("--rounds", type=int, default=5)
    for hidden in ("--child", "--threads", "--started"):
        parser.add_argument(
            hidden, help=argparse.SUPPRESS, type={"--threads": int, "--started": float}.get(hidden, str)
        )
    return parser.parse_args()


if __name__ == "__main__":
    main()
