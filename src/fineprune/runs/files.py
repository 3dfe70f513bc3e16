"""Writes, reads and checks the files of a run, so that a crash loses no data.

Every file except the metrics is replaced atomically, so that it is always either the old file or
the new one. The metrics are appended, one line per epoch, and each line is on disk before any file
that depends on it is written.
"""

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fineprune.errors import InputError, explaining
from fineprune.writing import cannot_write, replacing, write_atomically

SUMMARY = "summary.json"
METRICS = "metrics.jsonl"
RECIPE = "recipe.toml"
CHECKPOINT = "checkpoint.pt"
COUNTS = "counts"
COMPARISON = "compare.json"
RATES = "rates.json"
SCALING = "scale.json"
DURATION = "duration.json"
HISTORY = "history"

_EPOCH_FILE = re.compile(r"epoch-([0-9]{4,9})\.npy")

# The lists of the image files that a run trains and evaluates on.
IMAGES = ("train-images.npz", "test-images.npz")

# The files of runs, comparisons and scaling experiments.
RESULTS = (SUMMARY, METRICS, RECIPE, CHECKPOINT, *IMAGES, COMPARISON, RATES, SCALING, DURATION)

# The page about the runs in a folder, which can be written again.
REPORT = "report.html"


def write_json(path: Path, content: Any) -> None:
    """Write JSON, and replace a file at ``path`` atomically. Non-finite numbers become null."""
    write_atomically(path, json.dumps(finite(content), indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read JSON."""
    with explaining(f"expected JSON in {path}, cannot read it"):
        return json.loads(path.read_text(encoding="utf-8"))


def read_array(path: Path, what: str) -> npt.NDArray[Any]:
    """Read an array that NumPy saved, without pickles."""
    try:
        array: npt.NDArray[Any] = np.load(path, allow_pickle=False)
    except OSError as error:
        raise InputError(f"expected {what} in {path}, cannot read it: {error}") from error
    except (ValueError, EOFError) as error:
        raise InputError(
            f"expected {what} in {path}, got no whole array of numbers in NumPy's format: the file "
            f"is damaged"
        ) from error
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
    line = json.dumps(finite(metrics), allow_nan=False) + "\n"
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise cannot_write(path, error) from None


def read_metrics(path: Path, most: int | None = None) -> list[dict[str, Any]]:
    """Read the metrics of all epochs, without a last line that a crash has left incomplete.

    With ``most``, only so many of the first lines are read.
    """
    metrics = []
    for number, line in enumerate(whole_lines(path)[:most], start=1):
        with explaining(f"expected JSON in line {number} of {path}, cannot read it"):
            values = json.loads(line)
        if not isinstance(values, dict):
            raise InputError(f"expected an object in line {number} of {path}, got {line.strip()}")
        metrics.append(values)
    return metrics


def whole_lines(path: Path) -> list[str]:
    """Return the lines of a text file that end with a line break; no lines if there is no file."""
    if not path.exists():
        return []
    with explaining(f"expected UTF-8 in {path}, cannot read it"):
        text = path.read_text(encoding="utf-8")
    return text.splitlines(keepends=True)[: text.count("\n")]


def finite(content: Any) -> Any:
    """Return JSON content in which every non-finite number is replaced by None."""
    if isinstance(content, dict):
        return {key: finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite(value) for value in content]
    if isinstance(content, float) and not math.isfinite(content):
        return None
    return content
