import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted((ROOT / "notebooks").glob("*.py"))
sys.path.insert(0, str(ROOT / "scripts"))
from render_notebooks import cells_of, is_rendered  # noqa: E402

SMALL = """# %% [markdown]
# # Title
#
# Text.

# %%
x = 1

x

# %%
# a comment
print(x)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "small.py"
    path.write_text(SMALL)
    return path


def rendered(script: Path, **changes: object) -> None:
    """An .ipynb as rendering would leave it, but for `changes` in its last cell."""
    cells = [{"cell_type": kind, "source": source.splitlines(keepends=True)} for kind, source in cells_of(script)]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    for number, cell in enumerate(code, start=1):
        cell |= {"execution_count": number, "outputs": []}
    cells[-1] |= changes
    script.with_suffix(".ipynb").write_text(json.dumps({"cells": cells}))


def test_cells_of_a_percent_script_are_its_text_and_its_code(script):
    assert cells_of(script) == [
        ("markdown", "# Title\n\nText."),
        ("code", "x = 1\n\nx"),
        ("code", "# a comment\nprint(x)"),
    ]


def test_a_script_that_begins_outside_a_cell_is_refused(script):
    script.write_text("import os\n\n# %%\n")
    with pytest.raises(ValueError, match=r"small\.py must begin with '# %%', but begins with 'import os'"):
        cells_of(script)


def test_a_notebook_is_stale_once_its_script_says_something_else_or_it_has_not_run(script):
    assert not is_rendered(script)
    rendered(script)
    assert is_rendered(script)
    rendered(script, source=["print(2)"])
    assert not is_rendered(script)
    rendered(script, execution_count=None)
    assert not is_rendered(script)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_the_notebook_beside_each_script_holds_its_cells_and_has_run(path):
    assert is_rendered(path), f"run python scripts/render_notebooks.py notebooks/{path.name}"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_rendered_notebooks_are_small_show_pictures_and_name_no_folder_of_the_one_who_ran_them(path):
    text = path.with_suffix(".ipynb").read_text()
    assert len(text) < 500_000
    outputs = [output for cell in json.loads(text)["cells"] for output in cell.get("outputs", [])]
    assert {output["output_type"] for output in outputs} <= {"stream", "execute_result"}
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 2
    assert "/home/" not in text
    assert "/root" not in text


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_notebooks_check_their_numbers(path):
    checks = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Assert)]
    assert len(checks) >= 5


@pytest.mark.notebooks
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_notebooks_run_to_their_end_without_jupyter(path, compiled_programs):
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(compiled_programs)}
    run = subprocess.run(
        [sys.executable, path.name], cwd=path.parent, env=environment, capture_output=True, text=True, timeout=850
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout
