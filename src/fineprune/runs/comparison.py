"""Comparison: what ``compare.json`` says of the arms and the runs of a comparison."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fineprune.runs.files import COMPARISON, read_version, write_json

_VERSION = 2


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One of the trainings that a comparison compares.

    Attributes:
        name: The name of the arm.
        changes: What differs from the recipe of the comparison, as ``Recipe.changes_to`` returns
            it.
        needs: The arm whose run with the same seed must be finished first, because this one takes
            the numbers of samples of each epoch from it, or its suspects; None if there is none.
    """

    name: str
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)
    needs: str | None = None


@dataclass(frozen=True, kw_only=True)
class ListedRun:
    """A run of a comparison: its arm, its seed, and the name of its folder."""

    arm: str
    seed: int
    path: str


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A comparison, whose folder also holds its recipe.

    Attributes:
        version: The version of the file's format.
        title: The title.
        tuned: Whether the learning rate of each arm was chosen on held-out samples.
        sha256: The digests with which the comparison began; see ``training.results.input_digests``.
        arms: The arms, in the order of tables.
        runs: The runs, those that diverged included.
        diverged: What is known of each run that diverged, by the name of its folder.
    """

    version: int = _VERSION
    title: str
    tuned: bool = False
    sha256: dict[str, str | None]
    arms: tuple[Arm, ...]
    runs: tuple[ListedRun, ...]
    diverged: dict[str, str] = field(default_factory=dict)


def read_comparison(folder: Path) -> Comparison:
    """Read and check ``compare.json`` in a folder."""
    return read_version(folder / COMPARISON, Comparison, _VERSION)


def write_comparison(folder: Path, comparison: Comparison) -> None:
    """Write ``compare.json``, and replace an earlier one atomically."""
    write_json(folder / COMPARISON, comparison)
