"""What attention sends over dcp, per layer: counted from the shapes in `gqa`, `mla` and `merge`.

A decode gathers its query and merges its partials. A chunk of a prompt may gather the cached keys instead (see
`attention.gathered_keys`): `PromptExchange` says which of the two is cheaper. The engine, the planner and the simulator
count with the same functions.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from dcpjax.models.attention.gathered_keys import OwnHeads, own_heads
from dcpjax.models.attention.up_projected import NEVER, up_projection_threshold
from dcpjax.models.config import ModelConfig
from dcpjax.sharding.merge_cost import FLOAT32, Link, Merge, MergeSize, Send, fastest, send, sends, time_of
from dcpjax.sharding.mesh import Layout

# Positions that are gathered together: on CPU many virtual devices share one memory, elsewhere latency counts more.
PIECE_POSITIONS = {"cpu": 2_048}
ACCELERATOR_PIECE_POSITIONS = 8_192

MergeChoice = Merge | Literal["auto"]
ExchangeDtype = Literal["float32", "bfloat16"]


def exchange_dtype(choice: str, dtype: str, platform: str) -> ExchangeDtype:
    """In which queries and partial outputs are sent, where the user chose "auto" or one of the two."""
    if choice == "auto":
        return "float32" if platform == "cpu" or dtype == "float32" else "bfloat16"
    assert choice in ("float32", "bfloat16"), choice
    return choice


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What each device sends over `dcp` in the attention of one layer, for each query token."""

    query_bytes: float  # to gather the queries
    merge_bytes: float  # to merge the partials
    collectives: int

    @property
    def bytes(self) -> float:
        return self.query_bytes + self.merge_bytes


class _Widths(NamedTuple):
    """Of what a dcp group exchanges for one token."""

    query: int  # features of the gathered query
    value: int  # of one head's output
    features: int  # of all outputs, padded


def exchange(
    config: ModelConfig, layout: Layout, merge: Merge, *, replicate_q: bool = False, value_bytes: int = FLOAT32
) -> Exchange:
    """Per device, layer and query token, with queries gathered. `value_bytes`: of queries and outputs."""
    if layout.dcp == 1:
        return Exchange(query_bytes=0, merge_bytes=0, collectives=0)
    queries, merging = _sends(_widths(config, layout), config, layout, merge, 1, replicate_q, value_bytes)
    return Exchange(
        query_bytes=sum(one.bytes for one in queries),
        merge_bytes=sum(one.bytes for one in merging),
        collectives=len(merging) + len(queries),
    )


def _sends(
    widths: _Widths,
    config: ModelConfig,
    layout: Layout,
    merge: MergeChoice,
    tokens: int,
    replicate_q: bool,
    value_bytes: int,
    link: Link | None = None,
) -> tuple[tuple[Send, ...], tuple[Send, ...]]:
    """The gather of the queries of some tokens, and the merge of their partials."""
    ranks = layout.dcp
    size = MergeSize(tokens, config.num_heads // layout.tp, widths.value, widths.features, ranks, value_bytes)
    merge = fastest(size, link) if merge == "auto" else merge
    gather = send("all_gather", tokens * (widths.query // ranks), ranks, value_bytes)
    return () if replicate_q else (gather,), sends(merge, size)


def _widths(config: ModelConfig, layout: Layout) -> _Widths:
    """Of tokens whose latent attention is absorbed, if it is latent."""
    heads, mla = config.num_heads // layout.tp, config.mla
    if mla is not None:
        return _Widths(heads * mla.cached_dim, mla.latent_rank, heads * mla.latent_rank)
    features = -(-heads * config.head_dim // layout.dcp) * layout.dcp
    return _Widths(features, config.head_dim, features)


@dataclass(frozen=True, kw_only=True)
class PromptExchange:
    """The two ways in which chunks of prompts attend over a dcp group, and what each costs a device and layer."""

    config: ModelConfig
    layout: Layout
    merge: MergeChoice
    positions: int  # gathered together
    key_bytes: float  # of one cached value
    replicate_q: bool = False
    value_bytes: int = FLOAT32  # of each value of gathered queries and merged outputs
    up_projected_from: int = NEVER  # tokens of a chunk whose latent attention is up-projected when queries are gathered
    link: Link | None = None  # None: bytes are compared

    @classmethod
    def of(
        cls, config: ModelConfig, layout: Layout, platform: str, merge: MergeChoice, key_bytes: float, **options: Any
    ) -> "PromptExchange | None":
        """For a model on a platform; None if there is nothing to exchange. `options`: other fields."""
        if layout.dcp == 1:
            return None
        on_cpu = platform == "cpu"  # elsewhere a kernel takes absorbed prompts
        return cls(
            config=config,
            layout=layout,
            merge=merge,
            positions=PIECE_POSITIONS.get(platform, ACCELERATOR_PIECE_POSITIONS),
            key_bytes=key_bytes,
            up_projected_from=up_projection_threshold(config.mla) if config.mla and on_cpu else NEVER,
            **options,
        )

    def keys_travel(self, cached: int, new: int) -> bool:
        """Whether keys are gathered for `new` tokens of a request of which `cached` tokens are in the cache.

        It depends on nothing else, so it is the same on every rank.
        """
        return self._cost(self.key_sends(cached, new)) <= self._cost(self.query_sends(new))

    def query_sends(self, new: int) -> tuple[Send, ...]:
        """What is sent if the queries of `new` tokens are gathered."""
        widths, mla = _widths(self.config, self.layout), self.config.mla
        weights: tuple[Send, ...] = ()
        if mla is not None and new >= self.up_projected_from:
            heads = self.config.num_heads // self.layout.tp
            widths = _Widths(heads * mla.qk_dim, mla.value_dim, heads * mla.value_dim)
            gathered = mla.latent_rank * (mla.value_dim + (0 if self.replicate_q else mla.nope_dim))
            weights = (send("all_gather", heads // self.layout.dcp * gathered, self.layout.dcp),)
        parts = _sends(widths, self.config, self.layout, self.merge, new, self.replicate_q, self.value_bytes, self.link)
        return (*parts[0], *parts[1], *weights)

    def key_sends(self, cached: int, new: int) -> tuple[Send, ...]:
        """What is sent if the keys of `cached` tokens are gathered."""
        pieces = -(-cached // self.positions)
        return (*self._query_parts(new), *(pieces * (self.piece_send,)))

    @property
    def piece_send(self) -> Send:
        """What is sent to gather one piece of the cache."""
        ranks, slots = self.layout.dcp, self.positions / self.layout.dcp
        if self.config.mla is not None:
            return send("all_gather", slots * self.config.mla.cached_dim, ranks, self.key_bytes)
        read, held = self._own_heads.kv_heads.shape[1], self._kv_heads
        one_head = slots * 2 * self.config.head_dim
        if read < held:
            return send("all_to_all", ranks * read * one_head, ranks, self.key_bytes)
        return send("all_gather", held * one_head, ranks, self.key_bytes)

    @property
    def piece_bytes(self) -> float:
        """Of a gathered piece on each device."""
        mla = self.config.mla
        width = mla.cached_dim if mla else self._own_heads.kv_heads.shape[1] * 2 * self.config.head_dim
        return self.positions * width * self.key_bytes

    def _query_parts(self, new: int) -> tuple[Send, ...]:
        """A rank whose features are not whole heads needs queries of other ranks even so."""
        if self.config.mla is not None or self.replicate_q or self._own_heads.are_whole:
            return ()
        features = _widths(self.config, self.layout).query // self.layout.dcp
        return (send("all_gather", new * features, self.layout.dcp, self.value_bytes),)

    @property
    def _kv_heads(self) -> int:
        return max(1, self.config.num_kv_heads // self.layout.tp)

    @cached_property
    def _own_heads(self) -> OwnHeads:
        config, layout = self.config, self.layout
        features = _widths(config, layout).features // layout.dcp
        return own_heads(config.num_heads // layout.tp, self._kv_heads, config.head_dim, features, layout.dcp)

    def _cost(self, every: Iterable[Send]) -> float:
        """Seconds, or bytes if the link is unknown."""
        link = self.link
        return sum(one.bytes if link is None else time_of(one, link) for one in every)
