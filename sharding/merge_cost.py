"""What merging over `dcp` costs: which collectives each merge runs, what each device sends, how long that takes.

Bytes are float32 and what each device must send at least, the dcp group having n ranks:

    all-gather      (n - 1) x own part          all-to-all   (n - 1) / n x own input
    reduce-scatter  (n - 1) / n x own input     all-reduce   2 (n - 1) / n x own input

A collective takes a latency and its bytes over a bandwidth (Hockney 1994), each kind its own. Shapes are known when
a step is traced and links are the same for every rank, so a choice made here costs a step nothing and cannot differ
between ranks. Numbers only; runs nothing, knows nothing about models or meshes.
"""

from typing import Literal, NamedTuple, get_args

FLOAT32 = 4

Kind = Literal["all_gather", "reduce_scatter", "all_to_all", "all_reduce"]
Merge = Literal["ag_rs", "a2a", "psum"]
MERGE_NAMES: tuple[Merge, ...] = get_args(Merge)


class Pace(NamedTuple):
    """How long one kind of collective takes on one mesh."""

    latency: float  # seconds, however small
    bandwidth: float  # bytes per second that each device sends


class Link(NamedTuple):
    """How devices of a dcp group are joined."""

    all_gather: Pace
    reduce_scatter: Pace
    all_to_all: Pace
    all_reduce: Pace


class Send(NamedTuple):
    """One collective of a merge."""

    kind: Kind
    bytes: float  # that each device sends


class MergeSize(NamedTuple):
    """What each device of a dcp group brings to a merge: out [rows, heads, head_dim] and lse [rows, heads]."""

    rows: int
    heads: int
    head_dim: int
    features: int  # heads * head_dim, padded so that ranks divide it
    ranks: int

    @property
    def packs(self) -> bool:
        """Whether whole heads go to each rank, so that a head's lse can travel with its values."""
        return self.heads % self.ranks == 0 and self.features == self.heads * self.head_dim


def sends(merge: Merge, size: MergeSize) -> tuple[Send, ...]:
    """The collectives of one merge, as they are compiled: all-reduces of weights and values become one."""
    share = (size.ranks - 1) / size.ranks * FLOAT32
    lse, out, padded = size.rows * size.heads, size.rows * size.heads * size.head_dim, size.rows * size.features
    gather_lse = Send("all_gather", size.ranks * share * lse)
    if merge == "ag_rs":
        return gather_lse, Send("reduce_scatter", share * padded)
    if merge == "psum":
        return Send("all_reduce", 2 * share * lse), Send("all_reduce", 2 * share * (lse + out))
    if size.packs:
        return (Send("all_to_all", share * (lse + out)),)
    return Send("all_to_all", share * padded), gather_lse


def seconds(merge: Merge, size: MergeSize, link: Link) -> float:
    """What the cost model says of one merge."""
    paces = [(getattr(link, send.kind), send.bytes) for send in sends(merge, size)]
    return sum(pace.latency + sent / pace.bandwidth for pace, sent in paces)


def fastest(size: MergeSize, link: Link | None) -> Merge:
    """The merge that should take the shortest; "ag_rs" where two tie or nothing is known of the link."""
    return "ag_rs" if link is None else min(MERGE_NAMES, key=lambda merge: seconds(merge, size, link))
