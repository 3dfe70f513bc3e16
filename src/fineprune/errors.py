"""The errors that the command line prints as one line, checks that raise them, and warnings."""

import contextlib
import difflib
import errno
import importlib.util
import inspect
import math
import operator
import pickle
import signal
import warnings
from collections.abc import Iterator
from numbers import Integral, Real
from pathlib import Path

# The exit statuses of the command line, besides 0, and 128 plus the number of a signal.
FAILED, WRONG_INPUT, DIVERGED = 1, 2, 3

# Whole numbers of so many digits fit into int64; Python refuses to convert thousands of them.
MOST_DIGITS = 18

# Longer values are shortened in error messages.
_MOST_SHOWN = 200

_PACKAGE = str(Path(__file__).parent)


class InputError(ValueError):
    """A setting, a file or an argument is wrong.

    The message is one line: what was expected, what was given, and what to do. It is all that the
    command line prints, with exit status 2.
    """


class RunError(RuntimeError):
    """A run failed while running, and the message, one line, explains the failure completely.

    It is all that the command line prints, with exit status 1. Every other exception except
    ``InputError`` keeps its traceback.
    """


class RayLost(RunError):
    """Ray's own processes have ended or hang, so that no process can be started or replaced."""

    def __str__(self) -> str:
        return (
            f"{self.args[0]}: Ray cannot start or replace processes without it; continue with "
            f"--resume"
        )


class TrainingDiverged(RunError):
    """The mean loss of an epoch is not finite, so the weights are no longer usable."""


class Stopped(Exception):
    """A signal stopped the run, and its state is saved.

    Attributes:
        number: The number of the signal.
        place: The point at which the run stopped, as a phrase for the message.
    """

    def __init__(self, number: int, place: str) -> None:
        super().__init__(number, place)  # Unpickling passes these arguments to the constructor.
        self.number = number
        self.place = place

    def __str__(self) -> str:
        return f"stopped by {signal.Signals(self.number).name} {self.place}"


# The path needs rights that this user does not have, or it is too long.
_UNUSABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG)


def lack_of(error: Exception) -> str | None:
    """Return what was lacking: space, memory on the CPU or on a GPU, or a path that can be used.

    None if it is no lack.
    """
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "no space left for the output"
    if isinstance(error, OSError) and error.errno in _UNUSABLE:
        return "cannot use a path"
    # torch, whose import takes long, says it by an exception of its own for a GPU only.
    memory = (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))
    )
    return "out of memory" if memory else None


def check_one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    """Raise InputError unless ``value`` is known, naming a known value that is like it."""
    if value not in known:
        near = difflib.get_close_matches(value, known, n=1, cutoff=0.4)
        remedy = f": did you mean {near[0]!r}?" if near else ""
        raise InputError(f"expected {name} to be one of {', '.join(known)}, got {value!r}{remedy}")


def check_whole_number(name: str, value: object, least: int) -> int:
    """Return ``value`` as an int.

    Raises:
        InputError: It is no whole number (a bool is none) of at least ``least``.
    """
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise InputError(f"expected {name} to be a whole number of at least {least}, got {value!r}")
    return int(value)


def check_at_least(name: str, value: float, least: float) -> None:
    """Raise InputError unless ``value`` is finite and at least ``least``."""
    if not least <= value < math.inf:
        finite = "" if math.isfinite(value) else "a finite number of "
        raise InputError(f"expected {name} to be {finite}at least {least}, got {value}")


def check_positive(name: str, value: float) -> None:
    """Raise InputError unless ``value`` is finite and above 0."""
    if not 0 < value < math.inf:
        finite = "" if math.isfinite(value) else "a finite number "
        raise InputError(f"expected {name} to be {finite}above 0, got {value}")


def check_between(name: str, value: float, low: float, high: float) -> None:
    """Raise InputError unless ``value`` lies in [low, high]."""
    if not low <= value <= high:
        raise InputError(f"expected {name} in [{low}, {high}], got {value}")


def check_share(name: str, value: object, interval: str = "[0, 1]") -> float:
    """Return ``value`` as a float. InputError: it is no number in the interval.

    The interval says whether 0 and 1 are allowed: "[0, 1]", "[0, 1)", "(0, 1]" or "(0, 1)".
    """
    share = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    above = operator.le if interval.startswith("[") else operator.lt
    below = operator.le if interval.endswith("]") else operator.lt
    if not (above(0, share) and below(share, 1)):
        raise InputError(f"expected {name} as a share in {interval}, got {value!r}")
    return share


def check_flag(name: str, value: object) -> bool:
    """Return a truth value. InputError: it is something else."""
    if not isinstance(value, bool):
        raise InputError(f"expected {name} as True or False, got {value!r}")
    return value


def check_installed(module: str, needed: str, extra: str) -> None:
    """Raise InputError unless a module is installed. Imports nothing.

    Args:
        module: The name of the module, without dots.
        needed: What is expected, such as "Ray for distributed.strategy 'async'".
        extra: The extra of fineprune that installs it.
    """
    if importlib.util.find_spec(module) is None:
        raise InputError(f"expected {needed}, found none: pip install 'fineprune[{extra}]'")


@contextlib.contextmanager
def explaining(
    expected: str,
    kinds: type[Exception] | tuple[type[Exception], ...] = (OSError, ValueError),
    advice: str = "",
) -> Iterator[None]:
    """Raise InputError where an exception of some kinds is raised; an InputError stays as it is.

    Args:
        expected: The start of the message, such as "expected JSON in FILE, cannot read it". The
            reason follows.
        kinds: By default, what reading a text raises.
        advice: The end of the message.
    """
    try:
        yield
    except InputError:
        raise
    except kinds as error:
        raise InputError(f"{expected}: {reason_of(error)}{advice}") from error


def reason_of(error: Exception) -> str:
    """Return in one line why something that raised an exception cannot be done."""
    if isinstance(error, pickle.UnpicklingError):  # torch would advise to read it unsafely.
        return "it is damaged, or holds more than tensors and plain values"
    return getattr(error, "strerror", None) or first_line(error) or type(error).__name__


def shown(value: str) -> str:
    """Return a text in quotes for an error message, shortened if it is long."""
    return repr(value if len(value) <= _MOST_SHOWN else f"{value[:_MOST_SHOWN]}...")


def first_line(value: object) -> str:
    """Return the line of a text or of an exception's message that says what happened, or "".

    This is the first line; the last one of a traceback, as an error of another process has it; and
    all lines if the first one only announces them.
    """
    lines = [line.strip() for line in str(value).splitlines() if line.strip()]
    if any(line.startswith(("Traceback (", "Original Traceback (")) for line in lines):
        return lines[-1]
    if lines and lines[0].endswith(":"):
        text = " ".join(lines)
        return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
    return lines[0] if lines else ""


def warn_user(message: str, category: type[Warning] = RuntimeWarning) -> None:
    """Warn, and name the line outside this package from which it was called."""
    level, frame = 1, inspect.currentframe()
    inside = (_PACKAGE, contextlib.__file__)  # Decorators of the package are frames of contextlib.
    while frame is not None and frame.f_code.co_filename.startswith(inside):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
