"""An empty picture in the project's manner: readable at a notebook's width, with colours for every eye.

The only place that knows of matplotlib's absence. Figures are made without pyplot, which would keep them all.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Numbers = dict[str, Any]

WIDTH = 8.0  # inches: the text column of a notebook
# Okabe & Ito 2008, "Color Universal Design": told apart with every kind of colour vision. Dark to light in print too.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
INK, FAINT = "#222222", "#DDDDDD"
MARKERS = ("o", "s", "^", "D", "v", "P")


def canvas(height: float, *, rows: int = 1, columns: int = 1) -> "tuple[Figure, list[Axes]]":
    """A figure `height` inches high with pictures below each other and side by side, row after row.

    Raises ValueError, naming the extra to install, where matplotlib is missing.
    """
    try:
        from dcpjax.plots.figure import Picture
    except ImportError as error:
        raise ValueError(
            "plots need the matplotlib package, which is not installed; pip install 'dcpjax[plots]'"
        ) from error
    figure = Picture(figsize=(WIDTH, height), layout="constrained")
    axes = [figure.add_subplot(rows, columns, number + 1) for number in range(rows * columns)]
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes


def colours(count: int) -> list[str]:
    """So many colours: the named ones while they last, else evenly from dark to light."""
    if count <= len(COLOURS):
        return list(COLOURS[:count])
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(colormaps["cividis"](index / (count - 1))) for index in range(count)]


def on(colour: str) -> str:
    """Black or white, whichever can be read on `colour` (relative luminance as in WCAG 2, without its gamma)."""
    red, green, blue = (int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5))
    return "black" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.5 else "white"


def legend_above(axes: "Axes", columns: int, handles: "Sequence[Artist] | None" = None) -> None:
    """Between title and picture, beside no data; of what is labelled, or of `handles`."""
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
