"""The options of `simulate`, checked as far as possible without the model."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from dcpjax.api.checks import check_bool, check_choice, check_size, from_options, is_number
from dcpjax.api.config import CommBackend, Dtype
from dcpjax.planning.options import PlannedDtype, PlanOptions

Arrivals = Literal["trace", "all", "closed"]
PLANNED = (  # options that are passed on to the planner
    "tensor_parallel_size",
    "decode_context_parallel_size",
    "hardware",
    "dtype",
    "kv_cache_dtype",
    "block_size",
    "gpu_memory_utilization",
    "workspace_bytes",
    "kv_cache_memory_bytes",
    "dcp_comm_backend",
    "dcp_exchange_dtype",
    "dcp_replicate_q",
    "hf_overrides",
)


@dataclass(frozen=True, kw_only=True)
class SimOptions:
    """Options of `simulate`. Options that `LLM` or `plan` have too have the same names.

    Args:
        tensor_parallel_size: devices in all.
        decode_context_parallel_size: ranks that split the KV cache by token position.
        hardware: the device: b200, h200, h100, mi300x, tpu-v5p, tpu-v6e or cpu; or its numbers, such as
            memory=180GB,bandwidth=8TB/s,link=900GB/s (also latency=2us, flops=2250TFLOPS); or a name with changes,
            such as b200,memory=192GB.
        dtype: dtype of the weights. fp8 and nvfp4 (or fp4) can be simulated, but the engine cannot run them. "auto":
            what the engine would choose.
        kv_cache_dtype: dtype of the cache. "auto": that of the weights, or bfloat16 if the weights are quantised.
        arrivals: when requests arrive. "trace": at their recorded times; "all": all at once; "closed": a fixed number
            of users (`concurrency`) each send the next request of the trace when their last one is answered.
        concurrency: number of users for closed arrivals.
        speedup: how many times faster than recorded the requests arrive.
        max_num_seqs: most requests that run at once. None: `concurrency` if it is given, so that only the cache limits
            them, else 256.
        max_num_batched_tokens: most tokens in one step. None: 1024 on cpu, else 2048, as in the engine.
        max_mixed_prefill_tokens: most prompt tokens in a step that also decodes, for tokens at the beginning of a
            prompt; later ones cost more and count for more. None: 64 on cpu, else 512, as in the engine.
        block_size: tokens per cache block, counted over all ranks.
        enable_prefix_caching: reuse the cache of prompts that begin with the same tokens.
        gpu_memory_utilization: share of a device's memory to use.
        workspace_bytes: bytes set aside on each device for temporaries. None: an upper bound of what the
            engine's largest step needs.
        kv_cache_memory_bytes: bytes of the cache on each device. None: what weights and workspace leave.
        dcp_comm_backend: how ranks merge their partial attention: "ag_rs", "a2a" or "psum".
        dcp_exchange_dtype: dtype in which queries and partial outputs cross the links: "float32" or "bfloat16"; "auto"
            is bfloat16 on accelerators unless the weights are float32.
        dcp_replicate_q: keep the whole query projection on each rank; takes memory and saves one collective per layer.
        hf_overrides: entries of config.json to replace, such as {"num_hidden_layers": 2}; nested entries are merged.
    """

    tensor_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    hardware: str = "b200"
    dtype: PlannedDtype = "auto"
    kv_cache_dtype: PlannedDtype = "auto"
    arrivals: Arrivals = "trace"
    concurrency: int | None = None
    speedup: float = 1.0
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_mixed_prefill_tokens: int | None = None
    block_size: int = 256
    enable_prefix_caching: bool = True
    gpu_memory_utilization: float = 0.9
    workspace_bytes: int | None = None
    kv_cache_memory_bytes: int | None = None
    dcp_comm_backend: CommBackend = "ag_rs"
    dcp_exchange_dtype: Dtype = "auto"
    dcp_replicate_q: bool = False
    hf_overrides: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        PlanOptions(**self.plan_options())  # raises ValueError for what the planner refuses
        for name in ("concurrency", "max_num_seqs", "max_num_batched_tokens", "max_mixed_prefill_tokens"):
            if getattr(self, name) is not None:
                check_size(name, getattr(self, name))
        check_bool("enable_prefix_caching", self.enable_prefix_caching)
        check_choice("arrivals", self.arrivals, get_args(Arrivals))
        self._check_concurrency()
        self._check_speedup()

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> "SimOptions":
        """Build from keyword options, refusing an unknown one by name with the nearest valid one."""
        return from_options(cls, options)

    @property
    def seats(self) -> int:
        """Most requests that run at once: `max_num_seqs` with its default filled in."""
        return self.max_num_seqs or self.concurrency or 256

    def plan_options(self) -> dict[str, Any]:
        """The options of `plan`."""
        return {name: getattr(self, name) for name in PLANNED}

    def _check_concurrency(self) -> None:
        if self.arrivals == "closed" and self.concurrency is None:
            raise ValueError("concurrency must be given with arrivals=closed, but is not; use concurrency=64")
        if self.arrivals != "closed" and self.concurrency is not None:
            raise ValueError(
                f"concurrency must come with arrivals=closed, but arrivals is {self.arrivals!r}; use arrivals=closed, "
                f"or max_num_seqs={self.concurrency} to limit how many requests run at once"
            )

    def _check_speedup(self) -> None:
        value = self.speedup
        if not is_number(value) or not 0 < value < math.inf:
            raise ValueError(f"speedup must be a positive number, but is {value!r}; use 1")
        if value != 1 and self.arrivals != "trace":
            raise ValueError(f"speedup must be 1 with arrivals={self.arrivals}, but is {value}; use arrivals=trace")
