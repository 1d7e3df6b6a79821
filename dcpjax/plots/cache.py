"""Plots of which device stores which cached tokens, and of how partials are merged.

What each device stores is read from the shards of the cache's arrays, not derived from the requested layout.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dcpjax.api.outputs import counted
from dcpjax.models.kv_cache import CacheGeometry, LayerCache
from dcpjax.plots.canvas import COLOURS, FAINT, Numbers, canvas, colours, legend_above, text_colour

if TYPE_CHECKING:
    import jax
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dcpjax.llm import LLM

RANKS, HEADS = 1, 2  # dimensions of a cached array: [N, dcp, K, ...]
MAX_LABELLED = 40  # with more cells in a row, numbers in them do not fit
MAX_TICKS = 24  # with more rows, their names do not fit

CachePart = tuple[int, int]  # rank along dcp, KV head


class PartRow(NamedTuple):
    """One row of the map: KV heads `first .. last` of one rank, which the same devices hold."""

    rank: int
    first: int
    last: int
    devices: set[int]

    @property
    def name(self) -> str:
        heads = f"head {self.first}" if self.first == self.last else f"heads {self.first}-{self.last}"
        return f"rank {self.rank}, KV {heads}"


def duplication_map(llm: "LLM") -> "tuple[Figure, Numbers]":
    """A map of which device holds which part of the cache, read from the shards of a loaded model's cache.

    A part is the slots of one KV head on one dcp rank, in all layers. Numbers: `holders` (the devices of each part),
    `copies` of each value, `bytes_per_device`, and `bytes_stored` and `bytes_unique` in total over all devices.
    """
    runner = llm.runner
    holders, stored, unique = _read_shards(runner.cache, runner.model.config.cache_heads)
    rows, devices = _group_heads(holders), sorted(stored)
    figure, (axes,) = canvas(1.5 + 0.36 * min(len(rows), MAX_TICKS))
    _draw_holders(axes, rows, devices, latent=runner.model.config.mla is not None)
    copies, layout = max(map(len, holders.values())), runner.model.layout
    axes.set_title(
        f"tp={layout.tp} x dcp={layout.dcp}: every cached value on {counted(copies, 'device')}", loc="left", pad=10
    )
    axes.set_xlabel("device")
    numbers: Numbers = {
        "holders": {part: sorted(where) for part, where in sorted(holders.items())},
        "copies": copies,
        "bytes_per_device": {device: stored[device] for device in devices},
        "bytes_stored": sum(stored.values()),
        "bytes_unique": unique,
    }
    return figure, numbers


def _read_shards(cache: Any, kv_heads: int) -> tuple[dict[CachePart, set[int]], dict[int, int], int]:
    """(devices that hold each part, bytes on each device, bytes of all parts counted once)."""
    holders: dict[CachePart, set[int]] = {}
    stored: dict[int, int] = {}
    unique = 0
    for array, has_heads in _arrays(cache):
        ranks, entries = array.shape[RANKS], array.shape[HEADS] if has_heads else kv_heads
        unique += array.nbytes * kv_heads // entries
        for shard in array.addressable_shards:
            device = shard.device.id
            stored[device] = stored.get(device, 0) + shard.data.nbytes
            heads = range(*shard.index[HEADS].indices(entries)) if has_heads else range(kv_heads)
            for rank in range(*shard.index[RANKS].indices(ranks)):
                for entry in heads:  # a duplicated head has several consecutive entries
                    holders.setdefault((rank, entry * kv_heads // entries), set()).add(device)
    return holders, stored, unique


def _arrays(cache: Any) -> "Iterable[tuple[jax.Array, bool]]":
    """The cached arrays of all layers, each with whether it has a dimension of KV heads."""
    for layer in cache:
        if isinstance(layer, LayerCache):
            yield from ((layer.keys, True), (layer.values, True))
        else:
            yield layer.latents, False


def _group_heads(holders: dict[CachePart, set[int]]) -> list[PartRow]:
    """The parts ordered by rank and head; consecutive heads that the same devices hold share a row."""
    rows: list[PartRow] = []
    for (rank, head), devices in sorted(holders.items()):
        if rows and rows[-1].rank == rank and rows[-1].devices == devices:
            rows[-1] = rows[-1]._replace(last=head)
        else:
            rows.append(PartRow(rank, head, head, devices))
    return rows


def _draw_holders(axes: "Axes", rows: list[PartRow], devices: list[int], *, latent: bool) -> None:
    ranks, heads = max(row.rank for row in rows) + 1, max(row.last for row in rows) + 1
    palette = colours(max(ranks, heads))
    for number, row in enumerate(rows):
        colour = palette[row.rank if ranks > 1 else row.first]
        for column, device in enumerate(devices):
            axes.add_patch(_cell(column, number, colour if device in row.devices else "none"))
            if device in row.devices and max(len(rows), len(devices)) <= MAX_TICKS:
                axes.text(column, number, "held", ha="center", va="center", fontsize=8, color=text_colour(colour))
    axes.set_xlim(-0.5, len(devices) - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    if len(devices) <= MAX_LABELLED:
        axes.set_xticks(range(len(devices)), [str(device) for device in devices])
    if len(rows) <= MAX_TICKS:
        axes.set_yticks(range(len(rows)), ["latents of rank " + str(row.rank) if latent else row.name for row in rows])
    else:
        axes.set_ylabel("part of the cache")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _cell(column: int, row: int, colour: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((column - 0.46, row - 0.42), 0.92, 0.84, facecolor=colour, edgecolor=FAINT, linewidth=1)


def ownership_strip(*geometries: CacheGeometry, tokens: int | None = None) -> "tuple[Figure, Numbers]":
    """Which rank stores which position of a request, as one strip for each geometry.

    Positions 0 .. tokens-1 are shown; None shows two blocks of the largest block size. Numbers: for each geometry its
    `name`, the `ranks` of the positions, and `tokens_per_rank`.
    """
    if not geometries:
        raise ValueError(
            "ownership_strip must have at least one geometry, but has none; use CacheGeometry(block_size=16)"
        )
    shown = 2 * max(geometry.block_size for geometry in geometries) if tokens is None else tokens
    if shown < 1:
        raise ValueError(f"tokens must be at least 1, but is {shown}; use 32")
    figure, (axes,) = canvas(1.3 + 0.6 * len(geometries))
    strips = [geometry.locate(np.arange(shown))[1] for geometry in geometries]
    palette = colours(max(geometry.dcp for geometry in geometries))
    _draw_strips(axes, geometries, strips, palette)
    axes.set_xlabel("position in the request (black lines: where a block ends)")
    axes.set_title("Rank that stores each position", loc="left", pad=22)
    numbers: Numbers = {
        "strips": [
            {
                "name": _name(geometry).replace("\n", ", "),
                "ranks": strip.tolist(),
                "tokens_per_rank": list(geometry.tokens_per_rank(shown)),
            }
            for geometry, strip in zip(geometries, strips, strict=True)
        ]
    }
    return figure, numbers


def _name(geometry: CacheGeometry) -> str:
    return f"dcp {geometry.dcp}, interleave {geometry.interleave}\nblock of {geometry.block_size:,}"


def _draw_strips(
    axes: "Axes", geometries: tuple[CacheGeometry, ...], strips: list[np.ndarray], palette: list[str]
) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    shown, ranks = len(strips[0]), len(palette)
    extent = (-0.5, shown - 0.5, len(strips) - 0.5, -0.5)
    axes.imshow(
        np.stack(strips),
        ListedColormap(palette),
        vmin=-0.5,
        vmax=ranks - 0.5,
        aspect="auto",
        interpolation="nearest",
        extent=extent,
    )
    for row, (geometry, strip) in enumerate(zip(geometries, strips, strict=True)):
        if row:
            axes.axhline(row - 0.5, color="white", linewidth=8)
        for end in range(geometry.block_size, shown, geometry.block_size):
            axes.plot([end - 0.5, end - 0.5], [row - 0.4, row + 0.4], color="black", linewidth=2)
        if shown <= MAX_LABELLED:
            for position, rank in enumerate(strip):
                axes.text(
                    position, row, str(rank), ha="center", va="center", fontsize=8, color=text_colour(palette[rank])
                )
    axes.set_yticks(range(len(strips)), [_name(geometry) for geometry in geometries])
    axes.tick_params(axis="y", length=0)
    axes.spines[:].set_visible(False)
    named = range(ranks) if ranks <= len(COLOURS) else sorted({0, ranks // 4, ranks // 2, 3 * ranks // 4, ranks - 1})
    names = ["rank 0", *(str(rank) for rank in named[1:])]
    patches = [Patch(color=palette[rank], label=name) for rank, name in zip(named, names, strict=True)]
    legend_above(axes, len(named), patches)


def merge_weights(lse: Any) -> "tuple[Figure, Numbers]":
    """The weight of each rank's partial in the merge: exp(lse - logsumexp over the ranks).

    `lse` is [dcp], or [dcp, H] for several heads; -inf means that the rank saw no key. Numbers: `weights` in the shape
    of `lse`, and the `empty` ranks, which saw no key for any head.
    """
    import jax.numpy as jnp
    from jax.nn import logsumexp

    from dcpjax.sharding.merge import weight

    given = jnp.asarray(lse, jnp.float32)
    if given.ndim not in (1, 2):
        raise ValueError(f"lse must be [dcp] or [dcp, H], but has shape {given.shape}; take one token's")
    shares = np.asarray(weight(given, jnp.broadcast_to(logsumexp(given, axis=0), given.shape)))
    heads = shares.reshape(shares.shape[0], -1)
    empty = [rank for rank in range(len(heads)) if np.isneginf(np.asarray(given)[rank]).all()]
    figure, (axes,) = canvas(3.0)
    _draw_weights(axes, heads, empty)
    return figure, {"weights": shares.tolist(), "empty": empty}


def _draw_weights(axes: "Axes", heads: np.ndarray, empty: list[int]) -> None:
    ranks, count = heads.shape
    palette, width = colours(count), 0.8 / count
    for head in range(count):
        places = np.arange(ranks) + (head - (count - 1) / 2) * width
        axes.bar(places, heads[:, head], width * 0.95, color=palette[head], label=f"head {head}")
        if ranks * count <= MAX_TICKS:
            for rank in set(range(ranks)) - set(empty):
                share = heads[rank, head]
                axes.text(places[rank], share, f"{share:.0%}", ha="center", va="bottom", fontsize=8)
    for rank in empty:
        axes.text(rank, 0.01, "saw no key:\nweight 0", ha="center", va="bottom", fontsize=9)
    axes.set_xticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.set_ylabel("exp(lse of the rank - lse of all)")
    axes.set_ylim(0, max(1.12 * float(heads.max()), 0.1))
    axes.set_title("Weight of each rank in the merge", loc="left", pad=22 if count > 1 else 8)
    if 1 < count <= len(COLOURS):
        legend_above(axes, count)
