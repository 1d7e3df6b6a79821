"""`dcpjax plan`: what fits on each layout, and the lower bound of a decode step."""

import json

from dcpjax.cli.flags import Flags, Parser, add_options, flag, integer, names_to_flags
from dcpjax.planning.options import PlanOptions

HARDWARE_HELP = (
    "the device: b200, h200, h100, mi300x, tpu-v5p, tpu-v6e or cpu; or its numbers, such as "
    "memory=180GB,bandwidth=8TB/s,link=900GB/s, optionally with latency=2us,flops=2250TFLOPS; or a name with changes, "
    "such as b200,memory=192GB (default: b200)"
)
LAYOUT = {
    "tensor_parallel_size": (["-tp", "--tp"], "total number of devices (default: 1)"),
    "decode_context_parallel_size": (
        ["-dcp", "--dcp"],
        "ranks that split the KV cache by token position (default: the smallest number that stores the fewest copies)",
    ),
}


def add_flags(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--hardware", metavar="NAME|NUMBERS", help=HARDWARE_HELP)
    for name, (short_names, text) in LAYOUT.items():
        parser.add_argument(flag(name), *short_names, type=integer, metavar="N", dest=name, help=text)
    add_options(parser, "what is planned", PlanOptions, leave_out=[*LAYOUT, "hardware", "hf_overrides"])


def run(flags: Flags) -> int:
    """Exit code 0 if the model fits, 2 if it does not."""
    if len(flags.positionals) != 1:
        raise ValueError(
            "plan must have one model, a preset such as kimi-k2, a folder, a .gguf file or a hub id, but has "
            + (", ".join(map(repr, flags.positionals)) or "none")
        )
    options = flags.options(PlanOptions)
    PlanOptions.from_options(options)  # raises ValueError for wrong options before jax is imported
    from dcpjax.planning.planner import plan

    planned = plan(flags.positionals[0], **options)
    print(json.dumps(planned.to_dict(), ensure_ascii=False) if flags.get("json") else names_to_flags(str(planned)))
    return 0 if planned.fits else 2
