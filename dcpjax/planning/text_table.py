"""Aligned text tables."""

from collections.abc import Sequence


def aligned(lines: Sequence[Sequence[str]], *, headings: int = 0) -> list[str]:
    """One string per line of cells: columns flush right and two spaces apart, a rule below the first `headings` lines.

    All lines have the same number of cells.
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    if headings:
        table.insert(headings, "  ".join("-" * width for width in widths))
    return table
