"""Decode steps beside other runtimes: the same weights, batch and context, alternating in one process.

    python scripts/bench_decode.py --model smollm2-135m --batch 1 8 32 --context 512 --dtype float32 bfloat16

Prints, per dtype and batch, the median step of each side with the 10th and 90th percentile and tokens per second; of
ours also which fraction of the machine's measured memory bandwidth its bytes need, of the others theirs over ours.
transformers needs torch: pip install '.[gguf,reference]'. `--llama-cpp` adds llama.cpp, which needs pip install
llama-cpp-python and a model in a GGUF file: it reads the same values from a file written in the dtype measured. Its
cache is float16 where ours is bfloat16, the same bytes.
"""

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from dcpjax.api.config import EngineConfig
from dcpjax.api.sampling_params import SamplingParams
from dcpjax.checkpoint.model_files import ModelFiles, open_model
from dcpjax.engine.request import Request
from dcpjax.engine.scheduler import Scheduled
from dcpjax.runtime.memory import block_bytes_per_device
from dcpjax.runtime.runner import Runner, load_runner

Step = Callable[[], None]


class Rival(Protocol):
    """Another runtime that has loaded the model."""

    @property
    def name(self) -> str: ...

    def step(self, batch: int, context: int) -> Step:
        """One decode step, again and again at the same context."""
        ...

    def prefill(self, length: int) -> Step:
        """A whole prompt into an empty cache, and its next token."""
        ...


def main() -> None:
    options = _options()
    files = open_model(options.model)
    bandwidth = measured_bandwidth()
    print(f"{machine()}, reads {bandwidth / 1e9:.1f} GB/s; {versions(options)}; context {options.context}")
    print(f"dtype     batch {heading(rival_names(options), 'bandwidth')}")
    for dtype in options.dtype:
        rivals = make_rivals(files, dtype, options)
        for batch in options.batch:
            ours, bytes_read = our_step(files, dtype, batch, options.context)
            times = alternate([ours, *(rival.step(batch, options.context) for rival in rivals)], options.rounds)
            share = bytes_read / statistics.median(times[0]) / bandwidth
            print(f"{dtype:9} {batch:5} {row(times, batch, share)}", flush=True)


def machine() -> str:
    """What runs this, and how busy it was before: the others' thread pools suffer more from company than ours."""
    name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"


def versions(options: argparse.Namespace) -> str:
    packages = {"torch": not options.alone, "transformers": not options.alone, "llama-cpp-python": options.llama_cpp}
    return ", ".join(f"{name} {version(name)}" for name in ["jax", *(name for name, used in packages.items() if used)])


def rival_names(options: argparse.Namespace) -> list[str]:
    return [*([] if options.alone else [Reference.name]), *([LlamaCpp.name] if options.llama_cpp else [])]


def make_rivals(files: ModelFiles, dtype: str, options: argparse.Namespace) -> list[Rival]:
    """The sides asked for, in the order of `rival_names`."""
    makers: dict[str, Callable[[ModelFiles, str], Rival]] = {Reference.name: Reference, LlamaCpp.name: LlamaCpp}
    return [makers[name](files, dtype) for name in rival_names(options)]


def our_step(files: ModelFiles, dtype: str, batch: int, context: int) -> tuple[Step, int]:
    """One decode step at this context, and the bytes it has to read: weights once, live cache once."""
    runner = make_runner(files, dtype, batch, context)
    blocks = runner.geometry.blocks(context)
    step = [
        Scheduled(greedy_request(row, context), context - 1, 1, list(range(row * blocks, (row + 1) * blocks)), True)
        for row in range(batch)
    ]
    weights = sum(array.nbytes for array in jax.tree.leaves(runner.weights))
    cache = batch * context * block_bytes_per_device(runner.model) // runner.geometry.block_size
    return lambda: runner.collect(runner.launch(step)) and None, weights + cache


def make_runner(files: ModelFiles, dtype: str, batch: int, context: int, **options: Any) -> Runner:
    """One whose cache holds `batch` requests of `context` tokens."""
    options |= {"dtype": dtype, "max_num_seqs": batch}
    options["kv_cache_memory_bytes"] = _cache_bytes(files, dtype, batch, context)
    return load_runner(files, EngineConfig.from_options(options))


def _cache_bytes(files: ModelFiles, dtype: str, batch: int, context: int) -> int:
    config = files.config
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    values = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim
    return values * (4 if dtype == "float32" else 2) * batch * (context + 256)


def greedy_request(number: int, context: int) -> Request:
    greedy = SamplingParams(temperature=0)
    return Request(number=number, prompt_token_ids=[1] * context, params=greedy, max_tokens=1)


class Reference:
    """transformers' model of the same weights, run eagerly: decode steps with a static cache."""

    name = "transformers"

    def __init__(self, files: ModelFiles, dtype: str) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        self.torch = torch
        self.model: Any = LlamaForCausalLM(LlamaConfig(**files.config))
        state = {name: torch.from_numpy(values) for name, values in read_all(files).items()}
        self.model.load_state_dict(state, strict=False)
        self.model.tie_weights()
        self.model.to(getattr(torch, dtype)).eval()

    def step(self, batch: int, context: int) -> Step:
        from transformers import StaticCache

        cache = StaticCache(config=self.model.config, max_cache_len=context)
        prompt = self.torch.ones((batch, context - 1), dtype=self.torch.long)
        token = prompt[:, :1]
        position = self.torch.full((batch, 1), context - 1)
        with self.torch.inference_mode():
            self.model(input_ids=prompt, cache=cache, use_cache=True)

        def run() -> None:
            with self.torch.inference_mode():
                _rewind(cache, context - 1)
                scores = self.model(input_ids=token, cache=cache, position_ids=position, use_cache=True).logits[:, -1]
                scores.argmax(-1).tolist()

        return run

    def prefill(self, length: int) -> Step:
        prompt = self.torch.ones((1, length), dtype=self.torch.long)

        def run() -> None:
            with self.torch.inference_mode():
                self.model(input_ids=prompt, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1).tolist()

        return run


def _rewind(cache: Any, length: int) -> None:
    """Let the next token overwrite the last one, so that every step is at the same context."""
    for layer in cache.layers:
        layer.cumulative_length.fill_(length) if hasattr(layer.cumulative_length, "fill_") else setattr(
            layer, "cumulative_length", length
        )


def read_all(files: ModelFiles) -> dict[str, np.ndarray]:
    """Every tensor in float32, under its Hugging Face name."""
    source = files.tensors()
    return {
        name: source.read(name, (slice(None),) * len(source.shape(name))).astype(np.float32) for name in source.names()
    }


class LlamaCpp:
    """llama.cpp on the same values: each request of a step is a sequence of one batch; the host takes the largest."""

    name = "llama.cpp"

    def __init__(self, files: ModelFiles, dtype: str) -> None:
        self.lib: Any = import_module("llama_cpp")
        self.dtype = dtype
        self._log = self.lib.llama_log_callback(lambda level, text, data: None)  # kept: the library calls it later
        self.lib.llama_log_set(self._log, None)
        self.lib.llama_backend_init()
        options = self.lib.llama_model_default_params()
        options.n_gpu_layers, options.use_mmap = 0, False
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            write_gguf(files.path, path, dtype)
            self.model = self.lib.llama_model_load_from_file(str(path).encode(), options)
        self.vocab_size = self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(self.model))
        self.context: Any = None

    def step(self, batch: int, context: int) -> Step:
        self._open(batch, context)
        for sequence in range(batch):
            self._decode(self._batch([(sequence, position) for position in range(context - 1)]))
        tokens = self._batch([(sequence, context - 1) for sequence in range(batch)])
        memory = self.lib.llama_get_memory(self.context)

        def run() -> None:
            self._decode(tokens)
            self._choose(batch)
            for sequence in range(batch):
                self.lib.llama_memory_seq_rm(memory, sequence, context - 1, -1)

        return run

    def prefill(self, length: int) -> Step:
        self._open(1, length)
        tokens = self._batch([(0, position) for position in range(length)])
        memory = self.lib.llama_get_memory(self.context)

        def run() -> None:
            self.lib.llama_memory_clear(memory, False)
            self._decode(tokens)
            self._choose(1)

        return run

    def _open(self, batch: int, context: int) -> None:
        """An empty cache in place of the last one."""
        if self.context is not None:
            self.lib.llama_free(self.context)
        options = self.lib.llama_context_default_params()
        options.n_ctx, options.n_seq_max = batch * context, batch
        options.n_batch = max(batch, context)
        options.n_threads = options.n_threads_batch = os.cpu_count()
        options.type_k = options.type_v = self.lib.GGML_TYPE_F32 if self.dtype == "float32" else self.lib.GGML_TYPE_F16
        self.context = self.lib.llama_init_from_model(self.model, options)

    def _batch(self, places: Sequence[tuple[int, int]]) -> Any:
        """Token 1 at each (sequence, position). A step of several sequences, and a prompt's end, choose a token."""
        batch = self.lib.llama_batch_init(len(places), 0, 1)
        batch.n_tokens = len(places)
        for index, (sequence, position) in enumerate(places):
            batch.token[index], batch.pos[index] = 1, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
            batch.logits[index] = index + 1 == len(places) or places[index + 1][0] != sequence
        return batch

    def _decode(self, batch: Any) -> None:
        failed = self.lib.llama_decode(self.context, batch)
        if failed:
            raise RuntimeError(f"llama_decode must return 0, but returned {failed}")

    def _choose(self, rows: int) -> list[int]:
        logits = self.lib.llama_get_logits(self.context)
        return np.ctypeslib.as_array(logits, (rows, self.vocab_size)).argmax(-1).tolist()


def write_gguf(source: Path, target: Path, dtype: str) -> None:
    """Copy a GGUF file with its matrices in `dtype`; vectors stay float32, as llama.cpp wants them."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
    from gguf.quants import dequantize, quantize

    reader = GGUFReader(source)
    writer = GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kind = field.types[0]
            inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, inner)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        narrow = dtype == "bfloat16" and values.ndim > 1
        kind = GGMLQuantizationType.BF16 if narrow else GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def alternate(steps: Sequence[Step], rounds: int, *, calls: int = 5, warm_up: int = 3) -> list[list[float]]:
    """Seconds per call of each side, in alternating rounds of `calls` after a warm-up."""
    times: list[list[float]] = [[] for _ in steps]
    for step in steps:
        for _ in range(warm_up):
            step()
    for _ in range(rounds):
        for side, step in zip(times, steps, strict=True):
            side.extend(seconds(step) for _ in range(calls))
    return times


def measured_bandwidth() -> float:
    """Bytes per second of the best of several sums over 1 GiB, on all cores."""
    data = jax.numpy.ones((os.cpu_count() or 1, 2**28 // (os.cpu_count() or 1)), jax.numpy.float32)
    total = jax.jit(lambda x: x.sum(axis=1))
    total(data).block_until_ready()
    best = min(seconds(lambda: total(data).block_until_ready()) for _ in range(7))
    return data.nbytes / best


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def heading(rivals: Sequence[str], share: str) -> str:
    """The columns of `row`."""
    ours = f"| {'ours ms':>12}  {'[spread]':13} {'tok/s':>6} {share:>9}"
    return " ".join([ours, *(f"| {name + ' ms':>15}  {'[spread]':13} {'tok/s':>6} ratio" for name in rivals)])


def row(times: Sequence[Sequence[float]], tokens: int, share: float) -> str:
    """Each side's median, spread and tokens per second for steps of `tokens`; the others' time over ours."""
    ours, *others = (statistics.median(side) for side in times)
    cells = [f"| {ours * 1e3:12.1f}  {spread(times[0]):13} {tokens / ours:6.0f} {share:9.0%}"]
    for side, theirs in zip(times[1:], others, strict=True):
        cells.append(f"| {theirs * 1e3:15.1f}  {spread(side):13} {tokens / theirs:6.0f} {theirs / ours:5.2f}")
    return " ".join(cells)


def spread(times: Sequence[float]) -> str:
    """10th and 90th percentile in milliseconds."""
    low, high = np.percentile(times, [10, 90]) * 1e3
    return f"[{low:.0f}-{high:.0f}]"


def add_options(parser: argparse.ArgumentParser) -> None:
    """What every comparison of steps asks."""
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--alone", action="store_true", help="without transformers, which needs torch")
    parser.add_argument("--llama-cpp", action="store_true", help="also llama.cpp; needs llama-cpp-python")


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> argparse.Namespace:
    """End with a sentence if a side that is asked for cannot run here."""
    if options.llama_cpp and find_spec("llama_cpp") is None:
        parser.error(
            "--llama-cpp must run in an environment with llama-cpp-python, but this one has none; "
            "pip install llama-cpp-python gguf"
        )
    if options.llama_cpp and open_model(options.model).path.suffix != ".gguf":
        parser.error(f"--llama-cpp must have a --model in a .gguf file, but has {options.model}; use smollm2-135m")
    return options


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=512)
    return check_options(parser, parser.parse_args())


if __name__ == "__main__":
    main()
