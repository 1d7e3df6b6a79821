"""A plan as aligned text, as HTML for notebooks, and as JSON values."""

import html
import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from dcpjax.api.outputs import counted
from dcpjax.planning.plan_data import LayoutRow, PlanData
from dcpjax.planning.sizes import weight_bytes
from dcpjax.planning.text_table import aligned
from dcpjax.sharding.mesh import Layout

MOST_DEVICES = 4096  # where the search for a number of devices that holds the weights ends
WIDTH = 100  # characters of a line of text
HEADINGS = (
    ("tp x dcp", ""),
    ("copies", "of KV"),
    ("weights", "/device"),
    ("KV/token", "/device"),
    ("tokens", "that fit"),
    ("requests", "that fit"),
    ("exchange", "/layer"),
    ("least", "step time"),
    ("most", "tokens/s"),
)


def to_text(plan: PlanData) -> str:
    """The heading, one row per legal dcp with a ">" before the chosen one, the conclusion and the remarks."""
    upper, lower = zip(*HEADINGS, strict=True)
    table = aligned([upper, lower, *(_cells(plan, row) for row in plan.rows)], headings=2)
    marks = ["", "", "", *(">" if row is plan.row else "" for row in plan.rows)]
    marked = [f"{mark:<3}{line}" for mark, line in zip(marks, table, strict=True)]
    wrapped = [textwrap.fill(sentence, WIDTH) for sentence in [*conclusion(plan), "", *remarks(plan)]]
    return "\n".join([*heading(plan), "", *marked, "", *wrapped])


def to_html(plan: PlanData) -> str:
    def row(tag: str, cells: Sequence[str], bold: bool = False) -> str:
        style = ' style="font-weight: bold"' if bold else ""
        return f"<tr{style}>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"

    def paragraphs(sentences: Sequence[str]) -> str:
        return "".join(f"<p>{html.escape(sentence)}</p>" for sentence in sentences)

    body = "".join(row("td", _cells(plan, one), bold=one is plan.row) for one in plan.rows)
    table = f"<table><thead>{row('th', [' '.join(pair) for pair in HEADINGS])}</thead><tbody>{body}</tbody></table>"
    return paragraphs(heading(plan)) + table + paragraphs(conclusion(plan)) + paragraphs(remarks(plan))


def to_dict(plan: PlanData) -> dict[str, Any]:
    """The plan as JSON values. Keys name the unit; a missing value is None."""
    return {
        "model": plan.model,
        "hardware": {name: _finite(value) for name, value in asdict(plan.hardware).items()},
        "tensor_parallel_size": plan.options.tensor_parallel_size,
        "dtype": plan.dtype,
        "kv_cache_dtype": plan.kv_cache_dtype,
        "engine_runs_these_dtypes": plan.runs_here,
        **asdict(plan.demand),
        "concurrency": plan.options.concurrency,
        "checkpoint_bytes": plan.checkpoint_bytes,
        "memory_limit_bytes": _finite(plan.memory_limit),
        "fits": plan.fits,
        "chosen_dcp": plan.chosen_dcp,
        "useful_dcp": plan.useful_dcp,
        "rows": [_row_dict(plan, row) for row in plan.rows],
        "conclusion": conclusion(plan),
        "remarks": remarks(plan),
    }


def heading(plan: PlanData) -> list[str]:
    hardware, options, demand = plan.hardware, plan.options, plan.demand
    devices = options.tensor_parallel_size
    shared = "no common prefix"
    if demand.unique_token_fraction < 1:
        shared = f"of which the first {_percent(1 - demand.unique_token_fraction)} are the same in all requests"
    return [
        f"{plan.model} on {devices} x {hardware.name}, each with {size(hardware.memory)} of memory at "
        f"{size(hardware.bandwidth)}/s and a link of {size(hardware.link)}/s; "
        f"{_percent(options.gpu_memory_utilization)} of the memory may be used",
        f"{plan.dtype} weights ({size(plan.checkpoint_bytes)} in all), {plan.kv_cache_dtype} KV cache, "
        f"{options.dcp_comm_backend} merge",
        f"requests that generate {demand.output_length:,} tokens after prompts of {demand.context_length:,} tokens, "
        f"{shared}",
    ]


def conclusion(plan: PlanData) -> list[str]:
    """Two sentences: what fits, and the lower bound of the step time."""
    return [_capacity_sentence(plan), _speed_sentence(plan)]


def remarks(plan: PlanData) -> list[str]:
    lines = [
        "Times are lower bounds, not forecasts: the longer of bytes / published bandwidth and operations / published "
        f"peak, plus exchanged bytes / published link speed, plus {plan.hardware.latency * 1e6:g} us per collective "
        "(assumed). Kernels, launches, scheduling and slower networks add to that. Tokens are assumed to choose their "
        "experts evenly."
    ]
    if plan.row.floor and plan.row.dcp > 1:
        lines.insert(0, _merges_sentence(plan, plan.row, plan.row.floor.requests))
    if not plan.runs_here:
        lines.append(
            f"This can only be planned: the engine runs float32 and bfloat16, but the weights are {plan.dtype} and "
            f"the cache is {plan.kv_cache_dtype}."
        )
    changed = [f"{row.block_size} at dcp={row.dcp}" for row in plan.rows if row.block_size != plan.options.block_size]
    if changed:
        lines.append(
            f"Not every dcp divides a block of {plan.options.block_size} tokens; planned with blocks of "
            f"{', '.join(changed)}."
        )
    return lines


def size(count: float) -> str:
    """Bytes in powers of 1000, three digits."""
    if not math.isfinite(count):
        return "unlimited"
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if abs(count) < 999.5 or unit == "PB":
            break
        count /= 1000
    digits = 0 if unit == "B" and count == round(count) else max(0, 2 - len(str(int(abs(count)))) + 1)
    text = f"{count:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} {unit}"


def _cells(plan: PlanData, row: LayoutRow) -> tuple[str, ...]:
    requests = row.floor.requests if row.floor else 0
    sent = row.exchanges[plan.options.dcp_comm_backend].bytes * requests
    return (
        f"{row.tp} x {row.dcp}",
        str(row.copies),
        size(row.weight_bytes),
        f"{row.kv_bytes_per_token:,.10g} B",
        f"{row.tokens:,}" if row.num_blocks else "-",
        f"{row.requests:,}" if row.num_blocks else "-",
        size(sent) if sent else "-",
        f"{row.floor.seconds * 1e3:.3g} ms" if row.floor else "-",
        f"{row.floor.tokens_per_second:,.0f}" if row.floor else "-",
    )


def _merges_sentence(plan: PlanData, row: LayoutRow, requests: int) -> str:
    """Bytes of the gathered queries and of each merge."""
    sent = ", ".join(f"{size(one.merge_bytes * requests)} with {merge}" for merge, one in row.exchanges.items())
    queries = row.exchanges[plan.options.dcp_comm_backend].query_bytes * requests
    return (
        f"In each layer of that step a device sends, in {plan.exchange_dtype}, {size(queries)} to gather the queries, "
        f"and to merge {sent}."
    )


def _capacity_sentence(plan: PlanData) -> str:
    row, demand = plan.row, plan.demand
    if not plan.fits:
        return _shortage_sentence(plan)
    text = (
        f"dcp={row.dcp} stores the cache {_times(row.copies)} and holds {counted(row.requests, 'request')} of "
        f"{demand.length:,} tokens at once"
    )
    first = plan.rows[0]
    if first is row or first.dcp != 1:
        return f"{text}."
    if not first.requests:
        return f"{text}; dcp=1 stores it {_times(first.copies)} and holds no request."
    ratio = row.requests / first.requests
    return f"{text}, {ratio:.2g} x the {first.requests:,} of dcp=1, which stores it {_times(first.copies)}."


def _shortage_sentence(plan: PlanData) -> str:
    """How much memory is missing, and the smallest change that helps."""
    row, limit = plan.row, plan.memory_limit
    wanted = plan.options.concurrency or 1
    occupied = row.weight_bytes + row.workspace_bytes
    where = f"It does not fit: at dcp={row.dcp} each device"
    if occupied >= limit:
        return (
            f"{where} must hold {size(occupied)} of weights and workspace, but may use {size(limit)}; use a smaller "
            f"dtype{_enough_devices(plan)}."
        )
    if row.memory_needed > limit:
        return (
            f"{where} would need {size(row.memory_needed)}, but may use {size(limit)}; use "
            f"kv_cache_memory_bytes={math.floor(limit - occupied)}."
        )
    return (
        f"{where} has room for {row.tokens:,} tokens of cache, {counted(row.requests, 'request')} of "
        f"{plan.demand.length:,} tokens, but must hold {wanted:,}; use more devices, a smaller kv_cache_dtype or "
        "shorter requests."
    )


def _enough_devices(plan: PlanData) -> str:
    """The smallest number of devices, by doubling, on which the weights fit."""
    devices, config = plan.options.tensor_parallel_size, plan.config
    limit = plan.memory_limit - plan.row.workspace_bytes
    while not plan.hardware.shared and (devices := devices * 2) <= MOST_DEVICES:
        layout = Layout(tensor_parallel_size=devices, decode_context_parallel_size=devices)
        if config.mla is not None and config.num_heads % devices:
            break
        if weight_bytes(config, layout, plan.dtype, replicate_q=plan.options.dcp_replicate_q) < limit:
            return f" or tensor_parallel_size={devices}"
    return ""


def _speed_sentence(plan: PlanData) -> str:
    row, first = plan.row, plan.rows[0]
    if row.floor is None:
        return _smaller_dtypes_sentence(plan)
    text = (
        f"A decode step of {counted(row.floor.requests, 'request')} takes at least {row.floor.seconds * 1e3:.3g} ms "
        f"with dcp={row.dcp}, which is at most {row.floor.tokens_per_second:,.0f} tokens/s"
    )
    if first is row or first.dcp != 1:
        return f"{text}."
    if first.floor:
        ratio = row.floor.tokens_per_second / first.floor.tokens_per_second
        text += f" ({ratio:.2g} x dcp=1 with {counted(first.floor.requests, 'request')})"
    return f"{text}; {_break_even(plan, row)}."


def _smaller_dtypes_sentence(plan: PlanData) -> str:
    row = plan.row
    layout = Layout(tensor_parallel_size=row.tp * row.dcp, decode_context_parallel_size=row.dcp)
    bytes_of = {dtype: weight_bytes(plan.config, layout, dtype) for dtype in ("bfloat16", "fp8", "nvfp4")}
    smaller = [f"{dtype} {size(count)}" for dtype, count in bytes_of.items() if count < row.weight_bytes]
    return f"Weights per device in a smaller dtype: {', '.join(smaller)}." if smaller else "No dtype is smaller."


def _break_even(plan: PlanData, row: LayoutRow) -> str:
    if row.copies == plan.rows[0].copies:
        return "dcp=1 stores no more copies, so splitting the context gains nothing"
    if row.faster_from_requests is None and row.faster_from_context is None:
        return "for the same requests its step is never faster than that of dcp=1; its cache only holds more"
    ways = []
    if row.faster_from_requests is not None:
        ways.append(
            f"{counted(row.faster_from_requests, 'request')} with prompts of {plan.demand.context_length:,} tokens"
        )
    if row.faster_from_context is not None:
        ways.append(f"{row.faster_from_context:,} tokens of context with a single request")
    return f"for the same requests its step is faster than that of dcp=1 from {', or from '.join(ways)}"


def _row_dict(plan: PlanData, row: LayoutRow) -> dict[str, Any]:
    return {
        "tp": row.tp,
        "dcp": row.dcp,
        "copies": row.copies,
        "block_size": row.block_size,
        "weight_bytes_per_device": row.weight_bytes,
        "kv_block_bytes_per_device": row.block_bytes,
        "kv_bytes_per_token_per_device": row.kv_bytes_per_token,
        "num_blocks": row.num_blocks,
        "tokens": row.tokens,
        "requests": row.requests,
        "exchange_bytes_per_layer_and_token": {
            merge: {"query": one.query_bytes, "merge": one.merge_bytes, "collectives": one.collectives}
            for merge, one in row.exchanges.items()
        },
        "floor": row.floor
        and {**asdict(row.floor), "seconds": row.floor.seconds, "tokens_per_second": row.floor.tokens_per_second},
        "faster_than_dcp_1_from_requests": row.faster_from_requests,
        "faster_than_dcp_1_from_context": row.faster_from_context,
    }


def _finite(value: Any) -> Any:
    """None for infinity, which JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _percent(share: float) -> str:
    return f"{share * 100:.3g} %"


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")
