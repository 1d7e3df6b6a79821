"""Who may import whom: the order of the folders, and no circle between files."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {"sharding": "dcpjax.sharding", "models": "dcpjax.models", "dcpjax": "dcpjax"}
# A folder of dcpjax imports only from those in lines above its own. `llm` is the file and the table it shows.
ORDER = (
    ("api",),
    ("checkpoint",),
    ("engine",),
    ("sampling",),
    ("runtime",),
    ("frontend",),
    ("notebook_view",),
    ("llm",),
    ("planning", "openai"),
    ("jobs", "simulation", "server"),
    ("plots",),
    ("cli",),
)
# The same inside models: what a kernel may import of its own package.
KERNELS_MAY = (
    "dcpjax.models.attention.work",
    "dcpjax.models.attention.softmax",
    "dcpjax.models.kernels",
    "dcpjax.models.kv_cache",
    "dcpjax.models.matmul",
)
FACADES = ("dcpjax", "dcpjax.__main__", "dcpjax.cli", "dcpjax.plots")  # offer names of other files
HOST_ONLY = [
    "api",
    "engine",
    "frontend/submission.py",
    "frontend/completion.py",
    "frontend/text.py",
    "simulation/trace.py",
]


def module_of(folder: str, path: Path) -> str:
    parts = path.relative_to(ROOT / folder).with_suffix("").parts
    return ".".join([PACKAGES[folder], *parts]).removesuffix(".__init__")


def files_of(folder: str) -> list[Path]:
    """The Python files of a top-level folder, without what the links inside dcpjax lead to."""
    found = sorted((ROOT / folder).rglob("*.py"))
    linked = (ROOT / "dcpjax" / "models", ROOT / "dcpjax" / "sharding")
    return [path for path in found if not any(path.is_relative_to(link) for link in linked)]


LIBRARY = {module_of(folder, path): path for folder in PACKAGES for path in files_of(folder)}


def imported(path: Path) -> Iterator[str]:
    """Full names of everything that the file imports, anywhere in it, for pyright alone or not."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports here are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules(names: Iterable[str]) -> set[str]:
    """The project's files among imported names: `a.b.C` is file `a.b` unless there is a file `a.b.C`."""
    return {name if name in LIBRARY else name.rpartition(".")[0] for name in names if within(name, ("dcpjax",))}


def within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def rank(module: str) -> int:
    """The place of a file in the order: sharding, models, then the folders of dcpjax."""
    parts = module.split(".")
    if len(parts) == 1:
        return -1  # `dcpjax` itself imports names on first use only: anybody may ask it for the version
    below = {"sharding": 0, "models": 1}
    above = {name: 2 + place for place, names in enumerate(ORDER) for name in names}
    return (below | above)[parts[1]]


def may_import(importer: str, other: str) -> bool:
    if importer.split(".")[:2] == other.split(".")[:2]:
        return not within(importer, ("dcpjax.models.kernels",)) or within(other, KERNELS_MAY)
    return rank(other) < rank(importer)


def circles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Files that import each other, directly or through others: one path for each circle that is found."""
    found, done = list[list[str]](), set[str]()

    def visit(node: str, path: list[str]) -> None:
        if node in path:
            found.append([*path[path.index(node) :], node])
        elif node not in done:
            for other in sorted(graph.get(node, ())):
                visit(other, [*path, node])
            done.add(node)

    for node in graph:
        visit(node, [])
    return found


GRAPH = {module: modules(imported(path)) - {module} for module, path in LIBRARY.items() if module not in FACADES}


@pytest.mark.parametrize("module", GRAPH)
def test_a_file_imports_only_from_folders_below_its_own(module):
    assert [other for other in sorted(GRAPH[module]) if not may_import(module, other)] == []


@pytest.mark.parametrize(
    ("importer", "other", "allowed"),
    [
        ("dcpjax.engine.scheduler", "dcpjax.models.kv_cache", True),
        ("dcpjax.models.decoder", "dcpjax.engine.request", False),
        ("dcpjax.sharding.mesh", "dcpjax.models.config", False),
        ("dcpjax.runtime.runner", "dcpjax.engine.result", True),
        ("dcpjax.engine.engine", "dcpjax.runtime.read_back", False),
        ("dcpjax.jobs.job", "dcpjax.openai.request", True),
        ("dcpjax.openai.request", "dcpjax.jobs.lines", False),
        ("dcpjax.planning.planner", "dcpjax.openai.request", False),
        ("dcpjax.models.attention.dispatch", "dcpjax.models.kernels.pallas.paged_call", True),
        ("dcpjax.models.kernels.pallas.gpu", "dcpjax.models.attention.dispatch", False),
        ("dcpjax.models.kernels.cpu.fold", "dcpjax.models.kernels.cpu.vector", True),
    ],
)
def test_the_rule_allows_one_direction_and_refuses_the_other(importer, other, allowed):
    assert may_import(importer, other) is allowed


def test_no_files_import_each_other_in_a_circle():
    assert circles(GRAPH) == []


def test_a_circle_is_found_however_long_it_is():
    assert circles({"a": ["b"], "b": ["c"], "c": []}) == []
    assert circles({"a": ["b"], "b": ["c"], "c": ["a"]}) == [["a", "b", "c", "a"]]
    assert circles({"x": ["a"], "a": ["b"], "b": ["a"]}) == [["a", "b", "a"]]


def test_every_folder_is_in_the_order():
    folders = {path.name for path in (ROOT / "dcpjax").iterdir() if (path / "__init__.py").is_file()}
    assert folders - {"models", "sharding"} <= {name for names in ORDER for name in names}


@pytest.mark.parametrize("module", LIBRARY)
def test_the_library_reaches_its_folders_by_their_full_names_only(module):
    forbidden = ("models", "sharding", "scripts", "notebooks", "tests", "torch", "pickle")
    assert [name for name in imported(LIBRARY[module]) if within(name, forbidden)] == []


def host_only() -> list[Path]:
    paths = [ROOT / "dcpjax" / name for name in HOST_ONLY]
    return [file for path in paths for file in (sorted(path.glob("*.py")) if path.is_dir() else [path])]


@pytest.mark.parametrize("path", host_only(), ids=lambda path: str(path.relative_to(ROOT)))
def test_what_only_plans_or_speaks_to_the_user_imports_no_arrays(path):
    assert [name for name in imported(path) if within(name, ("jax", "numpy"))] == []


def test_every_file_says_what_it_does():
    silent = [module for module, path in LIBRARY.items() if not ast.get_docstring(ast.parse(path.read_text()))]
    assert silent == []


@pytest.mark.parametrize("room", ["models", "sharding"])
def test_top_level_folders_are_linked_into_the_package(room):
    assert os.readlink(ROOT / "dcpjax" / room) == f"../{room}"


def python(program: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=120)


def test_importing_the_package_does_not_import_jax():
    heavy = python("import sys, dcpjax; print(sorted({'jax', 'numpy', 'transformers'} & set(sys.modules)))")
    assert heavy.stdout == "[]\n", heavy.stderr


def test_an_engine_needs_no_library_for_training():
    unneeded = python(
        "import sys, dcpjax.llm; print(sorted({'flax', 'optax', 'orbax', 'torch', 'tensorstore'} & set(sys.modules)))"
    )
    assert unneeded.stdout == "[]\n", unneeded.stderr


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
def test_a_folder_refuses_to_be_imported_without_its_package(room):
    run = python(f"import {room}")
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1] == (
        f"ImportError: import dcpjax.{room}, not {room}: the top-level folder is source, not a package"
    )
