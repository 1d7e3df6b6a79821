"""A figure that a notebook displays as PNG. Imports matplotlib, so `canvas` imports this file only when it plots."""

import io
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

DPI = 100


class NotebookFigure(Figure):
    """Rendered by matplotlib's Agg backend, without a window."""

    def __init__(self, **options: Any) -> None:
        super().__init__(dpi=DPI, **options)
        FigureCanvasAgg(self)

    def _repr_png_(self) -> bytes:
        target = io.BytesIO()
        self.savefig(target, format="png", metadata={"Software": None})  # equal figures give equal bytes
        return target.getvalue()
