"""The facts of a report: what was run, on which data and on which hardware."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from fineprune.report.page import Facts, Fold, Part, Recipe
from fineprune.runs.files import RECIPE
from fineprune.runs.run import Run, diverged_runs, split_by
from fineprune.runs.summary import Summary

# Quartiles of an epoch's time that are further apart are not the training's own.
_UNSTEADY = 1.5


def what_was_run(groups: Iterable[Sequence[Run]], recipes: Iterable[Path]) -> list[Part]:
    """Return the folded facts about each group of runs, and the recipes in some files."""
    texts = [Recipe(file.read_text(encoding="utf-8").strip()) for file in recipes]
    about = Facts([fact for runs in groups for fact in facts(runs)])
    return [Fold("What was run", [about]), Fold("The complete recipe", texts)]


def facts(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Return pairs of a term and its value that describe runs of one network on one dataset."""
    summaries = [run.summary for run in runs]
    first = summaries[0]
    rates = chosen_rates(runs)
    epochs = [
        f"{number} ({', '.join(distinct(s.arm for s in of))})"
        for number, of in split_by(lambda summary: summary.epochs, summaries).items()
    ]
    return [
        ("Runs", f"{len(runs)}: {', '.join(distinct(run.title for run in runs))}"),
        ("Network", f"{first.network}, {first.parameters:,} parameters"),
        ("Data", f"{first.dataset}, {first.train_samples:,} training samples"),
        ("Evaluated on", f"{first.evaluated_on} set"),
        ("Epochs", "; ".join(epochs)),
        *([("Learning rates", rates)] if rates else []),
        ("Seeds", ", ".join(distinct(str(summary.seed) for summary in summaries))),
        ("Hardware", "; ".join(distinct(f"{machine(s)}, {s.precision}" for s in summaries))),
        ("Versions", "; ".join(distinct(map(_versions, summaries)))),
        ("Git revision", ", ".join(distinct(summary.git or "none" for summary in summaries))),
    ]


def chosen_rates(runs: Sequence[Run]) -> str | None:
    """Return a phrase on the learning rates that were chosen for the arms; None if none were."""
    factors = {run.summary.arm: run.rate_factor for run in runs if run.rate_factor is not None}
    chosen = ", ".join(f"{factor:g} ({arm})" for arm, factor in factors.items())
    return f"that of the recipe times {chosen}, chosen on held-out samples" if factors else None


def comparison_of(runs: Iterable[Run]) -> Path | None:
    """Return the folder, with a recipe, of the comparison of some runs; None without one."""
    folders = {run.comparison for run in runs}
    folder = folders.pop()
    return folder if not folders and folder and (folder / RECIPE).exists() else None


def cautions(runs: Sequence[Run]) -> list[str]:
    """Return sentences on what differs between runs whose results are compared, or is missing."""
    sentences = []
    places: dict[str, Callable[[Run], object]] = {
        "precisions": lambda run: run.summary.precision,
        "numbers of processes": lambda run: run.summary.ranks,
        "hardware": lambda run: machine(run.summary),
        "versions": lambda run: _versions(run.summary),
    }
    for what, of in places.items():
        parts = split_by(of, runs)
        if len(parts) > 1:
            named = "; ".join(
                f"{part}: {', '.join(run.path.name for run in members)}"
                for part, members in parts.items()
            )
            sentences.append(f"The runs have different {what} ({named}).")
    folders = distinct(run.comparison for run in runs if run.comparison)
    sentences += [f"A run is missing: {n}." for f in folders for n in diverged_runs(f).values()]
    sentences += unsteady(runs)
    nonfinite = sum(line["nonfinite"] for run in runs for line in run.metrics)
    if nonfinite:
        sentences.append(f"{nonfinite:,} losses were not finite, and were left out of the counts.")
    return sentences


def unsteady(runs: Sequence[Run]) -> list[str]:
    """Return a sentence if the speed of the machine changed while runs trained; else nothing.

    It did if the quartiles of the seconds per sample of a run's epochs, but the first, are further
    apart than 1 to 1.5.
    """
    ratios = []
    for run in runs:
        lines = [line for line in run.metrics[1:] if line["samples"]]
        if len(lines) > 1:
            seconds = [line["seconds"] / line["samples"] for line in lines]
            low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
            ratios.append(high / low)
    if not ratios or max(ratios) <= _UNSTEADY:
        return []
    return [
        f"The speed of the machine changed while runs trained: the quartiles of the time of an "
        f"epoch differ up to {max(ratios):.1f} times. Other work probably ran, so times, speedups "
        f"and what was saved are not reliable."
    ]


def machine(summary: Summary) -> str:
    """Return the hardware of a run as text, with its number of threads."""
    parts = summary.hardware
    cpu = f"{parts.cpu}, {parts.threads} thread{'' if parts.threads == 1 else 's'}"
    return cpu if parts.gpu is None else f"{parts.gpu} ({cpu})"


def _versions(summary: Summary) -> str:
    return ", ".join(f"{name} {version}" for name, version in summary.versions.items())


def distinct(values: Iterable[Any]) -> list[Any]:
    """Return the values without duplicates, in the order of their first occurrence."""
    return list(dict.fromkeys(values))
