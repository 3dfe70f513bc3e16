"""A page: its parts, in their order, and one template that shows them all."""

import functools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

from fineprune.labels import review_page
from fineprune.report.figures.style import Drawing
from fineprune.report.table import Table

# A space between a number and its unit, or before the half width of an interval.
_IN_QUANTITY = re.compile(
    r"(?<=\d) (?=(?:%|±|(?:ms|s|seconds|minutes|hours|epochs?|seeds?|points|percentage points"
    r"|[GM]B|Gbit/s)\b))|(?<=±) (?=\d)"
)


class Line(NamedTuple):
    """A paragraph in one of the page's styles: ``headline`` or ``lead``."""

    style: str
    text: str


class Sentences(NamedTuple):
    """A list of sentences, perhaps none, and perhaps with a title."""

    sentences: Sequence[str]
    title: str = ""


class Facts(NamedTuple):
    """Pairs of a term and its value."""

    facts: Sequence[tuple[str, str]]


class Recipe(NamedTuple):
    """A recipe, as TOML."""

    text: str


class Section(NamedTuple):
    """Parts that a link leads to, below a heading if it is not empty."""

    anchor: str
    heading: str
    parts: Sequence[Any]


class Fold(NamedTuple):
    """Parts that are folded away below a title."""

    title: str
    parts: Sequence[Any]


# HTML is a part, too, in which everything is escaped already.
Part = Table | Drawing | Line | Sentences | Facts | Recipe | Section | Fold | Markup


def write_page(path: Path, title: str, parts: Iterable[Part | None]) -> None:
    """Write a page with its folder, without missing parts, and replace a file atomically."""
    shown = [part for part in parts if part is not None]
    text = _template().render(policy=review_page.policy(), title=title, parts=shown)
    review_page.write_page(path, text)


@functools.cache
def _template() -> jinja2.Template:
    """Return the template of all pages. Everything that is inserted into it is escaped."""
    loaders = (
        jinja2.PackageLoader("fineprune.report", "templates"),
        # The style that all pages share is there, because the library's own pages use it too.
        jinja2.PackageLoader("fineprune.labels", ""),
    )
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader(loaders),
        finalize=_unbroken,
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["inline"] = Markup  # The exception: only for SVG that this package drew.
    environment.filters["kind"] = lambda part: type(part).__name__
    return environment.get_template("page.html.j2")


def _unbroken(value: Any) -> Any:
    """Keep numbers and their units on one line, in what a template inserts as plain text."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return _IN_QUANTITY.sub("\N{NO-BREAK SPACE}", value)
