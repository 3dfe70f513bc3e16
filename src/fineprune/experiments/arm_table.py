"""Statistics of comparisons: a row for each arm, with differences paired by seed.

Runs of one seed share their initial weights and orders, so an arm is compared with another seed by
seed; the interval over the seeds says how far the mean difference may be trusted. Everything here
is in plain shares and seconds, as in ``summary.json``; the report turns them into per cent.
"""

import itertools
import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from scipy.special import stdtrit

from fineprune.errors import InputError
from fineprune.experiments.controls import ARMS
from fineprune.runs.run import Run

BASELINE = "full"

_Key = TypeVar("_Key", bound=Hashable)

# What the control of equal cost shortens; in these it differs from the other arms by design.
_LENGTHS = ("epochs", "milestones", "warmup")

# Where and how data are read changes nothing that is learnt.
_PLACES = ("dir", "download", "workers")


@dataclass(frozen=True)
class Difference:
    """A difference between two arms, paired by seed.

    Attributes:
        mean: mean over the pairs; a share where it is of accuracies (0.01 is one point).
        half_width: half of the 95 % Student interval around the mean; None with one pair.
        pairs: number of seeds that both arms have.
    """

    mean: float
    half_width: float | None
    pairs: int

    @property
    def low(self) -> float | None:
        """Lower end of the 95 % interval; None with one pair."""
        return None if self.half_width is None else self.mean - self.half_width

    @property
    def high(self) -> float | None:
        """Upper end of the 95 % interval; None with one pair."""
        return None if self.half_width is None else self.mean + self.half_width


@dataclass(frozen=True)
class Row:
    """One arm of a comparison, averaged over its seeds. None: cannot be said from these runs.

    Attributes:
        group: the comparison that the arm belongs to, such as ``lenet on digits``.
        network, dataset: their names.
        evaluated_on: ``test`` or ``validation``.
        arm: its name.
        seeds: number of runs.
        seconds_train: wall-clock seconds of the training phase, bookkeeping inside, evaluation
            apart.
        time_saved: share of ``seconds_train`` saved against ``full``, matched by seed.
        saved_in_epochs: share saved, from each run's own median epochs (``saved_in_epochs``).
        seconds_bookkeeping: the overhead: seconds of selection, records and counts in a run.
        samples_trained: sample-steps, samples summed over the epochs.
        steps: optimizer steps.
        skipped: share of the sample-steps of ``full`` that the arm does not train.
        accuracy_last: in the last epoch, a share: the headline.
        last_difference: ``accuracy_last`` less that of ``full``.
        accuracy_best3: mean of a run's three best evaluations, the paper's accuracy; a best-of on
            the evaluated set, and so too high.
        best3_difference: ``accuracy_best3`` less that of ``full``.
    """

    group: str
    network: str
    dataset: str
    evaluated_on: str | None
    arm: str
    seeds: int | None
    seconds_train: float | None
    time_saved: float | None
    saved_in_epochs: float | None
    seconds_bookkeeping: float | None
    samples_trained: float | None
    steps: float | None
    skipped: float | None
    accuracy_last: float | None
    last_difference: Difference | None
    accuracy_best3: float | None
    best3_difference: Difference | None


@dataclass(frozen=True)
class Group:
    """Runs that may be compared with each other.

    Attributes:
        label: such as ``lenet on digits``.
        runs: in the order of their arms, and of their seeds within an arm.
    """

    label: str
    runs: tuple[Run, ...]

    @property
    def arms(self) -> list[str]:
        """The arms, in the order of the table."""
        return list(dict.fromkeys(run.summary["arm"] for run in self.runs))

    def of(self, arm: str) -> list[Run]:
        """Return the arm's runs, in the order of their seeds; empty where there are none."""
        return [run for run in self.runs if run.summary["arm"] == arm]


def table_rows(runs: Sequence[Run]) -> list[Row]:
    """Return one row for each arm of each group.

    Raises:
        InputError: runs that cannot be told apart, as in ``grouped``.
    """
    return [row for group in grouped(runs) for row in group_rows(group)]


def grouped(runs: Sequence[Run]) -> list[Group]:
    """Split runs into groups of one network and data set, in the order given.

    Where these hold runs of unlike settings (two comparisons of the same network, say), they are
    split by their titles too.

    Raises:
        InputError: runs of one title have unlike settings, or the same arm and seed.
    """
    groups = []
    for (network, dataset), same in _split(runs, _names).items():
        label = f"{network} on {dataset}"
        if _clash(same) is None:
            groups.append(_group(label, same))
            continue
        for title, titled in _split(same, lambda run: run.title).items():
            clash = _clash(titled)
            if clash is not None:
                raise InputError(
                    f"expected comparable runs of {label} in {title!r}, got {clash}: "
                    f"report them apart"
                )
            groups.append(_group(f"{label}, {title}", titled))
    return groups


def group_rows(group: Group) -> list[Row]:
    """Return one row for each arm of the group."""
    return [_row(group, arm) for arm in group.arms]


def paired_difference(group: Group, arm: str, other: str, key: str) -> Difference | None:
    """Return how much an arm's value lies above another arm's, over the seeds that both have.

    Args:
        group: the runs.
        arm, other: names of the arms.
        key: a number in ``summary.json``, such as ``accuracy_last``.

    Returns:
        The mean difference with its 95 % Student interval, n - 1 degrees of freedom for n pairs;
        None without a pair.
    """
    pairs = _pairs(group, arm, other)
    if not pairs:
        return None
    differences = [run.summary[key] - base.summary[key] for run, base in pairs]
    mean = statistics.fmean(differences)
    if len(pairs) == 1:
        return Difference(mean, None, 1)
    error = statistics.stdev(differences) / math.sqrt(len(pairs))
    quantile = float(stdtrit(len(pairs) - 1, 0.975))
    return Difference(mean, quantile * error, len(pairs))


def saved_in_epochs(summary: dict[str, Any]) -> float | None:
    """Return the share of training time that a run's pruned epochs saved.

    Only from medians within the run: with P pruned and F full epochs,
    ``1 - (F * median_full + P * median_pruned) / ((F + P) * median_full)``. A machine that other
    work slows down for a while changes the total time, but hardly this. None where no epoch, or
    every epoch, is pruned.
    """
    full, pruned = summary["median_full_epoch_seconds"], summary["median_pruned_epoch_seconds"]
    if not full or pruned is None:
        return None
    share: float = summary["pruned_epochs"] / summary["epochs"] * (1 - pruned / full)
    return share


def _row(group: Group, arm: str) -> Row:
    runs = group.of(arm)
    pairs = [] if arm == BASELINE else _pairs(group, arm, BASELINE)
    first = runs[0].summary
    in_epochs = [saved for run in runs if (saved := saved_in_epochs(run.summary)) is not None]
    if arm == BASELINE or not group.of(BASELINE):
        skipped = [run.summary["skipped_share"] for run in runs]
    else:
        skipped = _saved(pairs, "samples_trained")
    return Row(
        group=group.label,
        network=first["network"],
        dataset=first["dataset"],
        evaluated_on=first["evaluated_on"],
        arm=arm,
        seeds=len(runs),
        seconds_train=_mean_of(runs, "seconds_train"),
        time_saved=_mean(_saved(pairs, "seconds_train")),
        saved_in_epochs=_mean(in_epochs),
        seconds_bookkeeping=_mean_of(runs, "seconds_bookkeeping"),
        samples_trained=_mean_of(runs, "samples_trained"),
        steps=_mean_of(runs, "steps"),
        skipped=_mean(skipped),
        accuracy_last=_mean_of(runs, "accuracy_last"),
        last_difference=_to_baseline(group, arm, "accuracy_last"),
        accuracy_best3=_mean_of(runs, "accuracy_best3"),
        best3_difference=_to_baseline(group, arm, "accuracy_best3"),
    )


def _to_baseline(group: Group, arm: str, key: str) -> Difference | None:
    return None if arm == BASELINE else paired_difference(group, arm, BASELINE, key)


def _pairs(group: Group, arm: str, other: str) -> list[tuple[Run, Run]]:
    by_seed = {run.summary["seed"]: run for run in group.of(other)}
    return [
        (run, by_seed[run.summary["seed"]])
        for run in group.of(arm)
        if run.summary["seed"] in by_seed
    ]


def _saved(pairs: Sequence[tuple[Run, Run]], key: str) -> list[float]:
    return [1 - run.summary[key] / base.summary[key] for run, base in pairs]


def _mean_of(runs: Sequence[Run], key: str) -> float:
    return statistics.fmean(run.summary[key] for run in runs)


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _split(runs: Sequence[Run], key: Callable[[Run], _Key]) -> dict[_Key, list[Run]]:
    parts: dict[_Key, list[Run]] = {}
    for run in runs:
        parts.setdefault(key(run), []).append(run)
    return parts


def _group(label: str, runs: Sequence[Run]) -> Group:
    return Group(label, tuple(sorted(runs, key=_position)))


def _position(run: Run) -> tuple[int, str, int]:
    arm = run.summary["arm"]
    return (ARMS.index(arm) if arm in ARMS else len(ARMS), arm, run.summary["seed"])


def _names(run: Run) -> tuple[str, str]:
    return run.summary["network"], run.summary["dataset"]


def _clash(runs: Sequence[Run]) -> str | None:
    """Say why the runs cannot stand in one table; None where they can."""
    seeds = Counter((run.summary["arm"], run.summary["seed"]) for run in runs)
    (arm, seed), times = seeds.most_common(1)[0]
    if times > 1:
        return f"{times} runs of arm {arm} with seed {seed}"
    for run, other in itertools.pairwise(sorted(runs, key=_position)):
        arms = {run.summary["arm"], other.summary["arm"]}
        if _settings(run, arms) != _settings(other, arms):
            return f"unlike settings in {run.path.name} and {other.path.name}"
    return None


def _settings(run: Run, arms: set[str]) -> str:
    """What runs must agree in: within one arm all but the seed, between two arms the training."""
    one_arm = len(arms) == 1
    left_out = {
        "data": _PLACES,
        "training": _LENGTHS if not one_arm and "fewer-epochs" in arms else (),
    }
    sections = {
        name: {key: value for key, value in values.items() if key not in left_out.get(name, ())}
        for name, values in run.recipe.items()
        if name != "run" and (one_arm or name != "pruning")
    }
    return json.dumps([sections, run.summary["train_samples"]], sort_keys=True)
