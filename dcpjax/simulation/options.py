"""What a user asks the simulator, checked as far as it can be without the model. Numbers and names only."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from dcpjax.api.checks import check_bool, check_choice, check_size, from_options, is_number
from dcpjax.api.config import CommBackend
from dcpjax.planning.options import PlannedDtype, PlanOptions

Arrivals = Literal["trace", "all", "closed"]
PLANNED = (  # what the planner is asked too
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
    "dcp_replicate_q",
    "hf_overrides",
)


@dataclass(frozen=True, kw_only=True)
class SimOptions:
    """Options of `simulate`. Names are those of `LLM` and `plan` where they have them.

    Args:
        tensor_parallel_size: devices in all.
        decode_context_parallel_size: ranks that split the KV cache by token position.
        hardware: b200, h200, h100, mi300x, tpu-v5p, tpu-v6e or cpu; or numbers of one device, as
            memory=180GB,bandwidth=8TB/s,link=900GB/s, also latency=2us, flops=2250TFLOPS; or a name and what differs.
        dtype: of the weights; fp8 and nvfp4 (fp4) can be simulated, but the engine cannot run them. "auto" is what
            the engine takes.
        kv_cache_dtype: of the cache; "auto" is that of the weights, bfloat16 where those are quantised.
        arrivals: when requests come: "trace" at their recorded times, "all" at once, "closed" from `concurrency`
            users who each send the next request of the trace when their last is answered.
        concurrency: users of closed arrivals.
        speedup: how much faster than recorded requests come.
        max_num_seqs: most requests that run at once. None: 256, or `concurrency`, so that the cache alone decides.
        max_num_batched_tokens: most tokens in one step. None: 1024 on cpu, else 2048, as in the engine.
        max_mixed_prefill_tokens: most prompt tokens in a step that also decodes, counted as at the beginning of a
            prompt. None: 64 on cpu, else 512, as in the engine.
        block_size: tokens per cache block, counted over all ranks.
        enable_prefix_caching: share the cache of equal beginnings of prompts.
        gpu_memory_utilization: share of a device's memory to use.
        workspace_bytes: of each device, for activations and the runtime.
        kv_cache_memory_bytes: cache size per device. None: what weights and workspace leave.
        dcp_comm_backend: how ranks merge their partial attention: "ag_rs", "a2a" or "psum".
        dcp_replicate_q: keep the query projection whole on each rank: memory for one collective less.
        hf_overrides: entries of config.json to replace, as {"num_hidden_layers": 2}; nested ones are merged.
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
    workspace_bytes: int = 0
    kv_cache_memory_bytes: int | None = None
    dcp_comm_backend: CommBackend = "ag_rs"
    dcp_replicate_q: bool = False
    hf_overrides: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        PlanOptions(**self.planned())  # refuses what the planner refuses
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
        """Most requests that run at once."""
        return self.max_num_seqs or self.concurrency or 256

    def planned(self) -> dict[str, Any]:
        """The options that the planner has too."""
        return {name: getattr(self, name) for name in PLANNED}

    def _check_concurrency(self) -> None:
        if self.arrivals == "closed" and self.concurrency is None:
            raise ValueError("concurrency must be given where arrivals=closed, but is not; use concurrency=64")
        if self.arrivals != "closed" and self.concurrency is not None:
            raise ValueError(
                f"concurrency must go with arrivals=closed, but arrivals is {self.arrivals!r}; use arrivals=closed, "
                f"or max_num_seqs={self.concurrency} to limit what runs at once"
            )

    def _check_speedup(self) -> None:
        value = self.speedup
        if not is_number(value) or not 0 < value < math.inf:
            raise ValueError(f"speedup must be a positive number, but is {value!r}; use 1")
        if value != 1 and self.arrivals != "trace":
            raise ValueError(f"speedup must be 1 where arrivals={self.arrivals}, but is {value}; use arrivals=trace")
