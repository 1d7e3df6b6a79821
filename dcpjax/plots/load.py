"""Plots of capacity, throughput, single steps and cache occupancy, from plans, simulations and recordings."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Protocol

from dcpjax.plots.canvas import COLOURS, INK, MARKERS, Numbers, canvas, colours, legend_above

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dcpjax.planning.planner import Plan
    from dcpjax.simulation.result import Simulation

MAX_EDGED = 150  # with more bars, they are too narrow for an edge


class Step(Protocol):
    """The fields of a simulated or recorded step that `timeline` and `occupancy` read."""

    @property
    def time(self) -> float: ...
    @property
    def seconds(self) -> float: ...
    @property
    def used_blocks(self) -> int: ...
    @property
    def prefill_tokens(self) -> int: ...
    @property
    def decode_tokens(self) -> int: ...
    @property
    def preempted(self) -> int: ...


class Run(Protocol):
    """A `Simulation` or a `Recording`."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def timeline(self) -> Sequence[Step]: ...


@dataclass(frozen=True, kw_only=True)
class LoadPoint:
    """One layout under one load, simulated or measured."""

    concurrency: int  # requests that want to run at once
    tokens_per_second: float  # generated
    inter_token_seconds: float  # median gap between two tokens of a request
    saturated: bool  # whether requests wait for cache

    @classmethod
    def of(cls, simulation: "Simulation") -> "LoadPoint":
        return cls(
            concurrency=simulation.concurrency or simulation.max_num_seqs,
            tokens_per_second=simulation.throughput,
            inter_token_seconds=simulation.inter_token_gap.p50,
            saturated=simulation.saturated,
        )


def capacity(plan: "Plan") -> "tuple[Figure, Numbers]":
    """Tokens that the cache holds on each legal layout. Numbers: a list per column, in the order of the bars."""
    figure, (axes,) = canvas(3.2)
    rows, most = plan.rows, max(row.tokens for row in plan.rows)
    unit, name = (1e6, "million tokens") if most >= 1e6 else (1e3, "thousand tokens")
    axes.bar(range(len(rows)), [row.tokens / unit for row in rows], 0.6, color=COLOURS[0])
    for place, row in enumerate(rows):
        text = f"{row.requests:,} requests\nstored {row.copies}x"
        axes.text(place, row.tokens / unit, text, ha="center", va="bottom", fontsize=9)
    axes.set_xticks(range(len(rows)), [f"tp={row.tp} x dcp={row.dcp}" for row in rows])
    axes.set_ylabel(f"cache holds, {name}")
    axes.set_ylim(0, 1.25 * most / unit or 1)
    devices = rows[0].tp * rows[0].dcp
    axes.set_title(
        f"{plan.model} on {devices} x {plan.hardware.name}, requests of {plan.demand.length:,} tokens", loc="left"
    )
    names = ("dcp", "tokens", "requests", "copies")
    return figure, {name: [getattr(row, name) for row in rows] for name in names}


def throughput(curves: "Mapping[str, Sequence[LoadPoint | Simulation]]", *, source: str) -> "tuple[Figure, Numbers]":
    """Tokens per second and the gap between tokens over concurrency, a curve for each layout.

    A ring marks where a curve saturates: from there on, requests wait for cache. `source` is the title and says where
    the numbers come from, such as "simulated" or "measured". Numbers: for each curve its columns and `saturates_at`.
    """
    points = {label: [_point(one) for one in curve] for label, curve in curves.items()}
    if not any(points.values()):
        raise ValueError("curves must hold at least one point, but hold none; use {'tp=8 x dcp=1': [LoadPoint(...)]}")
    figure, (rates, gaps) = canvas(3.6, columns=2)
    for number, (label, curve) in enumerate(points.items()):
        style = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)], "label": label}
        _draw_curve(rates, curve, [one.tokens_per_second for one in curve], style)
        _draw_curve(gaps, curve, [1e3 * one.inter_token_seconds for one in curve], style)
    for axes, name in ((rates, "generated tokens/s"), (gaps, "gap between tokens, ms")):
        _label_loads(axes, points)
        axes.set_ylabel(name)
        axes.yaxis.set_major_formatter("{x:,.6g}")
    rates.set_title(source, loc="left", pad=22)
    _explain_ring(gaps, points)
    legend_above(rates, 2)
    return figure, {label: _columns(curve) for label, curve in points.items()}


def _point(one: "LoadPoint | Simulation") -> LoadPoint:
    return one if isinstance(one, LoadPoint) else LoadPoint.of(one)


def _columns(curve: Sequence[LoadPoint]) -> Numbers:
    rows = [asdict(one) for one in curve]
    columns = {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}
    return columns | {"saturates_at": _saturates_at(curve)}


def _saturates_at(curve: Sequence[LoadPoint]) -> int | None:
    return min((one.concurrency for one in curve if one.saturated), default=None)


def _draw_curve(axes: "Axes", curve: Sequence[LoadPoint], values: Sequence[float], style: dict[str, str]) -> None:
    loads = [one.concurrency for one in curve]
    axes.plot(loads, values, linewidth=2, markersize=5, **style)  # type: ignore[arg-type]
    full = _saturates_at(curve)
    if full is not None:
        axes.plot(full, values[loads.index(full)], "o", markersize=14, markerfacecolor="none", color=INK)


def _label_loads(axes: "Axes", points: Mapping[str, Sequence[LoadPoint]]) -> None:
    loads = sorted({one.concurrency for curve in points.values() for one in curve})
    axes.set_xscale("log", base=2)
    axes.set_xticks(loads, [str(load) for load in loads])
    axes.tick_params(which="minor", length=0)
    axes.set_ylim(bottom=0)
    axes.margins(x=0.08, y=0.12)
    axes.set_xlabel("requests at once")


def _explain_ring(axes: "Axes", points: Mapping[str, Sequence[LoadPoint]]) -> None:
    if any(_saturates_at(curve) is not None for curve in points.values()):
        ring = axes.plot(
            [], [], "o", markersize=11, markerfacecolor="none", color=INK, label="cache too small from here"
        )
        legend_above(axes, 1, ring)


def timeline(run: Run) -> "tuple[Figure, Numbers]":
    """Prefill tokens, decode tokens and preemptions of each step, over time.

    Numbers: the number of `steps`, and the totals `seconds`, `prefill_tokens`, `decode_tokens` and `preempted`.
    """
    steps = run.timeline
    if not steps:
        raise ValueError("timeline must have at least one step, but the run has none; record more")
    figure, (upper, lower) = canvas(3.8, rows=2)
    starts, widths = [step.time for step in steps], [step.seconds for step in steps]
    bars = {"align": "edge", "edgecolor": "white", "linewidth": 0.4 if len(steps) <= MAX_EDGED else 0.0}
    upper.bar(starts, [step.prefill_tokens for step in steps], widths, color=COLOURS[1], **bars)
    lower.bar(starts, [step.decode_tokens for step in steps], widths, color=COLOURS[0], **bars)
    _mark_preemptions(lower, steps)
    for axes, name in ((upper, "prefill"), (lower, "decode")):
        axes.set_ylabel(f"{name} tokens")
        axes.set_xlim(0, starts[-1] + widths[-1])
        axes.yaxis.set_major_formatter("{x:,.0f}")
    upper.tick_params(labelbottom=False)
    lower.set_xlabel("seconds")
    upper.set_title("Tokens of each step; a bar is as wide as its step is long", loc="left")
    totals = ("seconds", "prefill_tokens", "decode_tokens", "preempted")
    return figure, {"steps": len(steps)} | {name: sum(getattr(step, name) for step in steps) for name in totals}


def _mark_preemptions(axes: "Axes", steps: Sequence[Step]) -> None:
    """A marker above the bars of each step that preempted requests."""
    preempting = [step for step in steps if step.preempted]
    if preempting:
        height = 1.2 * max(1, *(step.decode_tokens for step in steps))
        places = [step.time + step.seconds / 2 for step in preempting]
        axes.plot(places, [height] * len(places), "v", color=COLOURS[5], markersize=8, label="preemption")
        legend_above(axes, 1)


def occupancy(runs: Mapping[str, Run]) -> "tuple[Figure, Numbers]":
    """Share of the cache in use at each step, a line for each run. Numbers: for each its `usage`, `mean` and `max`."""
    if not any(run.timeline for run in runs.values()):
        raise ValueError("runs must hold at least one step, but hold none; use {'dcp=8': record(llm, prompts)}")
    figure, (axes,) = canvas(3.0)
    numbers: Numbers = {}
    palette, styles = colours(len(runs)), cycle(("-", "--", ":", "-."))
    for (label, run), colour, style in zip(runs.items(), palette, styles, strict=False):
        usage = [step.used_blocks / run.num_blocks for step in run.timeline]
        axes.step(range(1, len(usage) + 1), usage, style, where="mid", color=colour, linewidth=2, label=label)
        numbers[label] = {"usage": usage, "mean": sum(usage) / max(1, len(usage)), "max": max(usage, default=0.0)}
    axes.axhline(1, color=INK, linewidth=1)
    axes.set_ylim(0, 1.08)
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.set_xlabel("step")
    axes.set_ylabel("cache in use")
    axes.set_title("Blocks that requests hold", loc="left", pad=22)
    legend_above(axes, len(runs))
    return figure, numbers
