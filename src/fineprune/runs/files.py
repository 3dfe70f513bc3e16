"""Run folders as plain files: lines appended while a run trains, and read back when it is done."""

import json
import os
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fineprune.errors import InputError

SUMMARY = "summary.json"
METRICS = "metrics.jsonl"
RECIPE = "recipe.toml"
COMPARISON = "compare.json"
SCALING = "scale.json"


@dataclass(frozen=True)
class Run:
    """A finished run, read from its folder.

    Attributes:
        path: the run's folder.
        summary: what ``summary.json`` holds.
        metrics: one dict an epoch, in order.
        recipe: the sections of ``recipe.toml``.
        title: of the comparison that the run is part of, or the folder's name.
    """

    path: Path
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]
    recipe: dict[str, Any]
    title: str = ""

    def counts(self) -> dict[int, npt.NDArray[np.integer]]:
        """Read the counts of each window: number of its last epoch, from 1, to integers (N,)."""
        return {
            int(file.stem.removeprefix("epoch-")): np.load(file, allow_pickle=False)
            for file in sorted((self.path / "counts").glob("epoch-*.npy"))
        }


def read_run(path: Path, title: str = "") -> Run:
    """Read a finished run.

    Raises:
        InputError: the folder does not hold one.
    """
    if not (path / SUMMARY).is_file():
        raise InputError(
            f"expected a finished run (a folder with {SUMMARY}) in {path}, found none: "
            f"finish it with --resume"
        )
    try:
        summary = json.loads((path / SUMMARY).read_text(encoding="utf-8"))
        recipe = tomllib.loads((path / RECIPE).read_text(encoding="utf-8"))
        metrics = read_metrics(path / METRICS)
    except (OSError, ValueError) as error:
        raise InputError(f"expected a whole run folder in {path}, cannot read it: {error}") from (
            error
        )
    return Run(path, summary, metrics, recipe, title or path.name)


def read_runs(paths: Iterable[Path]) -> list[Run]:
    """Read finished runs; a comparison's folder stands for all of its runs.

    Raises:
        InputError: a folder holds neither, or a run is not finished.
    """
    runs: list[Run] = []
    for path in paths:
        if not (path / COMPARISON).is_file():
            runs.append(read_run(path))
            continue
        listed = json.loads((path / COMPARISON).read_text(encoding="utf-8"))
        runs += [read_run(path / run["path"], listed["title"]) for run in listed["runs"]]
    return runs


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the epochs' metrics; a last line that a kill cut short is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]  # a whole line ends with a line break


def append_metrics(path: Path, metrics: dict[str, Any]) -> None:
    """Write one epoch's metrics as a line."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(metrics) + "\n")


def write_json_atomically(path: Path, content: Any) -> None:
    """Write JSON so that the file is always either the old one or the new one, whole."""
    write_atomically(path, json.dumps(content, indent=2) + "\n")


def write_atomically(path: Path, text: str) -> None:
    """Write text so that the file is always either the old one or the new one, whole."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
