import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = ["pyproject.toml", "README.md", "LICENSE", "dcpjax", "models", "sharding", "tests"]

pytestmark = pytest.mark.skipif(importlib.util.find_spec("setuptools") is None, reason="setuptools is not installed")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built offline from a copy, so that no build folder is left in the tree."""
    tree, built = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            ignore = shutil.ignore_patterns("__pycache__", "goldens")
            shutil.copytree(source, tree / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(source, tree / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    run = subprocess.run([*pip, "--wheel-dir", built, tree], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    (path,) = built.glob("*.whl")
    return zipfile.ZipFile(path)


def package_files(wheel: zipfile.ZipFile) -> list[str]:
    return [name for name in wheel.namelist() if ".dist-info/" not in name]


def test_the_wheel_holds_every_folder_of_the_package_and_nothing_else(wheel):
    python = [
        f"{package}/{path.relative_to(ROOT / folder)}"
        for package, folder in (("dcpjax", "dcpjax"), ("dcpjax/models", "models"), ("dcpjax/sharding", "sharding"))
        for path in (ROOT / folder).rglob("*.py")
        if folder != "dcpjax" or path.relative_to(ROOT / folder).parts[0] not in ("models", "sharding")
    ]
    assert sorted(package_files(wheel)) == sorted([*python, "dcpjax/py.typed", "dcpjax/server/page.html"])


def test_nothing_is_in_the_wheel_twice(wheel):
    assert len(set(wheel.namelist())) == len(wheel.namelist())
    assert not [name for name in wheel.namelist() if name.startswith(("models/", "sharding/", "tests/", "scripts/"))]


def test_the_wheel_names_its_licence_and_its_command(wheel):
    (info,) = {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    assert f"{info}/licenses/LICENSE" in wheel.namelist()
    assert "dcpjax = dcpjax.cli:main" in wheel.read(f"{info}/entry_points.txt").decode()
    assert "License-Expression: Apache-2.0" in wheel.read(f"{info}/METADATA").decode()


def test_the_installed_wheel_imports_under_its_own_names(wheel, tmp_path):
    wheel.extractall(tmp_path)
    program = (
        "from dcpjax.models import kv_cache; from dcpjax.sharding import mesh; print(kv_cache.__file__, mesh.__file__)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert run.stdout.split() == [f"{tmp_path}/dcpjax/models/kv_cache.py", f"{tmp_path}/dcpjax/sharding/mesh.py"]
