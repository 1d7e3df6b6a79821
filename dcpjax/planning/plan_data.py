"""The numbers of a plan: what requests ask for, what each legal layout holds and costs, and which layout is chosen."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dcpjax.models.config import ModelConfig
from dcpjax.models.exchange import Exchange
from dcpjax.planning.floor import Floor, StepCost
from dcpjax.planning.hardware import Hardware
from dcpjax.planning.options import RUNNABLE, PlanOptions


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What one request needs of the cache, in tokens."""

    context_length: int
    output_length: int
    unique_token_fraction: float  # share of the prompt that no other request has

    @property
    def length(self) -> int:
        return self.context_length + self.output_length

    @property
    def mean_length(self) -> float:
        """Tokens that a request has in the cache, averaged over its decode steps."""
        return self.context_length + self.output_length / 2

    def shared_blocks(self, block_size: int) -> int:
        """Whole blocks of the prefix that all requests have in common."""
        return math.floor(self.context_length * (1 - self.unique_token_fraction) / block_size)

    def own_blocks(self, block_size: int) -> int:
        """Blocks that each request needs besides the shared ones."""
        return max(1, -(-self.length // block_size) - self.shared_blocks(block_size))


@dataclass(frozen=True, kw_only=True)
class LayoutRow:
    """One legal layout: its bytes, what fits, and the lower bound of its step time."""

    tp: int
    dcp: int
    copies: int  # number of devices that store each cached value
    block_size: int  # tokens
    weight_bytes: int  # per device
    block_bytes: int  # of one cache block, per device
    num_blocks: int  # 0 if the weights leave no memory
    workspace_bytes: int  # per device, for temporaries
    memory_needed: int  # bytes per device: weights, workspace and cache
    demand: Demand
    exchanges: Mapping[str, Exchange]  # per layer and query token, by merge
    cost: StepCost
    floor: Floor | None  # of a step with `requests` or `concurrency` requests, the fewer; None if not even one fits
    faster_from_requests: int | None = None  # than dcp=1, at this context; None: never, or dcp=1 is illegal
    faster_from_context: int | None = None  # than dcp=1, with one request

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of a block on one device divided by the block's tokens; not always a whole number."""
        return self.block_bytes / self.block_size

    @property
    def tokens(self) -> int:
        """Tokens that the cache holds."""
        return self.num_blocks * self.block_size

    @property
    def requests(self) -> int:
        """Number of requests that fit at once. Only memory counts; the engine's `max_num_seqs` may allow fewer."""
        free = self.num_blocks - self.demand.shared_blocks(self.block_size)
        return max(0, free) // self.demand.own_blocks(self.block_size)

    def usage(self, requests: int) -> float:
        """Share of the blocks that this many requests take; above 1 if they do not fit."""
        if not self.num_blocks:
            return math.inf
        taken = self.demand.shared_blocks(self.block_size) + requests * self.demand.own_blocks(self.block_size)
        return taken / self.num_blocks


@dataclass(frozen=True, kw_only=True)
class PlanData:
    """What fits on each legal layout of one model on one kind of hardware."""

    model: str
    config: ModelConfig
    options: PlanOptions
    hardware: Hardware  # of one device
    dtype: str
    kv_cache_dtype: str
    demand: Demand
    checkpoint_bytes: int
    rows: tuple[LayoutRow, ...]  # by rising dcp
    chosen_dcp: int

    @property
    def row(self) -> LayoutRow:
        """The row of `chosen_dcp`: the layout asked for, or the useful one."""
        return next(row for row in self.rows if row.dcp == self.chosen_dcp)

    @property
    def useful_dcp(self) -> int:
        return useful_dcp(self.rows)

    @property
    def memory_limit(self) -> float:
        """Bytes of each device that may be used."""
        return self.hardware.memory * self.options.gpu_memory_utilization

    @property
    def fits(self) -> bool:
        row = self.row
        return row.requests >= (self.options.concurrency or 1) and row.memory_needed <= self.memory_limit

    @property
    def runs_here(self) -> bool:
        """Whether the engine computes with these dtypes; others can only be planned."""
        return self.dtype in RUNNABLE and self.kv_cache_dtype in RUNNABLE


def useful_dcp(rows: Sequence[LayoutRow]) -> int:
    """The smallest dcp with the fewest copies: more ranks would add exchange and save no memory."""
    return min(rows, key=lambda row: (row.copies, row.dcp)).dcp
