"""Shared by the benchmarks: timing calls in turn, the cells of their tables, and the types of their options."""

import argparse
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}

# --- timing


def machine() -> str:
    """The processor, its cores and its load before the run: load slows some runtimes' thread pools more than ours."""
    name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"


def seconds(call: Callable[[], Any]) -> float:
    """Wall-clock time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def alternate(
    sides: Sequence[Callable[[], Any]], rounds: int, *, calls: int = 5, warm_up: int = 3
) -> list[list[float]]:
    """Seconds of each call of each side. In every round each side makes `calls` calls, so all meet the same load.

    Each side is first called `warm_up` times, which are not counted.
    """
    times: list[list[float]] = [[] for _ in sides]
    for side in sides:
        for _ in range(warm_up):
            side()
    for _ in range(rounds):
        for found, side in zip(times, sides, strict=True):
            found.extend(seconds(side) for _ in range(calls))
    return times


# --- table cells


def percentile(values: Sequence[float], percent: float) -> float:
    """NaN if there are no values."""
    return float(np.percentile(values, percent)) if values else float("nan")


def spread(times: Sequence[float]) -> str:
    """10th and 90th percentile in milliseconds."""
    low, high = np.percentile(times, [10, 90]) * 1e3
    return f"[{low:.0f}-{high:.0f}]"


def heading(others: Sequence[str], share: str) -> str:
    """The columns of `row`: ours with a column named `share`, then those of the other runtimes."""
    ours = f"| {'ours ms':>12}  {'[spread]':13} {'tok/s':>6} {share:>9}"
    return " ".join([ours, *(f"| {name + ' ms':>15}  {'[spread]':13} {'tok/s':>6} ratio" for name in others)])


def row(times: Sequence[Sequence[float]], tokens: int, share: float) -> str:
    """Each side's median, spread and tokens per second, for calls that process `tokens` tokens.

    times[0] is ours, followed by `share`; each other side is followed by its median over ours.
    """
    ours, *others = (statistics.median(side) for side in times)
    cells = [f"| {ours * 1e3:12.1f}  {spread(times[0]):13} {tokens / ours:6.0f} {share:9.0%}"]
    for side, theirs in zip(times[1:], others, strict=True):
        cells.append(f"| {theirs * 1e3:15.1f}  {spread(side):13} {tokens / theirs:6.0f} {theirs / ours:5.2f}")
    return " ".join(cells)


# --- types of options


def byte_count(text: str) -> int:
    """A number of bytes such as 4194304 or 4MiB."""
    match = re.fullmatch(r"(\d+)\s*(KiB|MiB|GiB|)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"must be bytes like 4194304 or 4MiB, but is {text!r}")
    return int(match[1]) * UNITS[match[2]]


def layout(text: str) -> tuple[int, int]:
    """(tp, dcp) from a text such as 2,4."""
    tp, dcp = text.split(",")
    return int(tp), int(dcp)
