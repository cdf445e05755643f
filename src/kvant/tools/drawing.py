"""Plots in the project's style."""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvant.errors import KvantError
from kvant.installation import install_command

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")
# Okabe and Ito's colors, which most color-blind readers can tell apart.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8c6d31")
STYLE = {"svg.hashsalt": "kvant", "svg.fonttype": "none", "font.size": 10, "axes.edgecolor": "#888888"}


def check_plot_path(path: Path) -> None:
    """Raise before a long run if its plot could not be written."""
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(
            f"the plot file is {path.name}; expected a name that ends in {' or '.join(SUFFIXES)}"
        )
    if not path.parent.is_dir():
        raise ValueError(f"the plot file is {path}; its folder does not exist")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"the plot file is {path}, which cannot be written")
    if importlib.util.find_spec("matplotlib") is None:
        raise KvantError("a plot needs matplotlib, which is not installed", install_command("plot"))


@contextmanager
def drawing(path: Path, width: float, caption: str) -> Iterator["Figure"]:
    """Yield a figure ``width`` inches wide and save it to ``path``. Equal data give byte-identical SVGs."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, 4.8), layout="constrained")
        yield figure
        for axes in figure.axes:
            axes.grid(color="#dddddd", linewidth=0.6)
            axes.spines[["top", "right"]].set_visible(False)
        figure.supxlabel(caption, fontsize=8, color="#555555")
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else {})


def plain(text: str) -> str:
    """Escape text so that matplotlib does not read it as mathematics."""
    return text.replace("$", r"\$")
