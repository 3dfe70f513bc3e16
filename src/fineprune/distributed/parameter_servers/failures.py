"""Errors of workers and servers: they cross processes as text, and Ray's are put into few words."""

import functools
import re
import traceback
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from ray.exceptions import (
    LocalRayletDiedError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
)

from fineprune.distributed.parameter_servers.start import RayLost
from fineprune.errors import InputError, RunError, first_line, lack_of

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")

# Why an actor died together with its node.
LOST_NODE = "its node died or cannot be reached"


class RemoteError(RuntimeError):
    """A process of the training raised an exception. The message is one line: it and its place.

    ``__cause__`` shows the stack trace of the other process.
    """


class _Trace(Exception):
    """The stack trace of another process, as text."""


class Failure(Exception):
    """What a process raised, as text: the kind of the error, its line, and its stack trace.

    The kind ``behind`` is that of a server that cannot make an update, because one before it
    failed: its gradients were lost.
    """

    def __init__(self, kind: str, line: str, trace: str = "") -> None:
        super().__init__(kind, line, trace)  # Unpickling passes these to the constructor.
        self.kind, self.line, self.trace = kind, line, trace

    @classmethod
    def of(cls, error: Exception) -> "Failure":
        """Describe an exception. Input and run errors explain themselves in their line."""
        kind, line = {InputError: "input", RunError: "run"}.get(type(error), ""), str(error)
        if not kind:
            place = traceback.extract_tb(error.__traceback__)[-1]
            kind, line = (
                "other",
                (
                    f"{type(error).__name__}: {first_line(error)} "
                    f"(in a worker or server: {place.filename}, line {place.lineno})"
                ),
            )
            if lack := lack_of(error):
                kind, line = "run", f"{lack}: {line}"
        return cls(kind, line, "".join(traceback.format_exception(error)))

    def again(self) -> Exception:
        """Return the exception to raise in this process."""
        again: dict[str, type[Exception]] = {"input": InputError, "run": RunError}
        error = again.get(self.kind, RemoteError)(self.line)
        error.__cause__ = _Trace(self.trace)
        return error


def told_as_text(method: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Let a method of an actor raise ``Failure`` in place of every other exception."""

    @functools.wraps(method)
    def telling(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        try:
            return method(*args, **kwargs)
        except Failure:
            raise
        except Exception as error:
            raise Failure.of(error) from None

    return telling


def root_of(error: RayError) -> Exception:
    """Return what made a call fail, perhaps an error of the actor that made an argument of it.

    Returns:
        ``Failure``: what an actor raised. ``RayActorError``: the death of the actor that its
        ``actor_id`` names. Anything else: a failure of Ray, such as a lost object.
    """
    root: Exception = error
    while isinstance(root, RayTaskError) and isinstance(root.cause, Exception):
        root = root.cause
    return root


def dead_actor(error: Exception) -> str | None:
    """Return the identifier of the actor whose death an error reports; None if it reports none."""
    return error.actor_id if isinstance(error, RayActorError) else None


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
    if "killed by `ray.kill`" in told:
        return "it was killed"
    if "node has died" in told or "node died" in told:
        return LOST_NODE
    if "connection error" in told:
        return "it ended unexpectedly: killed, out of memory, or crashed"
    if "Unavailable" in type(error).__name__:
        return "its node cannot be reached"
    return re.sub(r"\s+", " ", told.strip().splitlines()[-1])
