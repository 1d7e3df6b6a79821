"""`dcpjax bench`: how fast the user's own model is on the user's own machine, layout beside layout."""

import json
from typing import TYPE_CHECKING

from dcpjax.api.config import EngineConfig
from dcpjax.cli.flags import Flags, Parser, add_options, integer, integers, spell
from dcpjax.cli.model import Loudness, add_loudness_flags, add_model_flag, check_model

if TYPE_CHECKING:
    from dcpjax.planning.measure import BenchResult

BATCH_SIZES, CONTEXT, STEPS = (1, 8, 32), 512, 10
LAYOUT = ("tensor_parallel_size", "decode_context_parallel_size")
LEFT_OUT = (  # decided by what is measured, without effect on it, or no flag
    "max_num_seqs",
    "max_model_len",
    "max_mixed_prefill_tokens",
    "enable_prefix_caching",
    "scheduling_policy",
    "async_scheduling",
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
        help="meshes to compare, as --layouts 8,1 1,8: groups of heads, ranks that split the context (default: the "
        "one that --tensor-parallel-size and --decode-context-parallel-size make)",
    )
    group.add_argument(
        "--batch-sizes",
        type=integers,
        action="extend",
        metavar="N[,N...]",
        help=f"requests that decode at once (default: {','.join(map(str, BATCH_SIZES))})",
    )
    group.add_argument(
        "--context-length", type=integer, metavar="N", help=f"tokens of each request (default: {CONTEXT})"
    )
    group.add_argument("--steps", type=integer, metavar="N", help=f"decode steps that are timed (default: {STEPS})")
    group.add_argument("--json", action="store_true", help="one JSON object")
    add_loudness_flags(parser)
    add_options(parser, "running the model", EngineConfig, leave_out=LEFT_OUT)


def run(flags: Flags) -> int:
    if flags.words:
        raise ValueError(f"bench must have no words after its flags, but has {flags.words[0]!r}; remove it")
    model, loudness = check_model(flags), Loudness.from_flags(flags)
    pairs, batch_sizes = mesh_sizes(flags), flags.get("batch_sizes", list(BATCH_SIZES))
    context, steps = flags.get("context_length", CONTEXT), flags.get("steps", STEPS)
    _at_least(1, "--batch-sizes", min(batch_sizes))
    _at_least(2, "--context-length", context)
    _at_least(1, "--steps", steps)
    options = {name: value for name, value in flags.options(EngineConfig).items() if name not in LAYOUT}
    for tp, dcp in pairs:  # refuses what it can before jax is imported
        layout = {"tensor_parallel_size": tp * dcp, "decode_context_parallel_size": dcp}
        EngineConfig.from_options({**options, **layout})
    from dcpjax.planning.measure import BenchSizes, bench
    from dcpjax.sharding.mesh import Layout

    layouts = [Layout(tensor_parallel_size=tp * dcp, decode_context_parallel_size=dcp) for tp, dcp in pairs]
    sizes = BenchSizes(batch_sizes=tuple(dict.fromkeys(batch_sizes)), context_length=context, steps=steps)
    found = bench(model, layouts, sizes, options, progress=not loudness.quiet)
    print(json.dumps(found.to_dict(), ensure_ascii=False) if flags.get("json") else to_text(found))
    return 0


def mesh_sizes(flags: Flags) -> list[tuple[int, int]]:
    """(tp, dcp) of each layout that is asked for."""
    given = [name for name in LAYOUT if name in flags.given]
    if "layouts" not in flags.given:
        devices, dcp = (flags.get(name, 1) for name in LAYOUT)
        EngineConfig(tensor_parallel_size=devices, decode_context_parallel_size=dcp, block_size=dcp)
        return [(devices // dcp, dcp)]
    if given:
        raise ValueError(f"--layouts must not come with {spell(given[0])}, which it replaces; remove one")
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
    """What was measured, then a row for each layout and batch size."""
    headings = ("tp x dcp", "batch", "step ms", "tokens/s", "ratio", "prefill tokens/s", "ratio")
    lines = [headings, *(_cells(found, number) for number in range(len(found.rows)))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    return "\n".join([*_heading(found), "", *table])


def _heading(found: "BenchResult") -> list[str]:
    sizes = found.sizes
    return [
        f"{found.model}, weights {found.dtype}, cache {found.kv_cache_dtype}; {found.machine}",
        f"step ms: median of {sizes.steps} decode steps at {sizes.context_length:,} tokens a request, each waited for",
        f"prefill: one prompt of {sizes.context_length:,} random tokens; compiling is not counted",
        "ratio: speed over that of the first layout, which ran before; above 1 is faster",
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
