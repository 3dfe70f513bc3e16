"""Unfinished: a run that trains, or was stopped, with the epochs that it has."""

import collections
import dataclasses
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fineprune.errors import InputError
from fineprune.runs.files import COMPARISON, METRICS, RECIPE, SUMMARY, read_metrics
from fineprune.runs.run import Run, check_metrics, listed_runs, read_run, read_sections


@dataclass(frozen=True)
class Unfinished:
    """A run that has no summary yet.

    Attributes:
        path: The run's folder.
        recipe: The sections of ``recipe.toml``; empty if the run has not begun.
        metrics: The metrics, as one dict per epoch that has ended, in order.
        title: The title of the comparison that the run belongs to, or the name of its folder.
        is_one_of_several: Whether a run of another comparison has the same arm and folder name.
    """

    path: Path
    recipe: dict[str, Any]
    metrics: list[dict[str, Any]]
    title: str
    is_one_of_several: bool = False

    @property
    def name(self) -> str:
        """The arm and the folder of the run, such as ``full (full-0)``.

        The folder of its comparison follows if another run has the same.
        """
        arm = self.recipe.get("run", {}).get("arm") or self.recipe.get("pruning", {}).get("policy")
        name = f"{arm or 'not begun'} ({self.path.name})"
        return f"{name} in {self.path.parent}" if self.is_one_of_several else name

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
    """Read runs, finished or not.

    Args:
        paths: Folders of runs, or folders of comparisons, which stand for all of their runs.
    """
    finished, unfinished = [], []
    for folder, title, comparison in listed_runs(paths):
        if (folder / SUMMARY).is_file():
            finished.append(read_run(folder, title, comparison))
        elif comparison is not None or (folder / RECIPE).is_file():
            unfinished.append(_read(folder, title))
        else:
            raise InputError(
                f"expected a run or a comparison (a folder with {RECIPE} or {COMPARISON}) in "
                f"{folder}, found none: give the folder that a training writes to"
            )
    names = collections.Counter(run.name for run in unfinished)
    return finished, [
        dataclasses.replace(run, is_one_of_several=names[run.name] > 1) for run in unfinished
    ]


def state_of(paths: Iterable[Path]) -> tuple[tuple[str, int, int], ...]:
    """Return the names, the sizes and the times of the files that ``read_followed`` would read."""
    return tuple(_states(paths))


def _states(paths: Iterable[Path]) -> Iterator[tuple[str, int, int]]:
    for folder, _, comparison in listed_runs(paths):
        files = [folder / name for name in (RECIPE, METRICS, SUMMARY)]
        for file in files if comparison is None else [comparison / COMPARISON, *files]:
            try:
                status = os.stat(file)
            except OSError:
                continue
            yield str(file), status.st_size, status.st_mtime_ns


def _read(folder: Path, title: str) -> Unfinished:
    file = folder / RECIPE
    recipe = read_sections(file) if file.exists() else {}
    metrics = read_metrics(folder / METRICS)
    check_metrics(folder, metrics)
    return Unfinished(folder, recipe, metrics, title or folder.name)
