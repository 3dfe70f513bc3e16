"""Exit statuses: 0 done, 2 wrong input (one line says what), 1 a failure while running."""

import functools
import traceback
from collections.abc import Callable
from typing import ParamSpec

import typer

from fineprune.errors import InputError
from fineprune.runs.files import WriteError
from fineprune.training.epoch_metrics import TrainingDiverged
from fineprune.training.stop import Stopped

P = ParamSpec("P")


def exits(verb: Callable[P, None]) -> Callable[P, None]:
    """Turn a verb's exceptions into exit statuses and one line on standard error."""

    @functools.wraps(verb)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            verb(*args, **kwargs)
        except InputError as error:
            typer.echo(f"fineprune: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(2) from error
        except KeyboardInterrupt:
            typer.echo("fineprune: stopped; --resume goes on from the last checkpoint", err=True)
            raise typer.Exit(1) from None
        except Stopped as stopped:
            typer.echo(f"fineprune: {stopped}; run it again to go on (train: --resume)", err=True)
            raise typer.Exit(128 + stopped.number) from None
        except (TrainingDiverged, WriteError) as error:
            typer.echo(f"fineprune: {error}", err=True)
            raise typer.Exit(1) from None
        except typer.Exit:
            raise
        except Exception as error:
            traceback.print_exc()
            typer.echo(f"fineprune: failed while running: {error}", err=True)
            raise typer.Exit(1) from error

    return run
