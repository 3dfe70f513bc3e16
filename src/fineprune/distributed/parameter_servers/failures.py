"""Errors of workers and servers: they cross processes as text, and Ray's are put into few words."""

import functools
import traceback
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from ray.exceptions import LocalRayletDiedError, OutOfMemoryError, RayError, RayTaskError

from fineprune.errors import InputError, RayLost, RunError, first_line, lack_of

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")

# Why an actor died together with its node.
LOST_NODE = "its node died or cannot be reached"
# The causes of deaths, by what Ray says.
_CAUSES = {
    "killed by `ray.kill`": "it was killed",
    "node has died": LOST_NODE,
    "node died": LOST_NODE,
    "connection error": "it ended unexpectedly: killed, out of memory, or crashed",
}


class RemoteError(RuntimeError):
    """A process of the training raised an exception. The message is one line: it and its place."""


class Behind(RemoteError):
    """A server cannot make an update, because one before it failed: its gradients were lost."""


# What an actor raises. Each has a note: the stack trace in the actor's process.
RAISED = (InputError, RunError, RemoteError)


def told_as_text(method: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Let a method of an actor raise one of ``RAISED``, with text only, for every exception."""

    @functools.wraps(method)
    def telling(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            told = _as_text(error)
            told.add_note("".join(traceback.format_exception(error)))
            raise told from None

    return telling


def _as_text(error: Exception) -> Exception:
    """Return the exception to raise. Input and run errors explain themselves in their line."""
    if type(error) in (InputError, RunError, Behind):
        return type(error)(str(error))
    place = traceback.extract_tb(error.__traceback__)[-1]
    line = (
        f"{type(error).__name__}: {first_line(error)} "
        f"(in a worker or server: {place.filename}, line {place.lineno})"
    )
    lack = lack_of(error)
    return RunError(f"{lack}: {line}") if lack else RemoteError(line)


def root_of(error: RayError) -> Exception:
    """Return what made a call fail, perhaps an error of the actor that made an argument of it.

    It is one of ``RAISED``, or a ``RayActorError`` with the ``actor_id`` of the actor that died, or
    a failure of Ray, such as a lost object.
    """
    root: Exception = error
    while isinstance(root, RayTaskError) and isinstance(root.cause, Exception):
        root = root.cause
    return root


def cause_of(error: Exception) -> str:
    """Return in a few words the cause of a death, which Ray describes in a paragraph.

    Raises:
        RayLost: The cause is the end of Ray itself.
    """
    told = str(error)
    if isinstance(error, LocalRayletDiedError) or "its owner has died" in told:
        raise RayLost("Ray's process raylet counts as dead")
    if isinstance(error, OutOfMemoryError):
        return "Ray killed it because the memory of its node was almost full"
    if "Unavailable" in type(error).__name__:
        return "its node cannot be reached"
    last = (told.strip() or type(error).__name__).splitlines()[-1].strip()
    return next((cause for part, cause in _CAUSES.items() if part in told), last)
