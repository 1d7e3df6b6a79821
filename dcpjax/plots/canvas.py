"""Empty figures, colours and legends that all plots share: a notebook's width, colours safe for colour blindness.

Raises the error for a missing matplotlib. Figures are made without pyplot, which would keep every figure in memory.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Numbers = dict[str, Any]

WIDTH = 8.0  # inches: the text column of a notebook
# Okabe & Ito 2008, "Color Universal Design": distinguishable with every kind of colour vision.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
INK, FAINT = "#222222", "#DDDDDD"
MARKERS = ("o", "s", "^", "D", "v", "P")


def canvas(height: float, *, rows: int = 1, columns: int = 1) -> "tuple[Figure, list[Axes]]":
    """A figure `height` inches high with a grid of rows x columns axes, listed row by row.

    Raises ValueError, naming the extra to install, if matplotlib is missing.
    """
    try:
        from dcpjax.plots.figure import NotebookFigure
    except ImportError as error:
        raise ValueError(
            "plots need the matplotlib package, which is not installed; pip install 'dcpjax[plots]'"
        ) from error
    figure = NotebookFigure(figsize=(WIDTH, height), layout="constrained")
    axes = [figure.add_subplot(rows, columns, number + 1) for number in range(rows * columns)]
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes


def colours(count: int) -> list[str]:
    """`count` distinct colours: from `COLOURS` if it has enough, else evenly spaced from dark to light."""
    if count <= len(COLOURS):
        return list(COLOURS[:count])
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(colormaps["cividis"](index / (count - 1))) for index in range(count)]


def text_colour(background: str) -> str:
    """Black or white, whichever is readable on `background` (relative luminance as in WCAG 2, without its gamma)."""
    red, green, blue = (int(background[start : start + 2], 16) / 255 for start in (1, 3, 5))
    return "black" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.5 else "white"


def legend_above(axes: "Axes", columns: int, handles: "Sequence[Artist] | None" = None) -> None:
    """A legend above the axes, where it covers no data: of the labelled artists, or of `handles`."""
    shown = axes.get_legend_handles_labels()[0] if handles is None else handles
    axes.legend(
        handles=shown,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=columns,
        frameon=False,
        borderaxespad=0.2,
        fontsize=9,
        handlelength=1.5,
        columnspacing=1.2,
    )
