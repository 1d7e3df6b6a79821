"""The three merges over `dcp` beside each other: predicted on paper for known links, compiled and timed here.

    python scripts/bench_merge.py
    python scripts/bench_merge.py --dcp 8 --rows 1 32 --rounds 20

Paper: microseconds per layer for each kind of link, and the merge that dcp_comm_backend="auto" takes. Here: what is
compiled for this machine's devices (virtual ones on CPU), bytes read off its result types beside those of the cost
model, and the time of a merge relative to ag_rs. On accelerators the links are measured too.
"""

import argparse
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from bench_decode import machine
from jax.sharding import Mesh, PartitionSpec

from dcpjax.runtime.devices import ensure_devices
from dcpjax.sharding.link import PUBLISHED_LINKS, measured, published
from dcpjax.sharding.merge import MERGES, Partial
from dcpjax.sharding.merge_cost import MERGE_NAMES, Link, Merge, MergeSize, fastest, seconds, sends
from dcpjax.sharding.mesh import DCP, Layout, make_mesh

SHAPES = {  # query heads and values per head that the dcp group of a whole model merges
    "gqa 32 x 128": (32, 128),  # Llama 3.1 8B
    "gqa 9 x 64": (9, 64),  # SmolLM2 135M: heads that do not divide
    "mla 64 x 512": (64, 512),  # Kimi K2
}
HERE = {"gqa 8 x 64": (8, 64), "gqa 9 x 64": (9, 64), "mla 8 x 512": (8, 512)}
PAPER_RANKS, PAPER_ROWS = (2, 8), (1, 8, 64, 512)
SENT = {  # of the bytes of a result, by n ranks
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: n - 1,
    "all-to-all": lambda n: (n - 1) / n,
    "all-reduce": lambda n: 2 * (n - 1) / n,
}


def main() -> None:
    options = _options()
    ensure_devices(options.dcp)
    mesh = make_mesh(Layout(tensor_parallel_size=options.dcp, decode_context_parallel_size=options.dcp))
    device = mesh.devices.flat[0]
    print(f"{machine()}; jax {jax.__version__}")
    links = {
        name: {ranks: published(numbers, ranks) for ranks in PAPER_RANKS} for name, numbers in PUBLISHED_LINKS.items()
    }
    found = measured(mesh) if device.platform != "cpu" else None
    if found is not None:
        links[device.device_kind] = {options.dcp: found}
    print_paper(links)
    print_here(mesh, options)


def print_paper(links: dict[str, dict[int, Link]]) -> None:
    print(f"\nOn paper, us per layer\n{'link':10} dcp | {'heads':13} | rows | {_columns()} | auto")
    for name, by_ranks in links.items():
        for ranks, link in by_ranks.items():
            for shape, (heads, width) in SHAPES.items():
                for rows in PAPER_ROWS:
                    size = _size(rows, heads, width, ranks)
                    times = " ".join(f"{seconds(merge, size, link) * 1e6:9.1f}" for merge in MERGE_NAMES)
                    print(f"{name:10} {ranks:3} | {shape:13} | {rows:4} | {times} | {fastest(size, link)}")


def print_here(mesh: Mesh, options: argparse.Namespace) -> None:
    ranks, kind = options.dcp, mesh.devices.flat[0].device_kind
    print(f"\nOn {ranks} devices here ({kind}), medians of {options.rounds}; x: times ag_rs")
    print(f"{'heads':13} | rows | {'merge':6} | {'compiled':34} | bytes sent | of model |     us |    x")
    for shape, (heads, width) in HERE.items():
        for rows in options.rows:
            size = _size(rows, heads, width, ranks)
            programs: dict[Merge, Any] = {merge: compiled(mesh, merge, size) for merge in MERGE_NAMES}
            times = alternate({merge: run for merge, (run, _) in programs.items()}, options.rounds)
            for merge, (_, text) in programs.items():
                print(_row(shape, size, merge, text, times))


def _row(shape: str, size: MergeSize, merge: Merge, text: str, times: dict[Merge, float]) -> str:
    kinds, found = collectives(text, size.ranks)
    expected = sum(send.bytes for send in sends(merge, size))
    names = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return (
        f"{shape:13} | {size.rows:4} | {merge:6} | {names:34} | {found:10,.0f} | {found / expected:8.0%} | "
        f"{times[merge] * 1e6:6.0f} | {times[merge] / times['ag_rs']:4.2f}"
    )


def compiled(mesh: Mesh, merge: Merge, size: MergeSize) -> tuple[Callable[[], Any], str]:
    """A merge of random partials, one per device, and its program."""

    def body(out: jax.Array, lse: jax.Array) -> jax.Array:
        return MERGES[merge](Partial(out[0], lse[0]), size.features)

    spec = PartitionSpec(DCP)
    across = jax.shard_map(body, mesh=mesh, in_specs=(spec, spec), out_specs=PartitionSpec(None, DCP), check_vma=False)
    random, where = np.random.default_rng(0), jax.NamedSharding(mesh, spec)
    shape = (size.ranks, size.rows, size.heads)
    out, lse = (random.normal(size=shape + more).astype(np.float32) for more in ((size.head_dim,), ()))
    arrays = jax.device_put((out, lse), where)
    program = jax.jit(across).lower(*arrays).compile()
    return lambda: jax.block_until_ready(program(*arrays)), program.as_text() or ""


def collectives(text: str, ranks: int) -> tuple[Counter[str], float]:
    """How many of each kind a program holds, and the bytes each device sends for all of them."""
    kinds, total = Counter[str](), 0.0
    for result, kind in re.findall(rf"= (\S+|\(.*?\)) ({'|'.join(SENT)})(?:-start)?\(", text):
        shapes = re.findall(r"f32\[([\d,]*)\]", result)
        values = sum(int(np.prod([int(size) for size in shape.split(",") if size])) for shape in shapes)
        kinds[kind] += 1
        total += 4 * values * SENT[kind](ranks)
    return kinds, total


def alternate(runs: dict[Merge, Callable[[], Any]], rounds: int) -> dict[Merge, float]:
    """Median seconds of each, taking turns, so that all meet the same machine."""
    times: dict[Merge, list[float]] = {merge: [] for merge in runs}
    for number in range(rounds + 2):
        for merge, run in runs.items():
            started = time.perf_counter()
            run()
            if number >= 2:
                times[merge].append(time.perf_counter() - started)
    return {merge: statistics.median(taken) for merge, taken in times.items()}


def _size(rows: int, heads: int, width: int, ranks: int) -> MergeSize:
    return MergeSize(rows, heads, width, -(-heads * width // ranks) * ranks, ranks)


def _columns() -> str:
    return " ".join(f"{merge:>9}" for merge in MERGE_NAMES)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dcp", type=int, default=8)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--rounds", type=int, default=50)
    return parser.parse_args()


if __name__ == "__main__":
    main()
