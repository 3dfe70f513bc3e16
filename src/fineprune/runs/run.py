"""Run: a finished run, read from its folder and checked for completeness."""

import contextlib
import tomllib
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import numpy as np
import numpy.typing as npt

from fineprune.errors import InputError, explaining
from fineprune.runs.comparison import read_comparison
from fineprune.runs.files import (
    COMPARISON,
    COUNTS,
    METRICS,
    RECIPE,
    SCALING,
    SUMMARY,
    epoch_files,
    read_array,
    read_json,
    read_metrics,
    record,
)
from fineprune.runs.summary import Summary, read_summary

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


class _Scaled(TypedDict):
    """A run of a scaling experiment, as ``scale.json`` lists it; it has more."""

    path: str


class _Scaling(TypedDict):
    """What is read of ``scale.json``."""

    runs: list[_Scaled]


class _Epoch(TypedDict):
    """What each line of the metrics must have; it may have more."""

    epoch: int
    lr: float
    pruned: bool
    samples: int
    skipped: int
    steps: int
    nonfinite: int
    seconds: float
    bookkeeping_seconds: float


@dataclass(frozen=True)
class Run:
    """A finished run, read from its folder.

    Attributes:
        path: The run's folder.
        summary: The results, from ``summary.json``.
        metrics: The metrics, as one dict per epoch, in order.
        recipe: The sections of ``recipe.toml``.
        title: The title of the comparison that the run belongs to, or the name of its folder.
        comparison: The folder of that comparison; None if the run does not belong to one.
    """

    path: Path
    summary: Summary
    metrics: list[dict[str, Any]]
    recipe: dict[str, Any]
    title: str = ""
    comparison: Path | None = None

    @property
    def rate_factor(self) -> float | None:
        """The multiple of the comparison's learning rate that was chosen; None if none was."""
        factor: float | None = self.recipe.get("run", {}).get("rate_factor")
        return factor

    def counts(self) -> dict[int, npt.NDArray[np.integer]]:
        """Read the counts of each window.

        Returns:
            The counts of each window (integers, shape (N,)), by the window's last epoch, counted
            from 1.
        """
        counts = {}
        samples = self.summary.train_samples
        for epoch, file in epoch_files(self.path / COUNTS).items():
            array = read_array(file, "counts")
            if array.shape != (samples,) or not np.issubdtype(array.dtype, np.integer):
                raise InputError(
                    f"expected {samples} integers in {file}, got {array.dtype} of shape "
                    f"{array.shape}"
                )
            counts[epoch + 1] = array
        return counts


def read_run(path: Path, title: str = "", comparison: Path | None = None) -> Run:
    """Read a finished run, whose title is the name of its folder if none is given."""
    if not (path / SUMMARY).is_file():
        raise InputError(
            f"expected a finished run (a folder with {SUMMARY}) in {path}, "
            f"{_instead(path, listed=comparison is not None)}"
        )
    summary = read_summary(path / SUMMARY)
    recipe = read_sections(path / RECIPE)
    metrics = read_metrics(path / METRICS)
    run = Run(path, summary, metrics, recipe, title or path.name, comparison)
    _check_belonging(run)
    return run


def read_sections(file: Path) -> dict[str, Any]:
    """Read the sections of the recipe of a run or a comparison, unchecked."""
    with explaining(f"expected the recipe of a run in {file}, cannot read it"):
        sections = tomllib.loads(file.read_text(encoding="utf-8"))
    return record(sections, dict[str, dict[str, Any]], str(file))


def read_runs(paths: Iterable[Path]) -> list[Run]:
    """Read finished runs, each once.

    The folder of a comparison or of a scaling experiment stands for all of its runs.
    """
    found: list[tuple[Path, str, Path | None]] = []
    for path in paths:
        if (path / COMPARISON).is_file():
            listed = read_comparison(path)
            found += [(path / run.path, listed.title, path) for run in listed.runs]
        elif (path / SCALING).is_file():
            scaled = read_json(path / SCALING, _Scaling)["runs"]
            found += [(path / run["path"], path.name, None) for run in scaled]
        else:
            found.append((path, "", None))
    once: dict[Path, tuple[Path, str, Path | None]] = {}
    for each in found:
        place = each[0].resolve()
        if place not in once or once[place][2] is None:  # A comparison says more.
            once[place] = each
    return [read_run(*each) for each in once.values()]


def diverged_runs(comparison: Path) -> dict[str, str]:
    """Return what ``compare`` noted of the runs that diverged, by the names of their folders.

    Nothing if the file of the comparison is missing or damaged.
    """
    with contextlib.suppress(InputError):
        return dict(read_comparison(comparison).diverged)
    return {}


def told_apart(names: Sequence[str], ends: Iterable[str]) -> list[str]:
    """Return the names of runs, with its end after each name that several runs have."""
    return [
        name + end if names.count(name) > 1 else name for name, end in zip(names, ends, strict=True)
    ]


def split_by(key: Callable[[_Value], _Key], values: Iterable[_Value]) -> dict[_Key, list[_Value]]:
    """Return the values with each key, both in the order of their first occurrence."""
    parts: dict[_Key, list[_Value]] = {}
    for value in values:
        parts.setdefault(key(value), []).append(value)
    return parts


def _instead(path: Path, *, listed: bool) -> str:
    """Say what a folder without a finished run holds, and what to do."""
    if listed or ((path / RECIPE).exists() and (path.parent / COMPARISON).exists()):
        return (
            f"got one of {path.parent}, which is not finished: wait for its end, or run fineprune "
            f"compare again if it has stopped"
        )
    if (path / COMPARISON).exists():
        return "got a comparison: give one of its runs"
    if (path / SCALING).exists():
        return "got a scaling experiment: give one of its runs"
    if comparisons := sorted(path.glob(f"*/{COMPARISON}")):
        named = " ".join(str(file.parent) for file in comparisons)
        return f"got a folder of {len(comparisons)} comparisons: give {named}"
    if any(path.glob(f"*/{SUMMARY}")):
        return f"got several without {COMPARISON}: restore this file, or give the folders of runs"
    if (path / RECIPE).exists():
        return "got an unfinished one: finish the run with --resume"
    return "found none: give the folder of a run or of a comparison"


def check_metrics(path: Path, metrics: Iterable[Any]) -> None:
    """Raise InputError unless the metrics of each epoch of the run in a folder are complete."""
    for number, line in enumerate(metrics, start=1):
        record(line, _Epoch, f"line {number} of {path / METRICS}")


def _check_belonging(run: Run) -> None:
    """Raise InputError unless the recipe, metrics and summary are complete and of the same run."""
    summary, epochs = run.summary, [line.get("epoch") for line in run.metrics]
    if epochs != list(range(summary.epochs)):
        raise InputError(
            f"expected one line for each of the {summary.epochs} epochs in {run.path / METRICS}, "
            f"got {len(epochs)} lines, of the epochs {epochs}: restore the file, or train again"
        )
    check_metrics(run.path, run.metrics)
    accuracies = [line.get(f"{summary.evaluated_on}_accuracy") for line in run.metrics]
    found = {
        "samples_trained": sum(line["samples"] for line in run.metrics),
        "steps": sum(line["steps"] for line in run.metrics),
        "accuracy_last": next((a for a in reversed(accuracies) if a is not None), None),
        "epochs": run.recipe.get("training", {}).get("epochs"),
        "seed": run.recipe.get("run", {}).get("seed"),
    }
    for key, value in found.items():
        if (expected := getattr(summary, key)) != value:
            raise InputError(
                f"expected {key} = {expected} from {METRICS} and {RECIPE}, as in "
                f"{run.path / SUMMARY}, got {value}: the files are of different runs"
            )
