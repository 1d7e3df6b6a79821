"""`dcpjax bench`: measures the speed of a model on this machine, on one or several layouts."""

import json
from typing import TYPE_CHECKING

from dcpjax.api.config import EngineConfig
from dcpjax.cli.flags import Flags, Parser, add_options, integer, integers, names_to_flags
from dcpjax.cli.model_flags import add_model_flag, required_model
from dcpjax.cli.verbosity import Verbosity, add_verbosity_flags
from dcpjax.planning.text_table import aligned

if TYPE_CHECKING:
    from dcpjax.planning.measure import BenchResult

BATCH_SIZES, CONTEXT, STEPS = (1, 8, 32), 512, 10
LAYOUT = ("tensor_parallel_size", "decode_context_parallel_size")
LEFT_OUT = (  # options that the measurement sets, that do not affect it, or that cannot be flags
    "max_num_seqs",
    "max_model_len",
    "max_mixed_prefill_tokens",
    "enable_prefix_caching",
    "scheduling_policy",
    "async_scheduling",
    "num_decode_steps",
    "max_logprobs",
    "hf_overrides",
)


def add_flags(parser: Parser) -> None:
    add_model_flag(parser)
    group = parser.add_argument_group("what is measured")
    group.add_argument(
        "--layouts",
        action="extend",
        nargs="+",
        metavar="TP,DCP",
        help="layouts to compare, such as --layouts 8,1 1,8; TP devices split the heads, DCP ranks split the context "
        "(default: the layout of --tensor-parallel-size and --decode-context-parallel-size)",
    )
    group.add_argument(
        "--batch-sizes",
        type=integers,
        action="extend",
        metavar="N[,N...]",
        help=f"numbers of requests that decode at once (default: {','.join(map(str, BATCH_SIZES))})",
    )
    group.add_argument(
        "--context-length", type=integer, metavar="N", help=f"tokens in the cache for each request (default: {CONTEXT})"
    )
    group.add_argument("--steps", type=integer, metavar="N", help=f"number of timed decode steps (default: {STEPS})")
    group.add_argument("--json", action="store_true", help="print one JSON object")
    add_verbosity_flags(parser)
    add_options(parser, "running the model", EngineConfig, leave_out=LEFT_OUT)


def run(flags: Flags) -> int:
    if flags.positionals:
        raise ValueError(f"bench must have flags only, but has {flags.positionals[0]!r}; remove it")
    model, verbosity = required_model(flags), Verbosity.from_flags(flags)
    pairs, batch_sizes = mesh_sizes(flags), flags.get("batch_sizes", list(BATCH_SIZES))
    context, steps = flags.get("context_length", CONTEXT), flags.get("steps", STEPS)
    _at_least(1, "--batch-sizes", min(batch_sizes))
    _at_least(2, "--context-length", context)
    _at_least(1, "--steps", steps)
    options = {name: value for name, value in flags.options(EngineConfig).items() if name not in LAYOUT}
    for tp, dcp in pairs:  # raises ValueError for wrong options before jax is imported
        layout = {"tensor_parallel_size": tp * dcp, "decode_context_parallel_size": dcp}
        EngineConfig.from_options({**options, **layout})
    from dcpjax.planning.measure import BenchSizes, bench
    from dcpjax.sharding.mesh import Layout

    layouts = [Layout(tensor_parallel_size=tp * dcp, decode_context_parallel_size=dcp) for tp, dcp in pairs]
    sizes = BenchSizes(batch_sizes=tuple(dict.fromkeys(batch_sizes)), context_length=context, steps=steps)
    found = bench(model, layouts, sizes, options, progress=not verbosity.quiet)
    print(json.dumps(found.to_dict(), ensure_ascii=False) if flags.get("json") else to_text(found))
    return 0


def mesh_sizes(flags: Flags) -> list[tuple[int, int]]:
    """(tp, dcp) of each layout to measure."""
    given = [name for name in LAYOUT if name in flags.given]
    if "layouts" not in flags.given:
        devices, dcp = (flags.get(name, 1) for name in LAYOUT)
        EngineConfig(tensor_parallel_size=devices, decode_context_parallel_size=dcp, block_size=dcp)
        return [(devices // dcp, dcp)]
    if given:
        raise ValueError(f"--layouts must not come with {names_to_flags(given[0])}, which it replaces; remove one")
    return [_mesh_size(text) for text in flags.get("layouts")]


def _mesh_size(text: str) -> tuple[int, int]:
    tp, comma, dcp = text.partition(",")
    if not (comma and tp.isdecimal() and dcp.isdecimal() and int(tp) and int(dcp)):
        raise ValueError(f"--layouts must be pairs TP,DCP of at least 1, but hold {text!r}; use 8,1 or 1,8")
    return int(tp), int(dcp)


def _at_least(least: int, name: str, value: int) -> None:
    if value < least:
        raise ValueError(f"{name} must be at least {least}, but is {value}; use {least}")


def to_text(found: "BenchResult") -> str:
    """A heading, then a table with one row for each layout and batch size."""
    headings = ("tp x dcp", "batch", "step ms", "tokens/s", "ratio", "prefill tokens/s", "ratio")
    lines = [headings, *(_cells(found, number) for number in range(len(found.rows)))]
    return "\n".join([*_heading(found), "", *aligned(lines)])


def _heading(found: "BenchResult") -> list[str]:
    sizes = found.sizes
    return [
        f"{found.model}, weights {found.dtype}, cache {found.kv_cache_dtype}; {found.machine}",
        f"step ms: median of {sizes.steps} decode steps, run one by one at {sizes.context_length:,} tokens per request",
        f"prefill: one prompt of {sizes.context_length:,} random tokens; time spent compiling is not counted",
        "ratio: speed divided by that of the first layout; above 1 is faster",
    ]


def _cells(found: "BenchResult", number: int) -> tuple[str, ...]:
    row = found.rows[number]
    decode, prefill = found.ratios(row)
    return (
        f"{row.tp} x {row.dcp}",
        str(row.batch_size),
        f"{row.step_seconds * 1e3:.1f}",
        f"{row.tokens_per_second:.1f}",
        f"{decode:.2f}",
        f"{row.prefill_tokens_per_second:.1f}",
        f"{prefill:.2f}",
    )
