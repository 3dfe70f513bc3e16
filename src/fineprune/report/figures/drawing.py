"""What a figure of the report is, and how it becomes SVG: the same figure, the same bytes."""

import hashlib
import html
import io
import re
from dataclasses import dataclass

from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure


@dataclass(frozen=True)
class Drawing:
    """A figure of the report.

    Attributes:
        title: what it shows, in a few words.
        svg: one ``<svg>`` element, well-formed XML that stands alone or in a page.
        caption: how to read it.
    """

    title: str
    svg: str
    caption: str


def svg_text(figure: Figure, label: str) -> str:
    """Write a figure as one element that stands beside others in a page: no id is used twice."""
    buffer = io.StringIO()
    unsaid = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    FigureCanvasSVG(figure)
    figure.savefig(buffer, format="svg", metadata=unsaid)
    text = buffer.getvalue()
    text = text[text.index("<svg") :].strip() + "\n"
    prefix = "f" + hashlib.sha256((label + text).encode()).hexdigest()[:8]
    used = set(re.findall(r'(?:url\(|href=")#([^)"]+)', text))

    def renamed(match: re.Match[str]) -> str:
        return f' id="{prefix}-{match[1]}"' if match[1] in used else ""

    text = re.sub(r' id="([^"]+)"', renamed, text)
    text = re.sub(r'((?:url\(|href=")#)', rf"\g<1>{prefix}-", text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{html.escape(label)}" ', 1)
