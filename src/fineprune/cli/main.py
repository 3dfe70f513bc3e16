"""The ``fineprune`` command."""

import importlib
import logging
import sys
import warnings
from typing import Annotated, Any

import typer

import fineprune
from fineprune.cli.exits import Group

# What each verb does. The module of a verb is imported when it is called, because many of them
# import torch.
VERBS = {
    "train": "Train a recipe and write its run folder.",
    "compare": "Train a recipe and its controls, and write a report.",
    "inspect": "Show which labels are probably wrong.",
    "report": "Write one self-contained HTML file about finished runs.",
    "plan": "Show which epochs a policy shortens, and predict what it saves.",
    "scale": "Train a recipe with several numbers of workers and servers.",
    "paper": "Repeat the experiments of a paper, its tables and figures beside ours.",
    "slurm": "Write a Slurm batch script that runs a command on several nodes.",
    "recipes": "List the recipes that come with fineprune, or print one.",
}


class Verbs(Group):
    """The group of verbs."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        # A verb is None until it is imported. The names are those that "Did you mean" suggests.
        self.commands: dict[str, Any] = dict.fromkeys(VERBS)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the verbs."""
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import a verb; None if there is none with this name."""
        if cmd_name not in VERBS:
            return None
        if self.commands[cmd_name] is None:
            module = importlib.import_module(f"fineprune.cli.{cmd_name}")
            alone = typer.Typer(rich_markup_mode=None, add_completion=False)
            alone.command(cmd_name)(getattr(module, cmd_name))
            self.commands[cmd_name] = typer.main.get_command(alone)
        return self.commands[cmd_name]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the verbs, and import none."""
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


app = typer.Typer(
    name="fineprune",
    cls=Verbs,
    help="Data fine-pruning, distributed training strategies, and wrong labels found on the way.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


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
