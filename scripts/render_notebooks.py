"""Runs the percent scripts in notebooks/ and writes for each an .ipynb with its cells and their output.

    python scripts/render_notebooks.py                             # all
    python scripts/render_notebooks.py notebooks/01_quickstart.py
    python scripts/render_notebooks.py --check                     # runs nothing, checks that each .ipynb is up to date

The scripts are the source; do not edit an .ipynb. Needs pip install '.[gguf,notebooks]'; --check needs nothing.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "notebooks"
MARKER = "# %%"
TIMEOUT = 900  # seconds a cell may take


def main() -> int:
    parser = argparse.ArgumentParser(description="run the notebooks and write their .ipynb")
    parser.add_argument("scripts", nargs="*", type=Path, help="default: all of notebooks/")
    parser.add_argument(
        "--check", action="store_true", help="run nothing; fail if an .ipynb does not hold its script's cells"
    )
    choice = parser.parse_args()
    scripts = choice.scripts or sorted(FOLDER.glob("*.py"))
    if choice.check:
        stale = [script.name for script in scripts if not is_rendered(script)]
        if stale:
            print(f"not rendered since they were changed: {', '.join(stale)}; run {Path(__file__).name}")
        return 1 if stale else 0
    for script in scripts:
        started = time.monotonic()
        render(script)
        size = script.with_suffix(".ipynb").stat().st_size
        print(f"{script.name}: {time.monotonic() - started:.0f} s, {size / 1e3:.0f} kB", flush=True)
    return 0


def cells_of(script: Path) -> list[tuple[str, str]]:
    """(kind, source) of each cell. `# %%` begins a code cell, `# %% [markdown]` a text cell of lines with `#`."""
    cells: list[tuple[str, list[str]]] = []
    for line in script.read_text(encoding="utf-8").splitlines():
        if line.startswith(MARKER):
            cells.append(("markdown" if "[markdown]" in line else "code", []))
        elif cells:
            cells[-1][1].append(line)
        elif line.strip():
            raise ValueError(f"{script.name} must begin with {MARKER!r}, but begins with {line!r}")
    return [(kind, _source(kind, lines)) for kind, lines in cells]


def _source(kind: str, lines: list[str]) -> str:
    if kind == "markdown":
        lines = [line.removeprefix("#").removeprefix(" ") for line in lines]
    return "\n".join(lines).strip()


def is_rendered(script: Path) -> bool:
    """Whether the .ipynb beside the script holds the script's cells and all of them have run."""
    target = script.with_suffix(".ipynb")
    if not target.exists():
        return False
    cells = json.loads(target.read_text(encoding="utf-8"))["cells"]
    ran = [cell["execution_count"] for cell in cells if cell["cell_type"] == "code"]
    held = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    return held == cells_of(script) and ran == list(range(1, len(ran) + 1))


def render(script: Path) -> None:
    """Run the cells in a new kernel, in the script's folder, and write them with their output."""
    import nbformat  # pyright: ignore[reportMissingImports]
    from nbclient import NotebookClient  # pyright: ignore[reportMissingImports]

    book = nbformat.v4.new_notebook()
    book.cells = [_cell(kind, source, number) for number, (kind, source) in enumerate(cells_of(script))]
    NotebookClient(book, timeout=TIMEOUT, resources={"metadata": {"path": str(script.parent)}}).execute()
    _forget_machine(book)
    nbformat.validate(book)
    script.with_suffix(".ipynb").write_text(nbformat.writes(book) + "\n", encoding="utf-8")


def _cell(kind: str, source: str, number: int) -> Any:
    import nbformat  # pyright: ignore[reportMissingImports]

    make = nbformat.v4.new_code_cell if kind == "code" else nbformat.v4.new_markdown_cell
    return make(source, id=f"cell-{number}")


def _forget_machine(book: Any) -> None:
    """Remove the cells' run times, progress bars and the user's home folder."""
    book.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    for cell in book.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            for output in cell.outputs:
                _replace_home(output)


def _replace_home(output: Any) -> None:
    for holder in (output, output.get("data", {})):
        for key in ("text", "text/plain", "text/html"):
            if key in holder:
                holder[key] = holder[key].replace(os.path.expanduser("~"), "~")


if __name__ == "__main__":
    sys.exit(main())
