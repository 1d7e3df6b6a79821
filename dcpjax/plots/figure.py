"""A figure that shows itself in a notebook. Imports matplotlib; `plots_canvas` imports this when it is needed."""

import io
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

DPI = 100


class Picture(Figure):
    """Rendered by Agg, without a window."""

    def __init__(self, **options: Any) -> None:
        super().__init__(dpi=DPI, **options)
        FigureCanvasAgg(self)

    def _repr_png_(self) -> bytes:
        target = io.BytesIO()
        self.savefig(target, format="png", metadata={"Software": None})  # equal pictures are equal bytes
        return target.getvalue()
