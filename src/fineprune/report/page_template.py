"""The templates of the pages."""

import functools
import re
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from fineprune.labels.review_page import policy
from fineprune.labels.review_page import write_page as write_file

# A space between a number and its unit, or before the half width of an interval.
_IN_QUANTITY = re.compile(
    r"(?<=\d) (?=(?:%|±|(?:ms|s|seconds|minutes|hours|epochs?|seeds?|points|percentage points"
    r"|[GM]B|Gbit/s)\b))|(?<=±) (?=\d)"
)


@functools.cache
def template(name: str) -> jinja2.Template:
    """Return the template of a page. Everything that is inserted into it is escaped."""
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
    return environment.get_template(name)


def write_page(path: Path, name: str, **values: Any) -> None:
    """Write a page with its folder, and replace a file at ``path`` atomically."""
    write_file(path, template(name).render(policy=policy(), **values))


def _unbroken(value: Any) -> Any:
    """Keep numbers and their units on one line, in what a template inserts as plain text."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return _IN_QUANTITY.sub("\N{NO-BREAK SPACE}", value)
