import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = {
    room: sorted((ROOT / room).glob("*.py")) for room in ("sharding", "models", "dcpjax", "scripts", "notebooks")
}
LIBRARY = [path for room in ("sharding", "models", "dcpjax") for path in MODULES[room]]
HOST_ONLY = [
    "blocks",
    "config",
    "history",
    "logprobs",
    "outputs",
    "prefix",
    "request",
    "sampling_params",
    "scheduler",
    "stats",
    "text",
    "trace",
]


def imported(path: Path) -> Iterator[str]:
    """Full names of everything that the file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports here are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_every_room_has_its_files():
    assert all(MODULES[room] for room in ("sharding", "models", "dcpjax"))


@pytest.mark.parametrize("path", MODULES["sharding"], ids=shown)
def test_sharding_imports_nothing_of_ours_but_sharding(path):
    ours = [name for name in imported(path) if within(name, ("dcpjax",))]
    assert all(within(name, ("dcpjax.sharding",)) for name in ours)


@pytest.mark.parametrize("path", MODULES["models"], ids=shown)
def test_models_import_nothing_of_ours_but_models_and_sharding(path):
    ours = [name for name in imported(path) if within(name, ("dcpjax",))]
    assert all(within(name, ("dcpjax.models", "dcpjax.sharding")) for name in ours)


@pytest.mark.parametrize("path", LIBRARY, ids=shown)
def test_the_library_reaches_its_rooms_by_their_full_names_only(path):
    forbidden = ("models", "sharding", "scripts", "notebooks", "tests", "torch", "pickle")
    assert [name for name in imported(path) if within(name, forbidden)] == []


@pytest.mark.parametrize("path", [ROOT / "dcpjax" / f"{name}.py" for name in HOST_ONLY], ids=shown)
def test_the_hosts_plans_know_no_arrays(path):
    assert [name for name in imported(path) if within(name, ("jax", "numpy", "flax"))] == []


def test_every_file_says_what_its_room_does():
    silent = [shown(path) for path in LIBRARY if not ast.get_docstring(ast.parse(path.read_text()))]
    assert silent == []


@pytest.mark.parametrize("room", ["models", "sharding"])
def test_top_level_rooms_are_flat_and_linked_into_the_package(room):
    link = ROOT / "dcpjax" / room
    assert os.readlink(link) == f"../{room}"
    assert [entry.name for entry in (ROOT / room).iterdir() if entry.is_dir() and entry.name != "__pycache__"] == []


def python(program: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=120)


def test_importing_the_package_does_not_import_jax():
    heavy = python("import sys, dcpjax; print(sorted({'jax', 'numpy', 'transformers', 'flax'} & set(sys.modules)))")
    assert heavy.stdout == "[]\n", heavy.stderr


def test_every_public_name_can_be_imported_and_an_unknown_one_lists_them():
    program = """
import dcpjax
assert {name: getattr(dcpjax, name).__name__ for name in dcpjax.__all__} == {name: name for name in dcpjax.__all__}
assert set(dcpjax.__all__) <= set(dir(dcpjax))
try:
    dcpjax.LMM
except AttributeError as error:
    print(error)
"""
    run = python(program)
    assert run.stdout.startswith("module 'dcpjax' has no attribute 'LMM'; it has LLM, "), run.stderr


@pytest.mark.parametrize("room", ["models", "sharding"])
def test_a_room_refuses_to_be_imported_without_its_package(room):
    run = python(f"import {room}")
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1] == (
        f"ImportError: import dcpjax.{room}, not {room}: the top-level folder is source, not a package"
    )
