"""How fast collectives over `dcp` are on a mesh: measured once per machine, or from published numbers.

switch  every device reaches every other directly; a ring of n devices takes n - 1 hops, an all-to-all one
torus   an axis is a ring in both directions: data takes n / 2 hops, and an all-to-all loads the links with
        n^2 / (4 (n - 1)) times the bytes that a device sends, a reduce-scatter with 1 times
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

from dcpjax.sharding.merge_cost import CollectiveKind, CollectiveSpeed, Link, send
from dcpjax.sharding.mesh import DCP, TP

SIZES = (2**8, 2**18)  # floats per device: latency dominates the first, bandwidth the second
CHAINS = (2, 10)  # collectives in one program: the difference of two programs does not contain the cost of a start
ROUNDS = 7


class PublishedLink(NamedTuple):
    """Published numbers of one kind of connection."""

    launch: float  # seconds before a collective sends anything
    hop: float  # seconds from one device to the next
    bandwidth: float  # bytes per second out of a device, over the links that a dcp group uses
    is_torus: bool = False


# Launch and hop of a switch are those by which NCCL itself chooses an algorithm (src/graph/tuning.cc, ring and LL).
# A hop of a TPU's interconnect takes about 1 us ("How to Scale Your Model", jax-ml.github.io/scaling-book, part 2).
PUBLISHED_LINKS = {
    "nvlink": PublishedLink(6.6e-6, 0.6e-6, 450e9),  # H100 and H200 SXM datasheets, one direction
    "pcie": PublishedLink(6.6e-6, 1.0e-6, 31.5e9),  # 16 lanes of PCI Express 4.0
    "ici": PublishedLink(1e-6, 1e-6, 180e9, is_torus=True),  # TPU v5p and v6e, one axis, two links of 90 GB/s
}
_ON_NVLINK = re.compile(r"SXM|HBM3|[BH][23]00|MI3\d\d")


def find_link(mesh: Mesh, folder: Path) -> Link | None:
    """The speed of a mesh's collectives; None on CPU, whose virtual devices share one memory.

    Several processes use published numbers: their measurements would differ, and all must choose the same merge.
    """
    device, ranks = mesh.devices.flat[0], mesh.shape[DCP]
    if device.platform == "cpu" or ranks == 1:
        return None
    link = load_or_measure(mesh, folder / "links.json") if jax.process_count() == 1 else None
    return link or published(PUBLISHED_LINKS[link_name(device.platform, device.device_kind)], ranks)


def link_name(platform: str, device_kind: str) -> str:
    """The key in `PUBLISHED_LINKS` for devices of this kind, judged by their name."""
    if platform == "tpu":
        return "ici"
    return "nvlink" if _ON_NVLINK.search(device_kind) and "PCIE" not in device_kind.upper() else "pcie"


def published(numbers: PublishedLink, ranks: int) -> Link:
    """The speeds of a dcp group of this many ranks, from published numbers."""
    ring_hops = ranks // 2 if numbers.is_torus else ranks - 1
    all_to_all_hops = ring_hops if numbers.is_torus else 1
    load = ranks**2 / (4 * (ranks - 1)) if numbers.is_torus else 1.0  # of an all-to-all on the links of a torus

    def speed(hops: int, bandwidth: float) -> CollectiveSpeed:
        return CollectiveSpeed(numbers.launch + hops * numbers.hop, bandwidth)

    once = speed(ring_hops, numbers.bandwidth)
    return Link(
        all_gather=once,
        reduce_scatter=once,
        all_to_all=speed(all_to_all_hops, numbers.bandwidth / load),
        all_reduce=speed(2 * ring_hops, numbers.bandwidth),
    )


def measured(mesh: Mesh) -> Link | None:
    """Time each kind of collective at two sizes and fit latency and bandwidth; None if the times allow no fit."""
    speeds = {kind: _fit(mesh, kind) for kind in COLLECTIVES}
    return None if None in speeds.values() else Link(**speeds)  # type: ignore[arg-type]


def _fit(mesh: Mesh, kind: CollectiveKind) -> CollectiveSpeed | None:
    small, large = (send(kind, size, mesh.shape[DCP]).bytes for size in SIZES)
    short, long = (time_one(mesh, kind, size) for size in SIZES)
    if short <= 0 or long <= short:
        return None
    bandwidth = (large - small) / (long - short)
    latency = short - small / bandwidth
    return CollectiveSpeed(latency, bandwidth) if latency >= 0 else None


def time_one(mesh: Mesh, kind: CollectiveKind, floats: int) -> float:
    """Seconds of one collective within a program."""
    short, long = (_time(mesh, kind, floats, count) for count in CHAINS)
    return (long - short) / (CHAINS[1] - CHAINS[0])


def _time(mesh: Mesh, kind: CollectiveKind, floats: int, count: int) -> float:
    """Seconds of a program of `count` collectives, each of which takes the result of the one before."""

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


# Each takes [floats] per device and returns [floats] per device, of the same magnitude.
COLLECTIVES: dict[CollectiveKind, Callable[[jax.Array], jax.Array]] = {
    "all_gather": _gather,
    "reduce_scatter": _scatter,
    "all_to_all": bind(jax.lax.all_to_all, axis_name=DCP, split_axis=0, concat_axis=0, tiled=True),
    "all_reduce": bind(jax.lax.pmean, axis_name=DCP),
}


def load_or_measure(mesh: Mesh, path: Path, measure: Callable[[Mesh], Link | None] = measured) -> Link | None:
    """The link of a mesh from the file `path`, else measured and written there; None if it could not be measured."""
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
    """Empty if there is no such file or it is damaged: everything in it can be measured again."""
    try:
        return {key: _link(speeds) for key, speeds in json.loads(path.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return {}


def _link(speeds: dict[str, Any]) -> Link:
    link = Link(**{kind: CollectiveSpeed(*map(float, speed)) for kind, speed in speeds.items()})
    if not all(0 <= speed.latency < 1 and speed.bandwidth > 0 for speed in link):
        raise ValueError("a speed must be positive")
    return link


def _write(path: Path, links: dict[str, Link]) -> None:
    """Replaces the file in one step; does nothing if the folder cannot be written."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps({key: link._asdict() for key, link in links.items()}, indent=1), encoding="utf-8")
        draft.replace(path)
