"""The templates of the pages."""

import functools

import jinja2
from markupsafe import Markup


@functools.cache
def template(name: str) -> jinja2.Template:
    """Return the template of a page. Everything that is inserted into it is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fineprune.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["inline"] = Markup  # The exception: only for SVG that this package drew.
    return environment.get_template(name)
