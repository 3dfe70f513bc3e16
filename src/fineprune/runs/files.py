"""The files of a run: written so that a crash loses nothing, read back, and checked.

Every file but the metrics is replaced in one step, so that it is always either the old one or the
new one. Metrics are appended one line per epoch, and each line is on disk before anything that
depends on it.
"""

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from fineprune.errors import InputError, RunError

SUMMARY = "summary.json"
METRICS = "metrics.jsonl"
RECIPE = "recipe.toml"
CHECKPOINT = "checkpoint.pt"
COUNTS = "counts"
COMPARISON = "compare.json"
SCALING = "scale.json"
DURATION = "duration.json"


class WriteError(RunError, OSError):
    """A file could not be written: the disk is full, for example."""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes the place of ``path`` when the block ends without an exception.

    After an exception, the old file is still there and the new one is removed.

    Raises:
        WriteError: The file cannot be written, because the disk is full, for example.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        _remove(temporary)
        raise WriteError(f"cannot write {path}: {error.strerror}") from None
    except BaseException:
        _remove(temporary)
        raise


def write_atomically(path: Path, text: str) -> None:
    """Write text in UTF-8, all of it or nothing.

    Raises:
        InputError: ``path`` is a folder.
    """
    if path.is_dir():
        raise InputError(f"expected a file to write, got the folder {path}: add a file name")
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


def write_json(path: Path, content: Any) -> None:
    """Write JSON, all of it or nothing. Numbers that are not finite become null."""
    write_atomically(path, json.dumps(finite(content), indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read JSON.

    Raises:
        InputError: The file cannot be read, or is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"expected JSON in {path}, cannot read it: {error}") from error


def metrics_line(metrics: dict[str, Any]) -> str:
    """Return one epoch's metrics as a line. Numbers that are not finite become null."""
    return json.dumps(finite(metrics), allow_nan=False) + "\n"


def append_metrics(path: Path, metrics: dict[str, Any]) -> None:
    """Append one epoch's metrics as a line, and return when the line is on disk.

    Raises:
        WriteError: The line cannot be written. What was written of it is not read back.
    """
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(metrics_line(metrics))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise WriteError(f"cannot write {path}: {error.strerror}") from None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the metrics of all epochs. A last line that a crash cut short is left out.

    Raises:
        InputError: A line is not a JSON object.
    """
    metrics = []
    for number, line in enumerate(whole_lines(path), start=1):
        try:
            values = json.loads(line)
        except ValueError as error:
            raise InputError(f"expected JSON in line {number} of {path}: {error}") from error
        if not isinstance(values, dict):
            raise InputError(f"expected an object in line {number} of {path}, got {line.strip()}")
        metrics.append(values)
    return metrics


def whole_lines(path: Path) -> list[str]:
    """Return the lines of a text file that end with a line break; none if there is no file."""
    if not path.exists():
        return []
    try:
        text = path.read_text(encoding="utf-8")
    except ValueError as error:
        raise InputError(f"expected UTF-8 in {path}: {error}") from error
    return text.splitlines(keepends=True)[: text.count("\n")]


def digest(lines: Iterable[str]) -> str:
    """Return the SHA-256 of lines, in hexadecimal."""
    return hashlib.sha256("".join(lines).encode("utf-8")).hexdigest()


def finite(content: Any) -> Any:
    """Return JSON content with None in place of every number that is not finite."""
    if isinstance(content, dict):
        return {key: finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite(value) for value in content]
    if isinstance(content, float) and not math.isfinite(content):
        return None
    return content


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
