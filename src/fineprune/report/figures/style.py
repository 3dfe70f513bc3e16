"""Drawing: a figure of a page, and the style of all figures.

They are drawn with matplotlib's objects, without pyplot; the user's settings are neither used nor
changed. The same runs give the same bytes, and text is written as text, not as paths. An arm has
the same colour in all figures, and a line style of its own for print without colours.
"""

import contextlib
import hashlib
import html
import io
import math
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
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


@dataclass(frozen=True)
class Drawing:
    """A figure of a page: one ``<svg>`` element, which can also be a file, and its explanation."""

    title: str
    svg: str
    caption: str


@contextlib.contextmanager
def our_style() -> Iterator[None]:
    """Use our style in the decorated function, and restore the user's settings."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def new_figure(height: float) -> Figure:
    """Return a figure of our width, and of a height in inches."""
    return Figure((WIDTH, height), layout="constrained")


def new_panels(
    number: int, columns: int, rest: float, row: float, below: str, beside: str
) -> tuple[Figure, list[Axes]]:
    """Return a figure and the panels in its rows, which share their axes and two labels.

    The height of a row, and of the rest of the figure, is in inches.
    """
    rows = math.ceil(number / columns)
    figure = new_figure(rest + row * rows)
    panels = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
    for unused in panels[number:]:
        unused.set_visible(False)
    figure.supxlabel(below, fontsize=9)
    figure.supylabel(beside, fontsize=9)
    return figure, panels[:number]


def drawing(figure: Figure, title: str, caption: str) -> Drawing:
    """Return a figure as one ``<svg>`` element, with ids that no other figure of a page has.

    Ink has the colour of the text around the figure, so that a page can be light or dark.
    """
    buffer = io.StringIO()
    # Without the date and the version of matplotlib, the same figure gives the same bytes.
    no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    FigureCanvasSVG(figure)
    figure.savefig(buffer, format="svg", metadata=no_metadata)
    text = buffer.getvalue()
    text = text[text.index("<svg") :].strip() + "\n"
    text = text.replace(INK, "currentColor")
    prefix = "f" + hashlib.sha256((title + text).encode()).hexdigest()[:8]
    used = set(re.findall(r'(?:url\(|href=")#([^")]+)', text))

    def renamed(match: re.Match[str]) -> str:
        return f' id="{prefix}-{match[1]}"' if match[1] in used else ""

    text = re.sub(r' id="([^"]+)"', renamed, text)
    text = re.sub(r'((?:url\(|href=")#)', rf"\g<1>{prefix}-", text)
    svg = text.replace("<svg ", f'<svg role="img" aria-label="{html.escape(title)}" ', 1)
    return Drawing(title, svg, caption)


def line_of(arm: str) -> dict[str, Any]:
    """Return the colour and the style of the line of an arm, which depend on its name only."""
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
