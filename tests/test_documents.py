"""Documents point at what exists: relative links, files named in the text, files and folders drawn in a tree."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FOLDERS = ("sharding", "models", "dcpjax", "scripts", "notebooks", "tests", "docs", ".ci")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED = re.compile(rf"(?<![\w/.-])((?:{'|'.join(map(re.escape, FOLDERS))})/[\w./*-]+)")
PATH = re.compile(r"[\w.*-]+(?:/[\w.*-]+)*/|[\w./*-]+\.(?:py|md|toml|ipynb)")  # a folder, or a file of these kinds


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


every_document = pytest.mark.parametrize("document", DOCUMENTS, ids=shown)


def exists(path: Path) -> bool:
    """Whether there is such a file or folder; its last part may be a pattern."""
    return path.exists() or ("*" in path.name and any(path.parent.glob(path.name)))


def anchors(document: Path) -> set[str]:
    """The fragments that GitHub gives to a document's headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", document.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(document: Path) -> Iterator[str]:
    for target in LINK.findall(FENCE.sub("", document.read_text())):
        if re.match(r"\w+:", target):  # another site's
            continue
        name, _, anchor = target.partition("#")
        found = document.parent / name if name else document
        if not found.exists() or (anchor and anchor not in anchors(found)):
            yield target


def missing_files(document: Path) -> Iterator[str]:
    """Paths from the root, wherever in the text, also in commands."""
    for name in NAMED.findall(document.read_text()):
        if not exists(ROOT / name.rstrip(".-")):
            yield name


def trees(text: str) -> Iterator[str]:
    """Fenced blocks under a heading that names the tree."""
    for section in re.findall(r"^#+ [^\n]*\btree\b[^\n]*\n(.*?)(?=^#+ |\Z)", text, re.MULTILINE | re.DOTALL | re.I):
        yield from (block.partition("\n")[2].removesuffix("```") for block in FENCE.findall(section))


def missing_in_tree(tree: str, root: Path) -> list[str]:
    """Drawn paths that do not exist.

    A line's first folder lies in the folder of the nearest line above that is indented less. Files lie in the last
    folder of their line or, where it names none, in the folder that the line is indented under. Words that are no
    paths, and what follows a "#", are comments.
    """
    missing, open_folders = [], [(-1, root)]
    for line in tree.splitlines():
        drawn = re.sub(r"[│├└─|`]", " ", line.partition("#")[0])
        indent = len(drawn) - len(drawn.lstrip())
        while drawn.strip() and open_folders[-1][0] >= indent:
            open_folders.pop()
        around = [folder for _, folder in reversed(open_folders)]  # innermost first, then this line's own in front
        for name in filter(PATH.fullmatch, (word.strip("(),;:.") for word in drawn.split())):
            searched = around if name.endswith("/") else around[:1]
            found = next((folder / name for folder in searched if exists(folder / name)), None)
            if found is None:
                missing.append(name)
            elif name.endswith("/"):
                around.insert(0, found)
                if drawn.strip().startswith(name):
                    open_folders.append((indent, found))
    return missing


@every_document
def test_relative_links_lead_somewhere(document: Path) -> None:
    assert list(broken_links(document)) == []


@every_document
def test_files_that_a_document_names_exist(document: Path) -> None:
    assert list(missing_files(document)) == []


@every_document
def test_files_and_folders_of_a_drawn_tree_exist(document: Path) -> None:
    assert [name for tree in trees(document.read_text()) for name in missing_in_tree(tree, ROOT)] == []


def test_readme_and_contributing_draw_the_tree() -> None:
    assert all(list(trees((ROOT / name).read_text())) for name in ("README.md", "CONTRIBUTING.md"))


def test_every_document_is_in_the_index() -> None:
    listed = set(LINK.findall((ROOT / "docs" / "README.md").read_text()))
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"} <= listed


def test_a_tree_is_read_by_its_indentation(tmp_path: Path) -> None:
    for name in ("a/b/c/one.py", "a/two.py", "d/three.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    tree = """
a/          two.py             the first folder, with and/or without words
  b/c/      one.py             # not_there.py
  two.py
d/          three.py t*.py (a/)
"""
    assert missing_in_tree(tree, tmp_path) == []
    wrong = "a/  one.py\n  b/\n    c/  two.py\n  e/\nf/\nd/  three.py x*.py"
    assert missing_in_tree(wrong, tmp_path) == ["one.py", "two.py", "e/", "f/", "x*.py"]
