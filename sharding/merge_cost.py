"""The cost model of collectives: bytes that each device sends, per collective and per merge, and the time that takes.

A collective takes a latency plus its bytes divided by a bandwidth (Hockney 1994); each kind of collective has its own
two numbers. "auto" chooses the merge while a step is traced: shapes are known then and the link is the same on every
rank, so the choice costs nothing while steps run and is the same on every rank. The planner counts with the same
functions.
"""

from typing import Literal, NamedTuple, get_args

FLOAT32 = 4

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_to_all", "all_reduce"]
Merge = Literal["ag_rs", "a2a", "psum"]
MERGE_NAMES: tuple[Merge, ...] = get_args(Merge)


class CollectiveSpeed(NamedTuple):
    """How long one kind of collective takes on one mesh."""

    latency: float  # seconds, for any size
    bandwidth: float  # bytes per second that each device sends


class Link(NamedTuple):
    """The speed of each kind of collective between the devices of a dcp group."""

    all_gather: CollectiveSpeed
    reduce_scatter: CollectiveSpeed
    all_to_all: CollectiveSpeed
    all_reduce: CollectiveSpeed


class Send(NamedTuple):
    """One collective and what it sends."""

    kind: CollectiveKind
    bytes: float  # that each device sends


class MergeSize(NamedTuple):
    """What each device of a dcp group puts into a merge: out [rows, heads, head_dim] and lse [rows, heads]."""

    rows: int
    heads: int
    head_dim: int
    features: int  # heads * head_dim, padded so that ranks divide it
    ranks: int
    value_bytes: int = FLOAT32  # of each value of out; lse is float32

    @property
    def packs(self) -> bool:
        """Whether whole heads go to each rank, so that a head's lse can be sent with its values of the same dtype."""
        whole_heads = self.heads % self.ranks == 0 and self.features == self.heads * self.head_dim
        return whole_heads and self.value_bytes == FLOAT32


def send(kind: CollectiveKind, values: float, ranks: int, value_bytes: float = FLOAT32) -> Send:
    """A collective of n ranks, each of which puts in so many values. Bytes that each must send at least:

    all-gather      (n - 1) x own input         all-to-all   (n - 1) / n x own input
    reduce-scatter  (n - 1) / n x own input     all-reduce   2 (n - 1) / n x own input
    """
    factor = {"all_gather": ranks, "reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2}[kind]
    return Send(kind, factor * (ranks - 1) / ranks * value_bytes * values)


def sends(merge: Merge, size: MergeSize) -> tuple[Send, ...]:
    """The collectives of one merge, as compiled: XLA joins psum's all-reduces of weights and of values into one."""
    lse, out, padded = size.rows * size.heads, size.rows * size.heads * size.head_dim, size.rows * size.features
    gather_lse = send("all_gather", lse, size.ranks)
    if merge == "ag_rs":
        return gather_lse, send("reduce_scatter", padded, size.ranks, size.value_bytes)
    if merge == "psum" and size.value_bytes == FLOAT32:
        return send("all_reduce", lse, size.ranks), send("all_reduce", lse + out, size.ranks)
    if merge == "psum":
        two_sums = send("all_reduce", lse, size.ranks), send("all_reduce", lse, size.ranks)
        return *two_sums, send("all_reduce", out, size.ranks, size.value_bytes)
    if size.packs:
        return (send("all_to_all", lse + out, size.ranks),)
    return send("all_to_all", padded, size.ranks, size.value_bytes), gather_lse


def time_of(one: Send, link: Link) -> float:
    """Seconds of one collective."""
    speed: CollectiveSpeed = getattr(link, one.kind)
    return speed.latency + one.bytes / speed.bandwidth


def seconds(merge: Merge, size: MergeSize, link: Link) -> float:
    """The time of one merge."""
    return sum(time_of(one, link) for one in sends(merge, size))


def fastest(size: MergeSize, link: Link | None) -> Merge:
    """The merge of the shortest time; "ag_rs" if two tie or if the link is unknown."""
    return "ag_rs" if link is None else min(MERGE_NAMES, key=lambda merge: seconds(merge, size, link))
