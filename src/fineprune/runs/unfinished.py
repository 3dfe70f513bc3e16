"""Unfinished: a run that trains, or was stopped, with the epochs that it has."""

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fineprune.errors import InputError
from fineprune.runs.files import COMPARISON, METRICS, RECIPE, SUMMARY, read_metrics
from fineprune.runs.run import Run, check_metrics, listed_runs, read_run, read_sections, told_apart


@dataclass(frozen=True)
class Unfinished:
    """A run that has no summary yet.

    Attributes:
        name: The arm and the folder of the run, such as ``full (full-0)``, and the folder of its
            comparison if another run has the same.
        path: The run's folder.
        recipe: The sections of ``recipe.toml``; empty if the run has not begun.
        metrics: The metrics, as one dict per epoch that has ended, in order.
        title: The title of the comparison that the run belongs to, or the name of its folder.
    """

    name: str
    path: Path
    recipe: dict[str, Any]
    metrics: list[dict[str, Any]]
    title: str

    @property
    def epochs(self) -> int | None:
        """The number of epochs that it will have; None if it has not begun."""
        epochs: int | None = self.recipe.get("training", {}).get("epochs")
        return epochs

    @property
    def evaluated_on(self) -> str:
        """The set that it was evaluated on, ``test`` or ``validation``."""
        tested = any(line.get("test_accuracy") is not None for line in self.metrics)
        return "test" if tested or not self.metrics else "validation"


def read_followed(paths: Iterable[Path]) -> tuple[list[Run], list[Unfinished]]:
    """Read runs, finished or not. The folder of a comparison stands for all of its runs."""
    finished, unfinished = [], []
    for folder, title, comparison in listed_runs(paths):
        if (folder / SUMMARY).is_file():
            finished.append(read_run(folder, title, comparison))
        elif comparison is not None or (folder / RECIPE).is_file():
            unfinished.append(_read(folder, title))
        else:
            raise InputError(
                f"expected a run or a comparison (a folder with {RECIPE} or {COMPARISON}) in "
                f"{folder}, found none: give the folder to which a training writes"
            )
    names = told_apart(
        [run.name for run in unfinished], [f" in {run.path.parent}" for run in unfinished]
    )
    named = [replace(run, name=name) for name, run in zip(names, unfinished, strict=True)]
    return finished, named


def state_of(paths: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Return the names, the sizes and the times of the files that ``read_followed`` would read."""
    states = []
    for folder, _, comparison in listed_runs(paths):
        files = [folder / name for name in (RECIPE, METRICS, SUMMARY)]
        for file in files if comparison is None else [comparison / COMPARISON, *files]:
            with contextlib.suppress(OSError):
                status = os.stat(file)
                states.append((str(file), status.st_size, status.st_mtime_ns))
    return states


def _read(folder: Path, title: str) -> Unfinished:
    file = folder / RECIPE
    recipe = read_sections(file) if file.exists() else {}
    metrics = read_metrics(folder / METRICS)
    check_metrics(folder, metrics)
    arm = recipe.get("run", {}).get("arm") or recipe.get("pruning", {}).get("policy")
    name = f"{arm or 'not begun'} ({folder.name})"
    return Unfinished(name, folder, recipe, metrics, title or folder.name)
