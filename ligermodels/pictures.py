"""The colours and the look of every picture of this project.

The background is transparent, and ink and colours can be read on white and on dark pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

INK = "#808080"  # text and axes: contrast 4 to 1, on white and on the dark pages of the site
OURS = "#1F83C9"
# Okabe and Ito chose most of them for colour-blind readers, too.
ORDER = (OURS, "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999")
_STYLE = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color"), INK),
    **dict.fromkeys(("ytick.color", "grid.color"), INK),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    "axes.titlelocation": "left",
    "grid.alpha": 0.25,
}


@contextmanager
def picture(width: float, height: float) -> Iterator[Any]:
    """Draw a figure of matplotlib in this look within the context, without a display.

    Args: width, height: in inches.
    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
