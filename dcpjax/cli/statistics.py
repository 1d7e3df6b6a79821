"""The line of statistics, and how long a call took."""

import argparse
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dcpjax.cli.flags import Parser

if TYPE_CHECKING:
    from dcpjax.llm import LLM


def add_stats_flag(parser: Parser, text: str) -> None:
    """`--stats` and `--no-stats`; `text` says when statistics are printed."""
    parser.add_argument(
        "--stats",
        action=argparse.BooleanOptionalAction,
        help=f"print layout, tokens and speed on standard error {text}",
    )


@dataclass
class Timing:
    """Seconds of a call, and how many of them were spent compiling and reading programs kept from an earlier run."""

    seconds: float = 0.0
    compiling: float = 0.0
    reading: float = 0.0


@contextlib.contextmanager
def timed(llm: "LLM") -> Iterator[Timing]:
    """Measure a `with` block. The timing is filled in at its end."""
    timing, started, before = Timing(), time.monotonic(), replace(llm.runner.compile_times)
    try:
        yield timing
    finally:
        timing.seconds = time.monotonic() - started
        timing.reading = llm.runner.compile_times.reading - before.reading
        timing.compiling = llm.runner.compile_times.seconds - before.seconds - timing.reading


def statistics_line(llm: "LLM", *, prompt_tokens: int, new_tokens: int, timing: Timing) -> str:
    """Layout, cache, tokens and speed in one line. Time spent on programs is given apart and not part of the speed."""
    running = timing.seconds - timing.compiling - timing.reading
    speed = new_tokens / max(running, 1e-9)
    waits = {"loading kept programs": timing.reading, "compiling": timing.compiling}
    apart = "".join(f" + {seconds:.1f} s {what}" for what, seconds in waits.items() if seconds >= 0.05)
    return (
        f"{describe_layout(llm)} | {prompt_tokens:,} prompt + {new_tokens:,} new tokens in "
        f"{running:.1f} s{apart}, {speed:.1f} tokens/s"
    )


def describe_engine(llm: "LLM") -> str:
    model = llm.runner.model
    return (
        f"{describe_layout(llm)}, weights {model.dtype}, cache {model.kv_dtype}, up to {llm.max_model_len:,} tokens "
        f"a request, on {model.platform}"
    )


def describe_layout(llm: "LLM") -> str:
    model = llm.runner.model
    tokens = llm.runner.sizes.num_blocks * model.geometry.block_size
    copies = model.layout.duplication(model.config.cache_heads)
    return f"tp={model.layout.tp} x dcp={model.layout.dcp}, cache of {tokens:,} tokens stored {copies}x"
