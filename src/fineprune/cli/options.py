"""Options that several verbs share."""

from pathlib import Path
from typing import Annotated

import typer

RecipeFile = Annotated[Path, typer.Argument(help="Recipe, a TOML file.")]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change a setting of the recipe."),
]
MoreChanges = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SECTION.KEY=VALUE", help="More changes, as after --set.", show_default=False
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


def all_changes(changes: list[str] | None, more: list[str] | None) -> list[str]:
    """Return the changes given after --set and those that follow them, in their order."""
    return [*(changes or ()), *(more or ())]
