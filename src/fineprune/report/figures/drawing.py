"""A figure of the report, and its conversion to reproducible SVG."""

import hashlib
import html
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from fineprune.report.figures.style import INK

# The tooltips of the points of each line that has some, by the line's id.
Titles = dict[str, Sequence[str]]

# More tooltips in one line would lie on each other.
_MOST_TITLES = 60


@dataclass(frozen=True)
class Drawing:
    """A figure of the report.

    Attributes:
        title: The title, in a few words.
        svg: One ``<svg>`` element, as well-formed XML. It can be a file or a part of a page.
        caption: The explanation, in sentences.
    """

    title: str
    svg: str
    caption: str


def drawn(*drawings: Drawing | None) -> list[Drawing]:
    """Return the figures for which there were data."""
    return [drawing for drawing in drawings if drawing is not None]


def titled_points(
    axes: Axes,
    x: npt.NDArray[Any],
    y: npt.NDArray[Any],
    texts: Sequence[str],
    titles: Titles,
    *,
    visible: bool = True,
    **style: Any,
) -> None:
    """Draw points with tooltips. Those above and below the limits of the axis are left out.

    Args:
        axes: The axes, whose limits are set.
        x, y: The places of the points, shape (n,).
        texts: The tooltip of each point.
        titles: Receives the tooltips, for ``svg_text``.
        visible: Whether the points can be seen, and not only pointed at.
        style: The style of the markers.
    """
    low, high = axes.get_ylim()
    every = range(0, len(texts), 1 + len(texts) // _MOST_TITLES)
    shown = [place for place in every if low <= y[place] <= high]
    if not shown:
        return
    name = f"points-{len(titles)}"
    titles[name] = [texts[place] for place in shown]
    look = style if visible else {"alpha": 0.0, "markersize": 9}
    axes.plot(x[shown], y[shown], "o", gid=name, zorder=4, **{"markersize": 4, **look})


def svg_text(figure: Figure, label: str, titles: Mapping[str, Sequence[str]] | None = None) -> str:
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
    for name, texts in (titles or {}).items():
        text = _with_titles(text, name, texts)
    prefix = "f" + hashlib.sha256((label + text).encode()).hexdigest()[:8]
    used = set(re.findall(r'(?:url\(|href=")#([^)"]+)', text))

    def renamed(match: re.Match[str]) -> str:
        return f' id="{prefix}-{match[1]}"' if match[1] in used else ""

    text = re.sub(r' id="([^"]+)"', renamed, text)
    text = re.sub(r'((?:url\(|href=")#)', rf"\g<1>{prefix}-", text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{html.escape(label)}" ', 1)


def _with_titles(text: str, name: str, titles: Sequence[str]) -> str:
    """Put tooltips into the points of the line with this name, which are in the same order."""
    start = text.index(f'<g id="{name}">')
    before, *points = re.split(r"(<use [^>]*/>)", text[start:], maxsplit=len(titles))
    for number, title in enumerate(titles):
        point = points[2 * number]
        points[2 * number] = f"<g><title>{html.escape(title)}</title>{point}</g>"
    return text[:start] + before + "".join(points)
