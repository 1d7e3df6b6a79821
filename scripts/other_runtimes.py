"""Other runtimes on the same weights, for the benchmarks that compare with them: transformers and llama.cpp."""

import argparse
import os
import tempfile
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from runner_steps import Step

from dcpjax.checkpoint.model_files import ModelFiles, open_model


class OtherRuntime(Protocol):
    """A runtime that has loaded the model. Its steps can be called again and again."""

    @property
    def name(self) -> str: ...

    def step(self, batch: int, context: int) -> Step:
        """A decode step in which each of `batch` requests computes the last of its `context` tokens."""
        ...

    def prefill(self, length: int) -> Step:
        """The prefill of a prompt of `length` tokens, and its next token."""
        ...


class Transformers:
    """The transformers model in PyTorch, run eagerly; decode steps use a static cache."""

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
    """Set the cache's length, so that the next step overwrites the last token and has the same context."""
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
    """llama.cpp on the same values. A step is one batch with a sequence per request; the host takes the argmax."""

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
            self._argmax(batch)
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
            self._argmax(1)

        return run

    def _open(self, batch: int, context: int) -> None:
        """Replace the context by one with an empty cache for `batch` sequences of `context` tokens."""
        if self.context is not None:
            self.lib.llama_free(self.context)
        options = self.lib.llama_context_default_params()
        options.n_ctx, options.n_seq_max = batch * context, batch
        options.n_batch = max(batch, context)
        options.n_threads = options.n_threads_batch = os.cpu_count()
        options.type_k = options.type_v = self.lib.GGML_TYPE_F32 if self.dtype == "float32" else self.lib.GGML_TYPE_F16
        self.context = self.lib.llama_init_from_model(self.model, options)

    def _batch(self, places: Sequence[tuple[int, int]]) -> Any:
        """A batch with token 1 at each (sequence, position); the last token of each sequence has logits."""
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

    def _argmax(self, rows: int) -> list[int]:
        logits = self.lib.llama_get_logits(self.context)
        return np.ctypeslib.as_array(logits, (rows, self.vocab_size)).argmax(-1).tolist()


def write_gguf(source: Path, target: Path, dtype: str) -> None:
    """Copy a GGUF file with its matrices in `dtype` and its vectors in float32, as llama.cpp requires."""
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


def versions(options: argparse.Namespace) -> str:
    """The versions of jax and of the packages that the other runtimes need, for the first line of the output."""
    packages = {"torch": not options.alone, "transformers": not options.alone, "llama-cpp-python": options.llama_cpp}
    return ", ".join(f"{name} {version(name)}" for name in ["jax", *(name for name, used in packages.items() if used)])


def runtime_names(options: argparse.Namespace) -> list[str]:
    """The other runtimes that the options ask for."""
    return [*([] if options.alone else [Transformers.name]), *([LlamaCpp.name] if options.llama_cpp else [])]


def make_runtimes(files: ModelFiles, dtype: str, options: argparse.Namespace) -> list[OtherRuntime]:
    """The other runtimes that the options ask for, in the order of `runtime_names`."""
    makers: dict[str, Callable[[ModelFiles, str], OtherRuntime]] = {
        Transformers.name: Transformers,
        LlamaCpp.name: LlamaCpp,
    }
    return [makers[name](files, dtype) for name in runtime_names(options)]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of every benchmark that compares with other runtimes."""
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--alone", action="store_true", help="without transformers, which needs torch")
    parser.add_argument("--llama-cpp", action="store_true", help="also llama.cpp; needs llama-cpp-python")


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> argparse.Namespace:
    """Exit with an error if a runtime that the options ask for cannot run here."""
    if options.llama_cpp and find_spec("llama_cpp") is None:
        parser.error(
            "--llama-cpp must run in an environment with llama-cpp-python, but this one has none; "
            "pip install llama-cpp-python gguf"
        )
    if options.llama_cpp and open_model(options.model).path.suffix != ".gguf":
        parser.error(f"--llama-cpp must have a --model in a .gguf file, but has {options.model}; use smollm2-135m")
    return options
