"""Writes, reads and checks the files of a run, so that a crash loses no data.

Every file except the metrics is replaced atomically. The metrics are appended, one line per epoch,
and each line is on disk before any file that depends on it is written.
"""

import re
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from fineprune.errors import InputError, explaining
from fineprune.runs.lock import check_locked
from fineprune.writing import cannot_write, flush, replacing, write_atomically

_Record = TypeVar("_Record")

SUMMARY = "summary.json"
METRICS = "metrics.jsonl"
RECIPE = "recipe.toml"
CHECKPOINT = "checkpoint.pt"
COUNTS = "counts"
COMPARISON = "compare.json"
SCALING = "scale.json"
HISTORY = "history"

# What msgspec says of an object that lacks a key.
_MISSING = re.compile(r"Object missing required field `(\w+)`")

_EPOCH_FILE = re.compile(r"epoch-([0-9]{4,9})\.npy")

# The lists of the image files that a run trains and evaluates on.
IMAGES = ("train-images.npz", "test-images.npz")

# The files of runs, comparisons and scaling experiments.
RESULTS = (SUMMARY, METRICS, RECIPE, CHECKPOINT, *IMAGES, COMPARISON, SCALING)

# The page about the runs in a folder, which can be written again.
REPORT = "report.html"


def json_text(content: Any) -> str:
    """Return JSON in one line. Dataclasses become objects, and non-finite numbers null."""
    return msgspec.json.format(msgspec.json.encode(content, enc_hook=_plain).decode(), indent=0)


def _plain(value: Any) -> Any:
    """Return a number of NumPy, or a text such as torch's version, as one of Python."""
    return str(value) if isinstance(value, str) else value.item()


def write_json(path: Path, content: Any) -> None:
    """Write JSON as ``json_text``, with line breaks, and replace a file at ``path`` atomically."""
    check_locked(path.parent)
    write_atomically(path, msgspec.json.format(json_text(content)) + "\n")


def read_json(path: Path, kind: type[_Record], advice: str = "") -> _Record:
    """Read JSON as a dataclass or another type, strictly; ``advice`` is that of ``explaining``."""
    with explaining(f"expected JSON in {path}, cannot read it", advice=advice):
        content = path.read_text(encoding="utf-8")
        try:
            return msgspec.json.decode(content, type=kind)
        except msgspec.ValidationError as error:
            raise _damaged(str(path), error) from None


def read_version(path: Path, kind: type[_Record], version: int, advice: str = "") -> _Record:
    """Read JSON as a dataclass whose ``version`` must be this one."""
    content = read_json(path, dict[str, Any], advice)
    found = content.get("version", version)
    if found != version:
        raise InputError(
            f"expected format {version} of {path}, got {found}: read it with the version of "
            f"fineprune that wrote it"
        )
    return record(content, kind, str(path))


def record(content: Any, kind: type[_Record], place: str) -> _Record:
    """Return content that was read from a place as a dataclass or another type, strictly."""
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise _damaged(place, error) from None


def _damaged(place: str, error: msgspec.ValidationError) -> InputError:
    if missing := _MISSING.match(str(error)):
        return InputError(f"expected {missing[1]} in {place}, got none")
    return InputError(f"expected {place} as fineprune wrote it, got: {error}")


def read_array(path: Path, what: str) -> npt.NDArray[Any]:
    """Read an array that NumPy saved, without pickles."""
    expected = f"expected {what} in {path}, cannot read it"
    with explaining(expected, OSError):
        try:
            array: npt.NDArray[Any] = np.load(path, allow_pickle=False)
        except (ValueError, EOFError):  # NumPy would advise to allow pickles, which run code.
            raise InputError(f"{expected}: no whole array of numbers in NumPy's format") from None
        return array


def write_array(path: Path, array: npt.NDArray[Any]) -> None:
    """Write an array, for ``read_array``, into a folder that is made if it is missing."""
    try:
        path.parent.mkdir(exist_ok=True)
    except OSError as error:
        raise cannot_write(path, error) from None
    with replacing(path) as file:
        np.save(file, array, allow_pickle=False)


def epoch_file(folder: Path, epoch: int) -> Path:
    """Return the path of the array of an epoch, counted from 0, in a folder of arrays."""
    return folder / f"epoch-{epoch + 1:04d}.npy"


def epoch_files(folder: Path) -> dict[int, Path]:
    """Return the arrays in a folder, which need not exist, by their epochs from 0, in order."""
    found = ((_EPOCH_FILE.fullmatch(path.name), path) for path in folder.glob("epoch-*.npy"))
    return dict(sorted((int(match[1]) - 1, path) for match, path in found if match))


def is_run_file(path: Path) -> bool:
    """Return whether a path is that of a result: a file of a run or of several runs."""
    arrays = path.parent.name in (COUNTS, HISTORY) and path.suffix in (".npy", ".npz", ".pt")
    return path.name in RESULTS or arrays


def append_metrics(path: Path, metrics: dict[str, Any]) -> None:
    """Append the metrics of one epoch as one line of JSON, which is on disk afterwards.

    Non-finite numbers become null.
    """
    check_locked(path.parent)
    line = json_text(metrics) + "\n"
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line)
            flush(file)
    except OSError as error:
        raise cannot_write(path, error) from None


def read_metrics(path: Path, most: int | None = None) -> list[dict[str, Any]]:
    """Read the metrics of all epochs, without a last line that a crash has left incomplete.

    With ``most``, only so many of the first lines are read.
    """
    metrics = []
    for number, line in enumerate(whole_lines(path)[:most], start=1):
        with explaining(f"expected JSON in line {number} of {path}, cannot read it"):
            values = msgspec.json.decode(line)
        metrics.append(record(values, dict[str, Any], f"line {number} of {path}"))
    return metrics


def whole_lines(path: Path) -> list[str]:
    """Return the lines of a text file that end with a line break; no lines if there is no file."""
    if not path.exists():
        return []
    with explaining(f"expected UTF-8 in {path}, cannot read it"):
        text = path.read_text(encoding="utf-8")
    return text.splitlines(keepends=True)[: text.count("\n")]
