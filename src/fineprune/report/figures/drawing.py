"""A figure of the report, and its conversion to reproducible SVG."""

import hashlib
import html
import io
import re
from dataclasses import dataclass

from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from fineprune.report.figures.style import INK


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


def svg_text(figure: Figure, label: str) -> str:
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
    prefix = "f" + hashlib.sha256((label + text).encode()).hexdigest()[:8]
    used = set(re.findall(r'(?:url\(|href=")#([^)"]+)', text))

    def renamed(match: re.Match[str]) -> str:
        return f' id="{prefix}-{match[1]}"' if match[1] in used else ""

    text = re.sub(r' id="([^"]+)"', renamed, text)
    text = re.sub(r'((?:url\(|href=")#)', rf"\g<1>{prefix}-", text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{html.escape(label)}" ', 1)
