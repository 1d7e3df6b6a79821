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

    @property
    def packs(self) -> bool:
        """Whether whole heads go to each rank, so that a head's lse can be sent with its values."""
        return self.heads % self.ranks == 0 and self.features == self.heads * self.head_dim


def send(kind: CollectiveKind, floats: float, ranks: int) -> Send:
    """A collective of n ranks, each of which puts in so many float32 values. Bytes that each must send at least:

    all-gather      (n - 1) x own input         all-to-all   (n - 1) / n x own input
    reduce-scatter  (n - 1) / n x own input     all-reduce   2 (n - 1) / n x own input
    """
    factor = {"all_gather": ranks, "reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2}[kind]
    return Send(kind, factor * (ranks - 1) / ranks * FLOAT32 * floats)


def sends(merge: Merge, size: MergeSize) -> tuple[Send, ...]:
    """The collectives of one merge, as compiled: XLA joins psum's all-reduces of weights and of values into one."""
    lse, out, padded = size.rows * size.heads, size.rows * size.heads * size.head_dim, size.rows * size.features
    if merge == "ag_rs":
        return send("all_gather", lse, size.ranks), send("reduce_scatter", padded, size.ranks)
    if merge == "psum":
        return send("all_reduce", lse, size.ranks), send("all_reduce", lse + out, size.ranks)
    if size.packs:
        return (send("all_to_all", lse + out, size.ranks),)
    return send("all_to_all", padded, size.ranks), send("all_gather", lse, size.ranks)


def seconds(merge: Merge, size: MergeSize, link: Link) -> float:
    """The time of one merge."""
    speeds = [(getattr(link, one.kind), one.bytes) for one in sends(merge, size)]
    return sum(speed.latency + sent / speed.bandwidth for speed, sent in speeds)


def fastest(size: MergeSize, link: Link | None) -> Merge:
    """The merge of the shortest time; "ag_rs" if two tie or if the link is unknown."""
    return "ag_rs" if link is None else min(MERGE_NAMES, key=lambda merge: seconds(merge, size, link))
