"""The ``fineprune`` command."""

import logging
import sys
import warnings
from typing import Annotated, Any

import typer

import fineprune
from fineprune.cli.compare import compare
from fineprune.cli.exits import Verbs
from fineprune.cli.inspect import inspect
from fineprune.cli.plan import plan
from fineprune.cli.recipes import recipes
from fineprune.cli.report import report
from fineprune.cli.scale import scale
from fineprune.cli.slurm import slurm
from fineprune.cli.train import train

app = typer.Typer(
    name="fineprune",
    cls=Verbs,
    help="Find wrong labels while a classifier trains, and save part of the training by skipping "
    "samples.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for verb in (train, compare, plan, report, inspect, scale, slurm, recipes):
    app.command()(verb)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"fineprune {fineprune.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line."""
    warnings.formatwarning = _one_line
    logging.getLogger("fineprune").addHandler(_Lines(logging.WARNING))
    app()


class _Lines(logging.Handler):
    """Prints what is logged, such as the death of a worker, as lines on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        # sys.stderr is looked up for each line, because a progress bar replaces it.
        print(f"fineprune: {record.getMessage()}", file=sys.stderr, flush=True)


def _one_line(message: Warning | str, *where: Any, **source: Any) -> str:
    """Format a warning without the line of code that gave it, which users have no use for."""
    return f"fineprune: warning: {message}\n"
