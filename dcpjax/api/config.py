"""Options of an engine, checked before any heavy work."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from dcpjax.api.checks import (
    check_bool,
    check_choice,
    check_integer,
    check_option_names,
    check_share,
    check_size,
    option_names,
)
from dcpjax.api.vllm_options import ENGINE, without_neutral

Dtype = Literal["auto", "float32", "bfloat16"]
CommBackend = Literal["ag_rs", "a2a", "psum"]
CommChoice = Literal[CommBackend, "auto"]
AttentionBody = Literal["auto", "loop", "pallas"]
LoadFormat = Literal["auto", "dummy"]
SchedulingPolicy = Literal["fcfs", "priority"]
Warmup = Literal["none", "decode", "all"]

# vLLM's names for values that are called otherwise here.
_DTYPES = {"half": "bfloat16", "float16": "bfloat16", "float": "float32"}
_OTHER_NAMES = {
    "dtype": _DTYPES,
    "kv_cache_dtype": _DTYPES,
    "load_format": {"safetensors": "auto", "hf": "auto"},
}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options of `LLM`. Names are those of vLLM where it has them.

    Args:
        tensor_parallel_size: number of devices.
        decode_context_parallel_size: ranks that split the KV cache by token position; divides
            `tensor_parallel_size`.
        tokenizer: where the tokenizer comes from, as `model`; None: from the model.
        dtype: of the weights; "auto" takes the checkpoint's. float16, also called half, becomes bfloat16.
        max_model_len: most tokens of prompt and completion together. None: what the model and the cache allow.
        max_num_seqs: most requests that run at once.
        max_num_batched_tokens: most tokens in one step; longer prompts run in several. None: 1024 on CPU, else 2048.
        max_mixed_prefill_tokens: most prompt tokens in a step that also decodes, so that running requests need not
            wait long for their next token. Tokens far into a prompt attend to more, cost more and count for more,
            but one prompt always advances by 8, or by this if it is fewer. None: while a streamed request decodes,
            what steps of 32 or 64 tokens leave on CPU, else 512; no limit while none does.
        block_size: tokens per cache block, counted over all ranks.
        enable_prefix_caching: reuse the cache of prompts that begin with the same tokens.
        scheduling_policy: "fcfs" runs requests in order of arrival; "priority" those with the lowest `priority` first.
        async_scheduling: schedule the next step while the current one runs.
        num_decode_steps: most decode steps that one call runs on the device while there is nothing but decodes to do,
            so that host and launch are paid once for all of them. The tokens are the same, and come so many at a time.
            A waiting prompt makes it 1, and so does an option of a running request that looks back at its tokens:
            penalties, bad words, structured outputs, min_tokens until reached. "auto" is 8 on accelerators while no
            request is streamed; else 1, because programs of several steps compile beside those of one.
        max_logprobs: most log-probabilities per token that a request may ask for; -1 allows the whole vocabulary.
        kv_cache_memory_bytes: cache size per device. None: on CPU 1 GiB divided by the number of devices, elsewhere
            what `gpu_memory_utilization` leaves after the weights and the temporaries of the largest step.
        gpu_memory_utilization: share of an accelerator's memory to use, at most what XLA reserves: of a GPU 75 %, or
            what the environment variable XLA_CLIENT_MEM_FRACTION says.
        kv_cache_dtype: "auto" is that of the weights.
        dcp_comm_backend: how ranks merge their partial attention: "ag_rs", "a2a" or "psum"; "auto" takes for each
            step shape the one that is fastest by the measured speed of the links between devices ("ag_rs" on CPU).
        dcp_exchange_dtype: dtype in which queries and partial outputs cross the links: "float32", or "bfloat16" for
            half the bytes; "auto" is bfloat16 on accelerators unless the model is float32. Cached keys are always sent
            as they are stored, and log-sum-exps in float32.
        attention_body: what computes attention: "pallas" is the kernel for GPUs and TPUs, "loop" plain XLA operations;
            "auto" takes the kernel where the shapes suit it and warns where they do not, and on CPUs the kernels of
            the extra `cpu`.
        dcp_overlap: merge the decodes of a step in two halves, so that one half's exchange can hide behind the other's
            attention.
        dcp_replicate_q: keep the whole query projection on each rank: more memory, one collective less per layer.
        cp_kv_cache_interleave_size: consecutive positions that one rank stores.
        seed: of the engine; the seeds of requests without one are derived from it.
        load_format: "dummy" fills the weights with random numbers and reads no weight file.
        hf_overrides: entries of config.json to replace, such as {"max_position_embeddings": 8192}; nested ones merge.
        compilation_cache: keep compiled programs between runs; True for the user's cache folder, or a folder. The
            first `LLM` of a process decides.
        warmup: which programs are compiled before the first request: "none", each at its first use; "decode", those
            of steps that only decode; "all", those of prompts too. Sampling is compiled for greedy requests only.
    """

    tensor_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    tokenizer: str | os.PathLike[str] | None = None
    dtype: Dtype = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    max_mixed_prefill_tokens: int | None = None
    block_size: int = 256
    enable_prefix_caching: bool = True
    scheduling_policy: SchedulingPolicy = "fcfs"
    async_scheduling: bool = True
    num_decode_steps: int | Literal["auto"] = "auto"
    max_logprobs: int = 20
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_dtype: Dtype = "auto"
    dcp_comm_backend: CommChoice = "ag_rs"
    dcp_exchange_dtype: Dtype = "auto"
    attention_body: AttentionBody = "auto"
    dcp_overlap: bool = False
    dcp_replicate_q: bool = False
    cp_kv_cache_interleave_size: int = 1
    seed: int = 0
    load_format: LoadFormat = "auto"
    hf_overrides: Mapping[str, Any] | None = None
    compilation_cache: bool | str | os.PathLike[str] = True
    warmup: Warmup = "none"

    def __post_init__(self) -> None:
        for name in (
            "tensor_parallel_size",
            "decode_context_parallel_size",
            "max_num_seqs",
            "block_size",
            "cp_kv_cache_interleave_size",
        ):
            check_size(name, getattr(self, name))
        for name in ("max_model_len", "max_num_batched_tokens", "max_mixed_prefill_tokens", "kv_cache_memory_bytes"):
            if getattr(self, name) is not None:
                check_size(name, getattr(self, name))
        if self.num_decode_steps != "auto":
            check_size("num_decode_steps", self.num_decode_steps)
        check_choice("dtype", self.dtype, get_args(Dtype))
        check_choice("kv_cache_dtype", self.kv_cache_dtype, get_args(Dtype))
        check_choice("dcp_comm_backend", self.dcp_comm_backend, get_args(CommChoice))
        check_choice("dcp_exchange_dtype", self.dcp_exchange_dtype, get_args(Dtype))
        check_choice("attention_body", self.attention_body, get_args(AttentionBody))
        check_choice("load_format", self.load_format, get_args(LoadFormat))
        check_choice("scheduling_policy", self.scheduling_policy, get_args(SchedulingPolicy))
        check_choice("warmup", self.warmup, get_args(Warmup))
        check_integer("seed", self.seed)
        check_integer("max_logprobs", self.max_logprobs, -1)
        check_share("gpu_memory_utilization", self.gpu_memory_utilization)
        for name in ("dcp_overlap", "dcp_replicate_q", "enable_prefix_caching", "async_scheduling"):
            check_bool(name, getattr(self, name))
        if not isinstance(self.tokenizer, str | os.PathLike | None):
            raise ValueError(f"tokenizer must be a folder, a .gguf file or a hub id, but is {self.tokenizer!r}")
        if self.hf_overrides is not None and not isinstance(self.hf_overrides, Mapping):
            raise ValueError(f"hf_overrides must be a dict of config.json's entries, but is {self.hf_overrides!r}")
        if not isinstance(self.compilation_cache, bool | str | os.PathLike):
            raise ValueError(f"compilation_cache must be True, False or a folder, but is {self.compilation_cache!r}")
        self._check_division()

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> "EngineConfig":
        """Build from keyword options; None is the same as leaving one out.

        vLLM's other options are accepted where they change nothing. An unknown one is refused by name with the nearest
        valid one.
        """
        given = without_neutral(options, ENGINE)
        check_option_names(given, option_names(cls))
        return cls(**{name: _in_our_words(name, value) for name, value in given.items() if value is not None})

    def _check_division(self) -> None:
        devices, dcp = self.tensor_parallel_size, self.decode_context_parallel_size
        if devices % dcp:
            divisors = [size for size in range(1, devices + 1) if devices % size == 0]
            raise ValueError(
                f"decode_context_parallel_size must divide tensor_parallel_size={devices}, but is {dcp}; "
                f"use one of {', '.join(map(str, divisors))}"
            )
        unit = dcp * self.cp_kv_cache_interleave_size
        if self.block_size % unit:
            raise ValueError(
                f"block_size must be a multiple of decode_context_parallel_size * cp_kv_cache_interleave_size "
                f"= {dcp} * {self.cp_kv_cache_interleave_size} = {unit}, but is {self.block_size}; "
                f"use {max(1, round(self.block_size / unit)) * unit}"
            )


def _in_our_words(name: str, value: Any) -> Any:
    """vLLM's other names of a value, and the dtypes of torch, become ours."""
    if name not in _OTHER_NAMES or not (isinstance(value, str) or str(value).startswith("torch.")):
        return value
    plain = str(value).removeprefix("torch.")
    return _OTHER_NAMES[name].get(plain, plain)
