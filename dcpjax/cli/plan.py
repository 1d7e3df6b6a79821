"""`dcpjax plan`: what fits on which layout, and what a decode step must cost at least."""

import json

from dcpjax.cli.flags import Flags, Parser, add_options, flag, integer, spell
from dcpjax.planning.options import PlanOptions

HARDWARE_HELP = (
    "one device: b200, h200, h100, mi300x, tpu-v5p, tpu-v6e or cpu; or numbers, as "
    "memory=180GB,bandwidth=8TB/s,link=900GB/s, also latency=2us,flops=2250TFLOPS; or a name and what differs, as "
    "b200,memory=192GB (default: b200)"
)
LAYOUT = {
    "tensor_parallel_size": (["-tp", "--tp"], "devices in all (default: 1)"),
    "decode_context_parallel_size": (
        ["-dcp", "--dcp"],
        "ranks that split the KV cache by token position (default: the fewest that store it the fewest times)",
    ),
}


def add_flags(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--hardware", metavar="NAME|NUMBERS", help=HARDWARE_HELP)
    for name, (short, text) in LAYOUT.items():
        parser.add_argument(flag(name), *short, type=integer, metavar="N", dest=name, help=text)
    add_options(parser, "planning", PlanOptions, leave_out=[*LAYOUT, "hardware", "hf_overrides"])


def run(flags: Flags) -> int:
    """Exit code 0 where it fits, 2 where it does not."""
    if len(flags.words) != 1:
        raise ValueError(
            "plan must have one model, a preset such as kimi-k2, a folder, a .gguf file or a hub id, but has "
            + (", ".join(map(repr, flags.words)) or "none")
        )
    options = flags.options(PlanOptions)
    PlanOptions.from_options(options)  # refuses what it can before jax is imported
    from dcpjax.planning.planner import plan

    answer = plan(flags.words[0], **options)
    print(json.dumps(answer.to_dict(), ensure_ascii=False) if flags.get("json") else spell(str(answer)))
    return 0 if answer.fits else 2
