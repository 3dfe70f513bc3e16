"""The style of our figures: their width, the arms' colours and line styles, settings and ticks.

An arm has the same colour in all figures, and a line style of its own for print without colours.
The user's matplotlib settings are neither used nor changed.
"""

import contextlib
import math
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

WIDTH = 7.2  # In inches.
INK, FAINT = "#333333", "#999999"

# The palette of Okabe and Ito, which colour-blind readers can distinguish. It has eight colours, so
# the arms after them have other ones, and differ in the line style too.
_ARMS: dict[str, tuple[str, Any]] = {
    "full": (INK, "-"),
    "fine-pruning": ("#d55e00", "-"),
    "random": ("#0072b2", (0, (4, 1.5))),
    "shorter": ("#009e73", (0, (3, 1, 1, 1))),
    "fewer-epochs": ("#009e73", (0, (6, 1.5, 1.5, 1.5))),
    "adaptive": ("#cc79a7", "-"),
    "infobatch": ("#56b4e9", "-"),
    "rs2": ("#8c5a2b", (0, (8, 1.5))),
    "matched": ("#5b5ea6", (0, (5, 1, 1, 1, 1, 1))),
}
_OTHER_COLOURS = ("#808080", "#a68a00", "#8a4fb0")

_STYLE: Any = {  # Newer versions of matplotlib have a type for each key.
    "svg.fonttype": "none",
    "svg.hashsalt": "fineprune",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 9,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.labelsize": 9,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.4,
    "lines.solid_capstyle": "round",
}


@contextlib.contextmanager
def our_style() -> Iterator[None]:
    """Use our style inside the block, regardless of the user's settings, and restore these."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


@contextlib.contextmanager
def new_figure(height: float) -> Iterator[Figure]:
    """Yield a figure of our width, and of a height in inches, to draw in our style."""
    with our_style():
        yield Figure((WIDTH, height), layout="constrained")


@contextlib.contextmanager
def new_panels(
    number: int, columns: int, rest: float, row: float, label: str
) -> Iterator[tuple[Figure, list[Axes]]]:
    """Yield a figure and the panels in its rows, which share their axes and the label below.

    The height of a row, and of the rest of the figure, is in inches.
    """
    rows = math.ceil(number / columns)
    with new_figure(rest + row * rows) as figure:
        panels = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
        for unused in panels[number:]:
            unused.set_visible(False)
        figure.supxlabel(label, fontsize=9)
        yield figure, panels[:number]


def line_of(arm: str) -> dict[str, Any]:
    """Return the colour and the style of the line of an arm, for matplotlib.

    The colour of an unknown arm depends on its name only.
    """
    # A checksum of the name gives the same colour in every report, a position would not.
    other = _OTHER_COLOURS[zlib.crc32(arm.encode()) % len(_OTHER_COLOURS)]
    colour, style = _ARMS.get(arm, (other, "-"))
    return {"color": colour, "linestyle": style}


def colour_of(arm: str) -> str:
    """Return the colour of an arm."""
    return str(line_of(arm)["color"])


def whole_ticks(most: int) -> MaxNLocator:
    """Return a locator that places at most ``most`` ticks, on whole numbers only."""
    return MaxNLocator(nbins=most, integer=True, steps=[1, 2, 5, 10])


def arm_legend(figure: Figure, arms: Iterable[str]) -> None:
    """Add a legend with the names of the arms above the figure."""
    handles = [Line2D([], [], label=arm, **line_of(arm)) for arm in arms]
    figure.legend(handles=handles, loc="outside upper center", ncols=5)
