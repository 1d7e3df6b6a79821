"""`dcpjax simulate`: replays a recorded trace on simulated hardware, once per layout and number of users."""

import json
from dataclasses import fields
from typing import Any

from dcpjax.api.progress import status
from dcpjax.cli.flags import Flags, Parser, add_options, flag, integer, names_to_flags
from dcpjax.cli.plan import HARDWARE_HELP
from dcpjax.simulation.options import SimOptions
from dcpjax.simulation.trace import TraceRequest, read_trace, scaled

SEVERAL = {  # flags that take several values, for one simulation each: (name of the option, help)
    "dcp": (
        "decode_context_parallel_size",
        "ranks that split the KV cache by token position (default: 1); several numbers give a row each",
    ),
    "concurrency": (
        "concurrency",
        "users who each send the next request when their last one is answered (implies --arrivals closed); several "
        "numbers give a row each",
    ),
}
FLAGS_ADDED_HERE = ("hardware", "tensor_parallel_size", *(name for name, _ in SEVERAL.values()))


def add_flags(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--timeline", action="store_true", help="with --json: include every step")
    parser.add_argument("--limit", type=integer, metavar="N", help="replay only the first N requests of the trace")
    parser.add_argument(
        "--scale", type=integer, metavar="N", help="divide all lengths of the trace by N, a divisor of 512"
    )
    parser.add_argument("--hardware", metavar="NAME|NUMBERS", help=HARDWARE_HELP)
    parser.add_argument(
        flag("tensor_parallel_size"),
        "-tp",
        "--tp",
        type=integer,
        metavar="N",
        dest="tensor_parallel_size",
        help="total number of devices (default: 1)",
    )
    for short_name, (name, text) in SEVERAL.items():
        names = dict.fromkeys([flag(name), f"--{short_name}"])
        vllm_name = ["-dcp"] if short_name == "dcp" else []
        parser.add_argument(*names, *vllm_name, type=integer, nargs="+", metavar="N", dest=name, help=text)
    add_options(parser, "what is simulated", SimOptions, leave_out=["hf_overrides", *FLAGS_ADDED_HERE])


def run(flags: Flags) -> int:
    """Exit code 0. Raises ValueError before the first simulation if a flag is wrong or the trace does not fit."""
    if len(flags.positionals) != 2:
        raise ValueError(
            "simulate must have a trace and one model, a preset such as kimi-k2, a folder, a .gguf file or a hub id, "
            "but has " + (", ".join(map(repr, flags.positionals)) or "none") + "; put both before the flags"
        )
    path, model = flags.positionals
    rows = _rows(flags)
    for row in rows:
        SimOptions.from_options(row)  # raises ValueError for wrong options before jax is imported
    requests = _requests(path, flags)
    from dcpjax.simulation.simulator import Simulator
    from dcpjax.simulation.table import conclusion, remarks, to_text

    simulators = [Simulator(requests, model, **row) for row in rows]
    simulations = []
    for number, simulator in enumerate(simulators, start=1):
        with status(f"simulating row {number} of {len(rows)}"):
            simulations.append(simulator.run())
    if not flags.get("json"):
        print(names_to_flags(to_text(simulations)))
        return 0
    simulated = [one.to_dict(timeline=flags.get("timeline", False)) for one in simulations]
    answer = {"rows": simulated, "conclusion": conclusion(simulations), "remarks": remarks(simulations)}
    print(json.dumps(answer, ensure_ascii=False))
    return 0


def _rows(flags: Flags) -> list[dict[str, Any]]:
    """The options of each row, ordered by layout, then by number of users."""
    names = {field.name for field in fields(SimOptions)} - {name for name, _ in SEVERAL.values()}
    common = {name: value for name, value in flags.given.items() if name in names}
    layouts = flags.get("decode_context_parallel_size", [1])
    users = flags.get("concurrency")
    if users:
        common.setdefault("arrivals", "closed")
    return [
        common | {"decode_context_parallel_size": dcp} | ({} if count is None else {"concurrency": count})
        for dcp in layouts
        for count in (users or [None])
    ]


def _requests(path: str, flags: Flags) -> list[TraceRequest]:
    requests = read_trace(path, flags.get("limit"))
    return scaled(requests, flags.get("scale")) if flags.get("scale") is not None else requests
