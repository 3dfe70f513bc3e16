"""Arguments and options that several verbs share."""

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from fineprune.errors import InputError
from fineprune.training.packaged_recipes import recipe_file


def given_path(text: str) -> Path:
    """Convert the value of an option to a path. An empty one would be the current folder."""
    if not text:
        raise typer.BadParameter("expected a path, got an empty text")
    return Path(text)


def path_option(text: str) -> Any:
    """Return the option for a file or a folder that a verb writes, with its help."""
    return typer.Option(parser=given_path, metavar="PATH", help=text)


def _there(recipe: Path) -> Path:
    """Check that a recipe exists, before a verb imports torch."""
    recipe_file(recipe)
    return recipe


RecipeFile = Annotated[
    Path,
    typer.Argument(
        callback=_there, help="The recipe: a TOML file, or a name that 'fineprune recipes' lists."
    ),
]
Runs = Annotated[
    list[Path],
    typer.Argument(help="The folders of finished runs, comparisons or scaling experiments."),
]
Changes = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SECTION.KEY=VALUE",
        help="Changes of the recipe's settings, such as training.epochs=20.",
        show_default=False,
    ),
]
Seeds = Annotated[
    int, typer.Option(min=1, max=1000, help="The number of runs (seeds) of each training.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Margin = Annotated[
    float,
    typer.Option(
        help="The difference in accuracy, in percentage points, up to which two arms count as "
        "equivalent."
    ),
]

_CHANGE = re.compile(r"\w+\.\w+=.*", re.DOTALL)


def split_changes(words: list[str] | None) -> tuple[list[str], list[str]]:
    """Split the arguments of a verb into its own ones and changes ``section.key=value``."""
    changes = [word for word in words or () if _CHANGE.fullmatch(word)]
    return [word for word in words or () if word not in changes], changes


def margin_fraction(points: float) -> float:
    """Return the value of --margin as a fraction."""
    if not 0 < points < 100:
        raise InputError(
            f"expected --margin as percentage points above 0 and below 100, got {points:g}"
        )
    return points / 100
