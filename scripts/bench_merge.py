"""The three merges over `dcp` (ag_rs, a2a, psum): predicted for published links, and compiled and timed here.

    python scripts/bench_merge.py
    python scripts/bench_merge.py --dcp 8 --rows 1 32 --rounds 20

The first table is predicted: microseconds per layer for each kind of link, and the merge that dcp_comm_backend="auto"
chooses. The second is measured on this machine's devices, on CPU virtual ones: the collectives in the compiled
program, the bytes they send beside those of the cost model, and the time of a merge relative to ag_rs. On accelerators
the links are measured too and added to the first table.
"""

import argparse
import re
import statistics
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from measuring import alternate, machine

from dcpjax.runtime.devices import ensure_devices
from dcpjax.sharding.link import PUBLISHED_LINKS, measured, published
from dcpjax.sharding.merge import MERGES, Partial
from dcpjax.sharding.merge_cost import MERGE_NAMES, Link, Merge, MergeSize, fastest, seconds, sends
from dcpjax.sharding.mesh import DCP, Layout, make_mesh

SHAPES = {  # (query heads, values per head) of models whose partials one dcp group merges
    "gqa 32 x 128": (32, 128),  # Llama 3.1 8B
    "gqa 9 x 64": (9, 64),  # SmolLM2 135M: heads that do not divide
    "mla 64 x 512": (64, 512),  # Kimi K2
}
MEASURED_SHAPES = {"gqa 8 x 64": (8, 64), "gqa 9 x 64": (9, 64), "mla 8 x 512": (8, 512)}
PREDICTED_RANKS, PREDICTED_ROWS = (2, 8), (1, 8, 64, 512)
SENT = {  # bytes that each device sends over bytes of its result, by the number of ranks n
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
        name: {ranks: published(numbers, ranks) for ranks in PREDICTED_RANKS}
        for name, numbers in PUBLISHED_LINKS.items()
    }
    found = measured(mesh) if device.platform != "cpu" else None
    if found is not None:
        links[device.device_kind] = {options.dcp: found}
    print_predicted(links)
    print_measured(mesh, options)


def print_predicted(links: dict[str, dict[int, Link]]) -> None:
    print(f"\nPredicted, us per layer\n{'link':10} dcp | {'heads':13} | rows | {_columns()} | auto")
    for name, by_ranks in links.items():
        for ranks, link in by_ranks.items():
            for shape, (heads, width) in SHAPES.items():
                for rows in PREDICTED_ROWS:
                    size = _size(rows, heads, width, ranks)
                    times = " ".join(f"{seconds(merge, size, link) * 1e6:9.1f}" for merge in MERGE_NAMES)
                    print(f"{name:10} {ranks:3} | {shape:13} | {rows:4} | {times} | {fastest(size, link)}")


def print_measured(mesh: Mesh, options: argparse.Namespace) -> None:
    ranks, kind = options.dcp, mesh.devices.flat[0].device_kind
    print(f"\nMeasured on {ranks} devices ({kind}), medians of {options.rounds}; x: times ag_rs")
    print(f"{'heads':13} | rows | {'merge':6} | {'compiled':34} | bytes sent | of model |     us |    x")
    for shape, (heads, width) in MEASURED_SHAPES.items():
        for rows in options.rows:
            size = _size(rows, heads, width, ranks)
            programs: dict[Merge, Any] = {merge: compiled(mesh, merge, size) for merge in MERGE_NAMES}
            taken = alternate([run for run, _ in programs.values()], options.rounds, calls=1, warm_up=2)
            times: dict[Merge, float] = {
                merge: statistics.median(one) for merge, one in zip(MERGE_NAMES, taken, strict=True)
            }
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
    """A call that merges random partials, one per device, and the text of its compiled program."""

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
    """The number of collectives of each kind in a program, and the bytes each device sends for all of them."""
    kinds, total = Counter[str](), 0.0
    for result, kind in re.findall(rf"= (\S+|\(.*?\)) ({'|'.join(SENT)})(?:-start)?\(", text):
        shapes = re.findall(r"f32\[([\d,]*)\]", result)
        values = sum(int(np.prod([int(size) for size in shape.split(",") if size])) for shape in shapes)
        kinds[kind] += 1
        total += 4 * values * SENT[kind](ranks)
    return kinds, total


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
