"""How our figures look: width, colours and dashes of the arms, matplotlib's settings, ticks.

An arm has one colour everywhere, from palettes that colour-blind readers can tell apart, and a
dash of its own for print. Nobody else's settings are read or changed.
"""

import contextlib
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

WIDTH = 7.2  # inches
SHADE = "#fbefe4"
INK, FAINT = "#333333", "#999999"

# Okabe and Ito's palette, safe for colour-blind readers.
_COLOURS = {
    "full": "#333333",
    "fine-pruning": "#d55e00",
    "random": "#0072b2",
    "fewer-epochs": "#009e73",
}
_OTHER_COLOURS = ("#cc79a7", "#e69f00", "#56b4e9")
_DASHES: dict[str, Any] = {
    "random": (0, (4, 1.5)),
    "fewer-epochs": (0, (6, 1.5, 1.5, 1.5)),
}

_STYLE: Any = {  # in newer matplotlib the keys are typed one by one
    "svg.fonttype": "none",
    "svg.hashsalt": "fineprune",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 9,
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
    """Draw in our style whatever the user's own settings are, and leave these as they were."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def colour_of(arm: str) -> str:
    """Return an arm's colour; that of an arm we do not know goes by its name."""
    # By a checksum, not by place: the same in every report.
    other = _OTHER_COLOURS[zlib.crc32(arm.encode()) % len(_OTHER_COLOURS)]
    return _COLOURS.get(arm, other)


def dash_of(arm: str) -> Any:
    """Return the line style, in matplotlib's terms, that tells an arm apart in print."""
    return _DASHES.get(arm, "-")


def whole_ticks(most: int) -> MaxNLocator:
    """Place at most this many ticks, and on whole numbers only."""
    return MaxNLocator(nbins=most, integer=True, steps=[1, 2, 5, 10])


def arm_legend(figure: Figure, arms: Iterable[str], shaded: bool = False) -> None:
    """Name the arms above the figure and, if asked, what the shade means."""
    handles: list[Any] = [
        Line2D([], [], color=colour_of(arm), linestyle=dash_of(arm), label=arm) for arm in arms
    ]
    if shaded:
        handles.append(Patch(facecolor=SHADE, label="pruned epochs"))
    figure.legend(handles=handles, loc="outside upper center", ncols=6)
