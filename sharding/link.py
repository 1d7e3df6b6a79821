"""How fast the devices of a mesh exchange over `dcp`: measured once per machine, or from published numbers.

    switch  every device reaches every other directly; a ring of n devices takes n - 1 hops, an all-to-all one
    torus   an axis is a ring in both directions; data goes n / 2 hops, and an all-to-all crosses links that a
            reduce-scatter does not, n^2 / (4 (n - 1)) times the bytes sent

Knows meshes and collectives; knows nothing about attention.
"""

import contextlib
import json
import os
import re
import time
from collections.abc import Callable
from functools import partial as bind
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from dcpjax.sharding.merge_cost import FLOAT32, Kind, Link, Pace
from dcpjax.sharding.mesh import DCP, TP

SIZES = (2**8, 2**18)  # floats per device: one far below, one far above where latency and bandwidth weigh the same
CHAINS = (2, 10)  # collectives in one program: their difference is free of what starting a program costs
ROUNDS = 7


class Cable(NamedTuple):
    """Published numbers of one kind of link."""

    launch: float  # seconds before a collective sends anything
    hop: float  # seconds from one device to the next
    bandwidth: float  # bytes per second out of a device, over the links that a dcp group uses
    is_torus: bool = False


# Launch and hop of a switch are those by which NCCL itself chooses an algorithm (src/graph/tuning.cc, ring and LL).
# A hop of a TPU's interconnect takes about 1 us ("How to Scale Your Model", jax-ml.github.io/scaling-book, part 2).
CABLES = {
    "nvlink": Cable(6.6e-6, 0.6e-6, 450e9),  # H100 and H200 SXM datasheets, one direction
    "pcie": Cable(6.6e-6, 1.0e-6, 31.5e9),  # 16 lanes of PCI Express 4.0
    "ici": Cable(1e-6, 1e-6, 180e9, is_torus=True),  # TPU v5p and v6e, one axis, two links of 90 GB/s
}
_ON_NVLINK = re.compile(r"SXM|HBM3|[BH][23]00|MI3\d\d")


def find_link(mesh: Mesh, folder: Path) -> Link | None:
    """What is known of a mesh's links; None on CPU, whose virtual devices exchange through one memory.

    Several processes use published numbers: each would measure its own, and choices must agree.
    """
    device, ranks = mesh.devices.flat[0], mesh.shape[DCP]
    if device.platform == "cpu" or ranks == 1:
        return None
    link = remembered(mesh, folder / "links.json") if jax.process_count() == 1 else None
    return link or published(CABLES[cable_name(device.platform, device.device_kind)], ranks)


def cable_name(platform: str, device_kind: str) -> str:
    """What joins devices of this kind, as far as the name tells."""
    if platform == "tpu":
        return "ici"
    return "nvlink" if _ON_NVLINK.search(device_kind) and "PCIE" not in device_kind.upper() else "pcie"


def published(cable: Cable, ranks: int) -> Link:
    """A link of this many ranks from published numbers."""
    around = ranks // 2 if cable.is_torus else ranks - 1
    across = around if cable.is_torus else 1
    crossed = ranks**2 / (4 * (ranks - 1)) if cable.is_torus else 1.0

    def pace(hops: int, bandwidth: float) -> Pace:
        return Pace(cable.launch + hops * cable.hop, bandwidth)

    once = pace(around, cable.bandwidth)
    return Link(
        all_gather=once,
        reduce_scatter=once,
        all_to_all=pace(across, cable.bandwidth / crossed),
        all_reduce=pace(2 * around, cable.bandwidth),
    )


def measured(mesh: Mesh) -> Link | None:
    """Time each kind of collective at two sizes and lay a line through them; None where no line fits."""
    paces = {kind: _fit(mesh, kind) for kind in COLLECTIVES}
    return None if None in paces.values() else Link(**paces)  # type: ignore[arg-type]


def _fit(mesh: Mesh, kind: Kind) -> Pace | None:
    (small, quick), (large, slow) = ((sent(kind, size, mesh.shape[DCP]), time_one(mesh, kind, size)) for size in SIZES)
    if quick <= 0 or slow <= quick:
        return None
    bandwidth = (large - small) / (slow - quick)
    latency = quick - small / bandwidth
    return Pace(latency, bandwidth) if latency >= 0 else None


def sent(kind: Kind, floats: int, ranks: int) -> float:
    """Bytes each device sends of an input of so many floats."""
    share = (ranks - 1) / ranks * FLOAT32 * floats
    return {"all_gather": ranks * share, "reduce_scatter": share, "all_to_all": share, "all_reduce": 2 * share}[kind]


def time_one(mesh: Mesh, kind: Kind, floats: int) -> float:
    """Seconds of one collective within a program."""
    short, long = (_time(mesh, kind, floats, count) for count in CHAINS)
    return (long - short) / (CHAINS[1] - CHAINS[0])


def _time(mesh: Mesh, kind: Kind, floats: int, count: int) -> float:
    """Seconds of a program of `count` collectives, each of which needs the one before."""

    def chain(x: jax.Array) -> jax.Array:
        for _ in range(count):
            x = COLLECTIVES[kind](x)
        return x

    spec = PartitionSpec((TP, DCP))
    run = jax.jit(jax.shard_map(chain, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    x = jnp.ones((mesh.size * floats,), jnp.float32, device=jax.NamedSharding(mesh, spec))
    run(x).block_until_ready()
    return min(_seconds(lambda: run(x).block_until_ready()) for _ in range(ROUNDS))


def _seconds(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _gather(x: jax.Array) -> jax.Array:
    return jnp.mean(jax.lax.all_gather(x, DCP), axis=0)


def _scatter(x: jax.Array) -> jax.Array:
    ranks = jax.lax.axis_size(DCP)
    return jnp.tile(jax.lax.psum_scatter(x, DCP, tiled=True) / ranks, ranks)


# One collective from and to [floats] per device, without growing the values.
COLLECTIVES: dict[Kind, Callable[[jax.Array], jax.Array]] = {
    "all_gather": _gather,
    "reduce_scatter": _scatter,
    "all_to_all": bind(jax.lax.all_to_all, axis_name=DCP, split_axis=0, concat_axis=0, tiled=True),
    "all_reduce": bind(jax.lax.pmean, axis_name=DCP),
}


def remembered(mesh: Mesh, path: Path, measure: Callable[[Mesh], Link | None] = measured) -> Link | None:
    """The link of a mesh as `path` has it, else measured and written there; None if it could not be measured."""
    device = mesh.devices.flat[0]
    key = f"{device.platform}, {device.device_kind}, tp={mesh.shape[TP]}, dcp={mesh.shape[DCP]}"
    links = _read(path)
    if key in links:
        return links[key]
    link = measure(mesh)
    if link is not None:
        _write(path, links | {key: link})
    return link


def _read(path: Path) -> dict[str, Link]:
    """Empty where there is no such file or it holds anything else: it is only a memory."""
    try:
        return {key: _link(paces) for key, paces in json.loads(path.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return {}


def _link(paces: dict[str, Any]) -> Link:
    link = Link(**{kind: Pace(*map(float, pace)) for kind, pace in paces.items()})
    if not all(0 <= pace.latency < 1 and pace.bandwidth > 0 for pace in link):
        raise ValueError("a pace must be positive")
    return link


def _write(path: Path, links: dict[str, Link]) -> None:
    """Whole or not at all; not at all where the folder cannot be written."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps({key: link._asdict() for key, link in links.items()}, indent=1), encoding="utf-8")
        draft.replace(path)
