"""Exit statuses: 0 on success, 2 on wrong input, 1 on a failure, 128 plus its number on a signal.

A training that diverged has the status 3.

``InputError``, ``RunError`` and a lack of memory, of space on a disk or of rights become one line
on standard error. Every other exception keeps its traceback, because it is a fault of the program
or of the user's own code.
"""

import contextlib
import functools
import io
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, ParamSpec

import typer
from typer.core import TyperGroup

from fineprune.errors import (
    DIVERGED,
    FAILED,
    WRONG_INPUT,
    InputError,
    RunError,
    Stopped,
    TrainingDiverged,
    first_line,
    lack_of,
)
from fineprune.launcher import check_not_launched

P = ParamSpec("P")

INTERRUPTED = 128 + signal.SIGINT

# What streams do with a character that their encoding lacks, if it raises an error.
_FAILING = ("strict", "surrogateescape")


def exits(
    to_continue: str | None = None, *, launched: bool = False
) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Return a decorator that turns the exceptions of a verb into exit statuses.

    Args:
        to_continue: What to do after Ctrl-C to continue; None if the verb keeps nothing.
        launched: Whether ``torchrun`` may start the verb.
    """

    def decorate(verb: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(verb)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            try:
                if not launched:
                    check_not_launched(f"fineprune {verb.__name__}", "what it needs")
                verb(*args, **kwargs)
            except (InputError, RunError) as error:
                _say(str(error))
                status = WRONG_INPUT if isinstance(error, InputError) else FAILED
                if isinstance(error, TrainingDiverged):
                    status = DIVERGED
                raise typer.Exit(status) from error
            except Stopped as error:
                _say(f"{error}; {to_continue}")
                raise typer.Exit(128 + error.number) from None
            except KeyboardInterrupt:
                _say("stopped" if to_continue is None else f"stopped; {to_continue}")
                raise typer.Exit(INTERRUPTED) from None
            except SystemExit as error:  # The user's own code called it, or rich.
                if isinstance(error.__context__, BrokenPipeError):
                    raise
                _say(f"failed while running: the code called sys.exit({error.code!r})")
                raise typer.Exit(FAILED) from error
            except (typer.Exit, BrokenPipeError):  # typer ends quietly if a pipe has no reader
                raise
            except Exception as error:
                if _is_lack(error):
                    raise typer.Exit(FAILED) from error
                traceback.print_exc()
                # The traceback shows all lines of a long message.
                _say(f"failed while running: {first_line(error) or type(error).__name__}")
                raise typer.Exit(FAILED) from error

        return run

    return decorate


class Group(TyperGroup):
    """A group of verbs. A command line that cannot be parsed is wrong input, said in one line."""

    def main(self, args: Any = None, *rest: Any, **settings: Any) -> Any:
        """Run the verb, or show the help if no arguments are given, and exit."""
        arguments = sys.argv[1:] if args is None else list(args)
        for stream in (sys.stdout, sys.stderr):
            # A terminal may lack a character of a table, for which no finished work should fail. In
            # the locale C, Python prints other bytes of file names, but not such characters.
            if isinstance(stream, io.TextIOWrapper) and stream.errors in _FAILING:
                with contextlib.suppress(OSError):
                    stream.reconfigure(errors="replace")
        try:
            settings["standalone_mode"] = False
            status = super().main(arguments or ["--help"], *rest, **settings)
        except typer.TyperException as error:
            _say(_usage(error))
            sys.exit(WRONG_INPUT)
        except InputError as error:  # Of an argument that is checked before the verb.
            _say(str(error))
            sys.exit(WRONG_INPUT)
        except OSError as error:  # The help and the version are printed outside the verbs.
            if not _is_lack(error):
                raise
            sys.exit(FAILED)
        sys.exit(status if arguments else WRONG_INPUT)


def _usage(error: typer.TyperException) -> str:
    """Say in one line what is wrong with a command line, and where its help is."""
    message = error.format_message().rstrip(".")
    details = getattr(error.__cause__, "errors", None)  # of pydantic, which converts the values
    if details is not None:
        message += f", got {details()[0]['input']!r}"
    context = getattr(error, "ctx", None)
    command = "fineprune" if context is None else context.command_path
    return f"{message}: see {command} --help"


def _is_lack(error: Exception) -> bool:
    """Return whether an exception is a lack of something, after saying so."""
    lack = lack_of(error)
    if lack is not None:
        _say(f"{lack}: {first_line(error)}")
    return lack is not None


def _say(message: str) -> None:
    typer.echo(f"fineprune: {' '.join(message.split())}", err=True)
