"""The facts of a report: what was run, on which data and on which hardware."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fineprune.experiments.tuning import read_rates
from fineprune.runs.files import RECIPE
from fineprune.runs.run import Run, diverged_runs, split_by
from fineprune.runs.summary import Summary


def facts(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Return pairs of a term and its value that describe runs of one network on one dataset."""
    summaries = [run.summary for run in runs]
    first = summaries[0]
    rates = chosen_rates(runs)
    versions = (", ".join(f"{name} {of}" for name, of in s.versions.items()) for s in summaries)
    return [
        ("Runs", f"{len(runs)}: {', '.join(distinct(run.title for run in runs))}"),
        ("Network", f"{first.network}, {first.parameters:,} parameters"),
        ("Data", f"{first.dataset}, {first.train_samples:,} training samples"),
        ("Evaluated on", f"{first.evaluated_on} set"),
        ("Epochs", _epochs(summaries)),
        *([("Learning rates", rates)] if rates else []),
        ("Seeds", ", ".join(distinct(str(summary.seed) for summary in summaries))),
        ("Hardware", "; ".join(distinct(f"{machine(s)}, {s.precision}" for s in summaries))),
        ("Versions", "; ".join(distinct(versions))),
        ("Git revision", ", ".join(distinct(summary.git or "none" for summary in summaries))),
    ]


def _epochs(summaries: Sequence[Summary]) -> str:
    """Return the numbers of epochs, of which one arm has several in an experiment on scaling."""
    by_arm = split_by(lambda summary: summary.arm, summaries)
    lengths = {arm: listed(distinct(s.epochs for s in of_arm)) for arm, of_arm in by_arm.items()}
    if len(by_arm) == 1 or len({summary.epochs for summary in summaries}) == 1:
        return next(iter(lengths.values()))
    return ", ".join(f"{arm} {of_arm}" for arm, of_arm in lengths.items())


def chosen_rates(runs: Sequence[Run]) -> str | None:
    """Return a phrase on the learning rates that were chosen for the arms; None if none were."""
    factors = {run.summary.arm: run.rate_factor for run in runs if run.rate_factor is not None}
    if not factors:
        return None
    folder = comparison_of(runs)
    held_out = 0 if folder is None else read_rates(folder).held_out
    number = f"{held_out:,} " if held_out else ""
    chosen = ", ".join(f"{factor:g} ({arm})" for arm, factor in factors.items())
    return (
        f"that of the recipe times {chosen}, chosen with one seed on {number}held-out training "
        f"samples"
    )


def comparison_of(runs: Iterable[Run]) -> Path | None:
    """Return the folder, with a recipe, of the comparison of some runs; None without one."""
    folders = {run.comparison for run in runs}
    folder = folders.pop()
    return folder if not folders and folder and (folder / RECIPE).exists() else None


def unequal(runs: Sequence[Run]) -> list[str]:
    """Return sentences on what differs between runs although their results are compared."""
    sentences = []
    precisions = split_by(lambda run: run.summary.precision, runs)
    if len(precisions) > 1:
        named = "; ".join(
            f"{name}: {', '.join(run.path.name for run in same)}"
            for name, same in precisions.items()
        )
        sentences.append(
            f"The runs have different precisions ({named}), which change accuracies and times."
        )
    ranks = distinct(run.summary.ranks for run in runs)
    if len(ranks) > 1:
        sentences.append(
            f"The runs were trained by different numbers of processes ({listed(ranks)}), so their "
            f"updates may have different sizes, which change accuracies and times."
        )
    if not same_machine(runs):
        sentences.append("The runs used different hardware, so their times cannot be compared.")
    return sentences


def missing(runs: Sequence[Run]) -> list[str]:
    """Return a sentence on each run of the same comparisons that diverged."""
    comparisons = distinct(run.comparison for run in runs if run.comparison)
    return [
        f"A run is missing: {noted}."
        for comparison in comparisons
        for noted in diverged_runs(comparison).values()
    ]


def same_machine(runs: Sequence[Run]) -> bool:
    """Return whether all runs used the same hardware, so that their times can be compared."""
    return len({(machine(run.summary), run.summary.ranks) for run in runs}) == 1


def machine(summary: Summary) -> str:
    """Return the hardware of a run as text, with its number of threads."""
    parts = summary.hardware
    cpu = f"{parts.cpu}, {parts.threads} thread{'' if parts.threads == 1 else 's'}"
    return cpu if parts.gpu is None else f"{parts.gpu} ({cpu})"


def distinct(values: Iterable[Any]) -> list[Any]:
    """Return the values without duplicates, in the order of their first occurrence."""
    return list(dict.fromkeys(values))


def listed(values: Iterable[Any]) -> str:
    """Return at least one value as a list in a sentence, such as ``1, 2 and 3``."""
    *others, last = map(str, values)
    return f"{', '.join(others)} and {last}" if others else last
