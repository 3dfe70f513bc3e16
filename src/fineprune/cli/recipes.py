"""``fineprune recipes``."""

import json
from typing import Annotated

import typer

from fineprune.cli.exits import exits
from fineprune.cli.options import AsJson
from fineprune.errors import check_one_of


@exits()
def recipes(
    name: Annotated[
        str | None,
        typer.Argument(help="The recipe to print [a list of all].", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the recipes that come with fineprune, or print one, to change a copy of it.

    Example: fineprune recipes quick
    """
    from fineprune.training.packaged_recipes import about, packaged_recipes

    files = packaged_recipes()
    if name is not None:
        check_one_of("the name of a recipe", name, tuple(files))
        files = {name: files[name]}
    texts = {recipe: file.read_text(encoding="utf-8") for recipe, file in files.items()}
    if as_json:
        listed = [
            {"name": recipe, "about": about(text), "toml": text} for recipe, text in texts.items()
        ]
        typer.echo(json.dumps(listed))
    elif name is not None:
        typer.echo(texts[name], nl=False)
    else:
        width = max(len(recipe) for recipe in texts)
        for recipe, text in texts.items():
            typer.echo(f"{recipe:<{width}}  {about(text)}")
