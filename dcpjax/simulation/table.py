"""Simulations side by side as text: an aligned table, a sentence on what it shows, and remarks."""

import textwrap
from collections.abc import Sequence

from dcpjax.api.outputs import counted, duration
from dcpjax.planning.text_table import aligned
from dcpjax.simulation.result import FLOOR_REMARK, Percentiles, Simulation

WIDTH = 100  # characters of a line of text
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
    """A heading, one row per simulation (at least one), the conclusion and remarks."""
    upper, lower = zip(*HEADINGS, strict=True)
    table = aligned([upper, lower, *(_cells(one) for one in simulations)], headings=2)
    wrapped = [textwrap.fill(sentence, WIDTH) for sentence in [conclusion(simulations), "", *remarks(simulations)]]
    return "\n".join([*_heading(simulations[0]), "", *table, "", *wrapped])


def conclusion(simulations: Sequence[Simulation]) -> str:
    """Which layouts fill their cache, with how many users, and which layout has the highest throughput."""
    layouts = list(dict.fromkeys(one.decode_context_parallel_size for one in simulations))
    groups = [[one for one in simulations if one.decode_context_parallel_size == dcp] for dcp in layouts]
    sentences = [_saturation(group) for group in groups]
    best = [max(group, key=lambda one: one.throughput) for group in groups]
    first, last = best[0], max(best[1:], key=lambda one: one.throughput, default=best[0])
    rates = f"Throughput is at most {first.throughput:,.0f} tokens/s {_with_layout(first)}"
    if last is not first:
        rates += f" and {last.throughput:,.0f} {_with_layout(last)} ({_times(last, first)})"
    return f"{'; '.join(sentences)}. {rates}{_ratio_at_most_users(groups)}."


def remarks(simulations: Sequence[Simulation]) -> list[str]:
    held_back = [one for one in simulations if one.waiting_mean >= 1 and _has_room(one)]
    if not held_back:
        return [FLOOR_REMARK]
    return [
        f"Requests wait {_with_layout(held_back[0])} although the cache has room: the limits of a step delay prompts; "
        "raise max_mixed_prefill_tokens and max_num_batched_tokens for more throughput and longer gaps between tokens.",
        FLOOR_REMARK,
    ]


def _heading(one: Simulation) -> list[str]:
    arrivals = {
        "trace": "requests arrive as recorded",
        "all": f"all arrive at once, at most {one.max_num_seqs:,} run at once",
        "closed": "each user sends the next request when the last one is answered",
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
    """For one layout: the smallest number of users with which the cache is the limit."""
    dcp = f"dcp={group[0].decode_context_parallel_size}"
    full = min((one for one in group if one.saturated), key=lambda one: one.concurrency or 0, default=None)
    if full is not None:
        return (
            f"{dcp} saturates{_at_users(full)}: up to {full.cache_usage_max:.0%} of its cache is in use, and a "
            f"request waits for blocks {full.short_of_cache:.0%} of the time"
        )
    fullest = max(group, key=lambda one: one.cache_usage_max)
    return f"{dcp} does not saturate, with up to {fullest.cache_usage_max:.0%} of its cache in use"


def _ratio_at_most_users(groups: Sequence[Sequence[Simulation]]) -> str:
    """Throughput of the last layout over the first's at the largest number of users, if that is the same for both."""
    first, last = (max(group, key=lambda one: one.concurrency or 0) for group in (groups[0], groups[-1]))
    if last is first or not first.concurrency or last.concurrency != first.concurrency:
        return ""
    dcp, other = last.decode_context_parallel_size, first.decode_context_parallel_size
    return f";{_at_users(first)} dcp={dcp} generates {_times(last, first)} the tokens/s of dcp={other}"


def _times(one: Simulation, other: Simulation) -> str:
    return f"{one.throughput / other.throughput:.2g} x"


def _at_users(one: Simulation) -> str:
    return f" at {counted(one.concurrency, 'user')}" if one.concurrency else ""


def _with_layout(one: Simulation) -> str:
    return f"with dcp={one.decode_context_parallel_size}{_at_users(one)}"


def _has_room(one: Simulation) -> bool:
    return not one.saturated and one.running_max < one.max_num_seqs
