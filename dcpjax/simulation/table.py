"""Simulations side by side for people: an aligned table, one sentence of what it shows, and what to keep in mind."""

import textwrap
from collections.abc import Sequence

from dcpjax.api.outputs import counted, duration
from dcpjax.simulation.result import FLOOR_REMARK, Percentiles, Simulation

WIDTH = 100  # of sentences
HEADINGS = (
    ("tp x dcp", ""),
    ("users", ""),
    ("tokens/s", "at most"),
    ("cache use", "mean / max"),
    ("short of", "cache"),
    ("prefix", "hits"),
    ("running", "mean / max"),
    ("waiting", "mean"),
    ("queue", "p50 / p99"),
    ("first token", "p50 / p99"),
    ("gap", "p50 / p99"),
    ("exchange", "of time"),
    ("pre-", "empted"),
)


def to_text(simulations: Sequence[Simulation]) -> str:
    """Of at least one simulation: heading, a row for each, the conclusion and remarks."""
    upper, lower = zip(*HEADINGS, strict=True)
    lines = [upper, lower, *(_cells(one) for one in simulations)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    table.insert(2, "  ".join("-" * width for width in widths))
    wrapped = [textwrap.fill(sentence, WIDTH) for sentence in [conclusion(simulations), "", *remarks(simulations)]]
    return "\n".join([*_heading(simulations[0]), "", *table, "", *wrapped])


def conclusion(simulations: Sequence[Simulation]) -> str:
    """Where each layout's cache is full, and which is fastest."""
    layouts = list(dict.fromkeys(one.decode_context_parallel_size for one in simulations))
    groups = [[one for one in simulations if one.decode_context_parallel_size == dcp] for dcp in layouts]
    sentences = [_saturation(group) for group in groups]
    best = [max(group, key=lambda one: one.throughput) for group in groups]
    first, last = best[0], max(best[1:], key=lambda one: one.throughput, default=best[0])
    rates = f"at most {first.throughput:,.0f} tokens/s {_where(first)}"
    if last is not first:
        rates += f" and {last.throughput:,.0f} {_where(last)}, {_times(last, first)} as many"
    return f"{'; '.join(sentences)}; {rates}{_most_crowded(groups)}."


def remarks(simulations: Sequence[Simulation]) -> list[str]:
    held_back = [one for one in simulations if one.waiting_mean >= 1 and _has_room(one)]
    if not held_back:
        return [FLOOR_REMARK]
    return [
        f"Requests wait beside a cache with room {_where(held_back[0])}: the step's limits hold their prompts back; "
        "raise max_mixed_prefill_tokens and max_num_batched_tokens for more throughput and longer gaps.",
        FLOOR_REMARK,
    ]


def _heading(one: Simulation) -> list[str]:
    arrivals = {
        "trace": "requests come as recorded",
        "all": f"all come at once, {one.max_num_seqs:,} run at most",
        "closed": "each user sends the next request when the last is answered",
    }[one.arrivals]
    return [
        f"{one.model} on {one.tensor_parallel_size} x {one.hardware}: {one.dtype} weights, {one.kv_cache_dtype} cache, "
        f"blocks of {one.block_size} tokens",
        f"{counted(one.requests, 'request')}, {counted(one.input_tokens, 'prompt token')}, "
        f"{one.output_tokens:,} generated; {arrivals}",
    ]


def _cells(one: Simulation) -> tuple[str, ...]:
    dcp = one.decode_context_parallel_size
    return (
        f"{one.tensor_parallel_size // dcp} x {dcp}",
        f"{one.concurrency:,}" if one.concurrency else "-",
        f"{one.throughput:,.0f}",
        f"{one.cache_usage_mean:.0%} / {one.cache_usage_max:.0%}",
        f"{one.short_of_cache:.0%}",
        f"{one.prefix_hit_rate:.1%}",
        f"{one.running_mean:,.1f} / {one.running_max:,}",
        f"{one.waiting_mean:,.1f}",
        _pair(one.queue_time),
        _pair(one.time_to_first_token),
        _pair(one.inter_token_gap),
        f"{one.exchange_share:.0%}",
        f"{one.preemptions:,}",
    )


def _pair(values: Percentiles) -> str:
    return f"{duration(values.p50)} / {duration(values.p99)}"


def _saturation(group: Sequence[Simulation]) -> str:
    """Of one layout's runs, the first that the cache limits."""
    dcp = f"dcp={group[0].decode_context_parallel_size}"
    full = min((one for one in group if one.saturated), key=lambda one: one.concurrency or 0, default=None)
    if full is not None:
        return (
            f"{dcp} saturates{_with_users(full)}: up to {full.cache_usage_max:.0%} of its cache is in use, and a "
            f"request waits for blocks {full.short_of_cache:.0%} of the time"
        )
    fullest = max(group, key=lambda one: one.cache_usage_max)
    return f"{dcp} does not saturate, with up to {fullest.cache_usage_max:.0%} of its cache in use"


def _most_crowded(groups: Sequence[Sequence[Simulation]]) -> str:
    """The last layout beside the first where both serve the most users."""
    first, last = (max(group, key=lambda one: one.concurrency or 0) for group in (groups[0], groups[-1]))
    if last is first or not first.concurrency or last.concurrency != first.concurrency:
        return ""
    return f";{_with_users(first)} {_times(last, first)} with dcp={last.decode_context_parallel_size}"


def _times(one: Simulation, other: Simulation) -> str:
    return f"{one.throughput / other.throughput:.2g} x"


def _with_users(one: Simulation) -> str:
    return f" at {counted(one.concurrency, 'user')}" if one.concurrency else ""


def _where(one: Simulation) -> str:
    return f"with dcp={one.decode_context_parallel_size}{_with_users(one)}"


def _has_room(one: Simulation) -> bool:
    return not one.saturated and one.running_max < one.max_num_seqs
