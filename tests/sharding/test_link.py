"""The speeds of a mesh's links: published, measured, and read from the file of an earlier run."""

import json
import re
from collections import Counter
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dcpjax.sharding import link as link_module
from dcpjax.sharding.link import (
    COLLECTIVES,
    PUBLISHED_LINKS,
    PublishedLink,
    find_link,
    link_name,
    load_or_measure,
    measured,
    published,
)
from dcpjax.sharding.merge_cost import CollectiveSpeed, Link, send
from dcpjax.sharding.mesh import Layout, make_mesh

LINK = Link(
    CollectiveSpeed(1e-6, 1e9), CollectiveSpeed(2e-6, 2e9), CollectiveSpeed(3e-6, 3e9), CollectiveSpeed(4e-6, 4e9)
)


def mesh(tp: int = 2, dcp: int = 4) -> Any:
    return make_mesh(Layout(tensor_parallel_size=tp * dcp, decode_context_parallel_size=dcp))


def accelerators(tp: int, dcp: int, kind: str = "NVIDIA H200") -> Any:
    """A stand-in with what `find_link` reads from a mesh of GPUs."""
    return SimpleNamespace(
        devices=np.array([SimpleNamespace(platform="gpu", device_kind=kind)]), shape={"tp": tp, "dcp": dcp}
    )


def measures(calls: list[Any], found: Link | None = LINK) -> Any:
    def measure(mesh: Any) -> Link | None:
        calls.append(mesh)
        return found

    return measure


# --- published


@pytest.mark.parametrize(
    ("platform", "kind", "name"),
    [
        ("gpu", "NVIDIA H100 80GB HBM3", "nvlink"),
        ("gpu", "NVIDIA A100-SXM4-80GB", "nvlink"),
        ("gpu", "NVIDIA B200", "nvlink"),
        ("gpu", "NVIDIA H100 PCIe", "pcie"),
        ("gpu", "NVIDIA A100-PCIE-40GB", "pcie"),
        ("gpu", "NVIDIA L4", "pcie"),
        ("gpu", "NVIDIA GeForce RTX 4090", "pcie"),
        ("tpu", "TPU v5p", "ici"),
    ],
)
def test_the_name_of_a_device_tells_its_link(platform, kind, name):
    assert link_name(platform, kind) == name


def test_behind_a_switch_a_ring_takes_all_hops_and_an_all_to_all_one():
    link = published(PublishedLink(launch=5.0, hop=1.0, bandwidth=100.0), ranks=8)
    assert [speed.latency for speed in link] == [12, 12, 6, 19]
    assert {speed.bandwidth for speed in link} == {100}


def test_on_a_torus_data_goes_half_around_and_an_all_to_all_crowds_its_links():
    """8 ranks: an all-to-all of p bytes each takes 8 p / 4 over both directions, a reduce-scatter 7/8 p."""
    link = published(PublishedLink(launch=1.0, hop=1.0, bandwidth=100.0, is_torus=True), ranks=8)
    assert [speed.latency for speed in link] == [5, 5, 5, 9]
    share = 7 / 8 * 1000
    assert share / link.all_to_all.bandwidth == pytest.approx(8 * 1000 / 4 / 100)
    assert share / link.reduce_scatter.bandwidth == pytest.approx(share / 100)


def test_virtual_devices_and_a_single_rank_have_no_link(tmp_path):
    assert find_link(mesh(), tmp_path) is None
    assert find_link(accelerators(8, 1), tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_several_processes_use_published_numbers_since_each_would_measure_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert find_link(accelerators(1, 8), tmp_path) == published(PUBLISHED_LINKS["nvlink"], 8)


def test_published_numbers_stand_in_where_measuring_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(link_module, "load_or_measure", lambda mesh, path: None)
    assert find_link(accelerators(1, 8, "NVIDIA L4"), tmp_path) == published(PUBLISHED_LINKS["pcie"], 8)


# --- measured


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_what_is_timed_is_a_chain_of_one_kind_of_collective_that_keeps_its_values(kind):
    place = mesh()

    def twice(x: jax.Array) -> jax.Array:
        return COLLECTIVES[kind](COLLECTIVES[kind](x))

    spec = P(("tp", "dcp"))
    run = jax.jit(jax.shard_map(twice, mesh=place, in_specs=spec, out_specs=spec, check_vma=False))
    x = jnp.ones(8 * 16)
    text = run.lower(x).compile().as_text() or ""
    found = Counter(re.findall(r" (all-gather|reduce-scatter|all-to-all|all-reduce)\(", text))
    assert found == {kind.replace("_", "-"): 2}
    np.testing.assert_array_equal(run(x), x)


def test_a_line_through_two_sizes_gives_back_latency_and_bandwidth(monkeypatch):
    def exact(mesh: Any, kind: Any, floats: int) -> float:
        speed = getattr(LINK, kind)
        return speed.latency + send(kind, floats, 4).bytes / speed.bandwidth

    monkeypatch.setattr(link_module, "time_one", exact)
    np.testing.assert_allclose(measured(mesh()), LINK, rtol=1e-9)


@pytest.mark.parametrize("times", [(2.0, 1.0), (0.0, 1.0), (-1.0, 1.0), (1e-9, 1.0)])
def test_times_that_no_line_fits_are_no_measurement(monkeypatch, times):
    """Times that do not grow, are not positive, or grow more than the bytes."""
    sizes = dict(zip(link_module.SIZES, times, strict=True))
    monkeypatch.setattr(link_module, "time_one", lambda mesh, kind, floats: sizes[floats])
    assert measured(mesh()) is None


# --- remembered


def test_a_machine_is_measured_once_for_each_mesh(tmp_path):
    calls: list[Any] = []
    path = tmp_path / "cache" / "links.json"
    for _ in range(2):
        assert load_or_measure(mesh(2, 4), path, measures(calls)) == LINK
    assert len(calls) == 1
    other = LINK._replace(all_gather=CollectiveSpeed(9e-6, 9e9))
    assert load_or_measure(mesh(1, 8), path, measures(calls, other)) == other
    assert load_or_measure(mesh(2, 4), path, measures(calls)) == LINK
    assert len(calls) == 2
    assert [path.name for path in path.parent.iterdir()] == ["links.json"]


@pytest.mark.parametrize("content", ["", "[]", '{"a": 1}', "\xff", "{", '{"k": {"all_gather": [1, 2]}}'])
def test_a_spoilt_file_is_measured_anew(tmp_path, content):
    path, calls = tmp_path / "links.json", []
    path.write_text(content, encoding="latin-1")
    assert load_or_measure(mesh(), path, measures(calls)) == LINK
    assert load_or_measure(mesh(), path, measures(calls)) == LINK
    assert len(calls) == 1


@pytest.mark.parametrize("speed", [[-1.0, 1.0], [0.0, 0.0], [0.0, float("nan")], [5.0, 1e9], [1.0], ["a", "b"]])
def test_speeds_that_cannot_be_are_measured_anew(tmp_path, speed):
    path, calls = tmp_path / "links.json", []
    load_or_measure(mesh(), path, measures(calls))
    links = json.loads(path.read_text())
    next(iter(links.values()))["all_to_all"] = speed
    path.write_text(json.dumps(links))
    assert load_or_measure(mesh(), path, measures(calls)) == LINK
    assert len(calls) == 2


def test_a_folder_that_cannot_be_written_and_a_failed_measurement_leave_no_trace(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert load_or_measure(mesh(), blocked / "links.json", measures([])) == LINK
    assert load_or_measure(mesh(), tmp_path / "links.json", measures([], None)) is None
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
