"""The options of `plan`, checked as far as possible without the model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from dcpjax.api.checks import check_choice, check_share, check_size, from_options
from dcpjax.api.config import CommBackend, Dtype
from dcpjax.planning.hardware import find_hardware

PlannedDtype = Literal["auto", "float32", "bfloat16", "fp8", "nvfp4", "f32", "bf16", "fp4"]
SPELLINGS = {"f32": "float32", "bf16": "bfloat16", "fp4": "nvfp4"}
RUNNABLE = ("float32", "bfloat16")  # the engine computes with these; the others can only be planned


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of `plan`. Options that `LLM` has too have the same names.

    Args:
        tensor_parallel_size: devices in all.
        decode_context_parallel_size: ranks that split the KV cache by token position. None: the smallest number that
            stores the fewest copies of the cache.
        hardware: the device: b200, h200, h100, mi300x, tpu-v5p, tpu-v6e or cpu; or its numbers, such as
            memory=180GB,bandwidth=8TB/s,link=900GB/s (also latency=2us, flops=2250TFLOPS); or a name with changes,
            such as b200,memory=192GB.
        dtype: dtype of the weights. fp8 and nvfp4 (or fp4) can be planned, but the engine cannot run them. "auto": what
            the engine would choose.
        kv_cache_dtype: dtype of the cache. "auto": that of the weights, or bfloat16 if the weights are quantised.
        context_length: tokens of each prompt. None: 32768, or as many as the model and `output_length` allow.
        output_length: tokens of each completion. None: 1024, or as many as the model allows.
        unique_token_fraction: share of each prompt that no other request has; the rest is a prefix that all requests
            have in common, stored once.
        concurrency: requests that must run at once. None: as many as fit.
        block_size: tokens per cache block, counted over all ranks.
        gpu_memory_utilization: share of a device's memory to use.
        workspace_bytes: bytes set aside on each device for temporaries. None: an upper bound of what the
            engine's largest step needs.
        kv_cache_memory_bytes: bytes of the cache on each device. None: what weights and workspace leave; on cpu the
            engine's default.
        dcp_comm_backend: how ranks merge their partial attention: "ag_rs", "a2a" or "psum".
        dcp_exchange_dtype: dtype in which queries and partial outputs cross the links: "float32" or "bfloat16"; "auto"
            is bfloat16 on accelerators unless the weights are float32.
        dcp_replicate_q: keep the whole query projection on each rank; takes memory and saves one collective per layer.
        hf_overrides: entries of config.json to replace, such as {"num_hidden_layers": 2}; nested entries are merged.
    """

    tensor_parallel_size: int = 1
    decode_context_parallel_size: int | None = None
    hardware: str = "b200"
    dtype: PlannedDtype = "auto"
    kv_cache_dtype: PlannedDtype = "auto"
    context_length: int | None = None
    output_length: int | None = None
    unique_token_fraction: float = 1.0
    concurrency: int | None = None
    block_size: int = 256
    gpu_memory_utilization: float = 0.9
    workspace_bytes: int | None = None
    kv_cache_memory_bytes: int | None = None
    dcp_comm_backend: CommBackend = "ag_rs"
    dcp_exchange_dtype: Dtype = "auto"
    dcp_replicate_q: bool = False
    hf_overrides: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_size", "block_size"):
            check_size(name, getattr(self, name))
        for name in ("decode_context_parallel_size", "context_length", "concurrency", "kv_cache_memory_bytes"):
            if getattr(self, name) is not None:
                check_size(name, getattr(self, name))
        if self.workspace_bytes is not None:
            check_size("workspace_bytes", self.workspace_bytes, 0)
        if self.output_length is not None:
            check_size("output_length", self.output_length, 0)
        find_hardware(self.hardware)  # raises for what is none
        check_choice("dtype", self.dtype, get_args(PlannedDtype))
        check_choice("kv_cache_dtype", self.kv_cache_dtype, get_args(PlannedDtype))
        check_choice("dcp_comm_backend", self.dcp_comm_backend, get_args(CommBackend))
        check_choice("dcp_exchange_dtype", self.dcp_exchange_dtype, get_args(Dtype))
        check_share("unique_token_fraction", self.unique_token_fraction, zero_allowed=True)
        check_share("gpu_memory_utilization", self.gpu_memory_utilization)

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> "PlanOptions":
        """Build from keyword options, refusing an unknown one by name with the nearest valid one."""
        return from_options(cls, options)
