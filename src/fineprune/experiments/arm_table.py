"""Statistics of comparisons: one row per arm, with differences that are paired by seed.

Runs with the same seed have the same initial weights and sample orders, so arms are compared seed
by seed. The confidence interval over the seeds shows how precise the mean difference is. All values
are fractions and seconds, as in ``summary.json``; the report converts fractions to percentages.
"""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from scipy.special import stdtr, stdtrit

from fineprune.errors import InputError
from fineprune.experiments.controls import (
    ALL_ARMS,
    COOLDOWN,
    FIRST,
    MATCHED,
    SECOND,
    changed_settings,
)
from fineprune.runs.run import Run, split_by
from fineprune.runs.summary import LEFT_OUT, Summary, shortened
from fineprune.training.policies import follows_schedule
from fineprune.training.recipe import differences, make_recipe, method_of

BASELINE = "full"

# Two arms are equivalent if their accuracies differ by less than this fraction (0.4 percentage
# points), which is about the largest loss of accuracy in the paper's tables.
MARGIN = 0.004

# Accuracies on few samples have a coarse resolution, so all differences can be equal by chance.
# An interval below this width therefore shows nothing about the variation between seeds.
_NO_WIDTH = 1e-9

# A number of a run, which is compared between arms.
Value = Callable[[Summary], float]

# The settings in which the control ``matched`` differs from seed to seed, because it repeats the
# numbers of the run with the same seed.
_REPEATED = ("numbers", "mean_weights")


@dataclass(frozen=True)
class Difference:
    """The difference between two arms, paired by seed.

    Attributes:
        mean: The mean difference over the pairs. For accuracies, 0.01 is one percentage point.
        half_width: Half the width of the 95 % Student confidence interval of the mean; None with
            one pair.
        pairs: The number of seeds that both arms have.
    """

    mean: float
    half_width: float | None
    pairs: int

    @property
    def low(self) -> float | None:
        """The lower end of the 95 % interval; None with one pair."""
        return None if self.half_width is None else self.mean - self.half_width

    @property
    def high(self) -> float | None:
        """The upper end of the 95 % interval; None with one pair."""
        return None if self.half_width is None else self.mean + self.half_width

    @property
    def negated(self) -> "Difference":
        """The difference of the other arm from this one."""
        return Difference(-self.mean, self.half_width, self.pairs)

    def equivalence(self, margin: float) -> float | None:
        """Return the p-value of two one-sided t-tests (TOST, Schuirmann 1987).

        The null hypothesis is that the true difference is at least as large as the margin. The
        p-value is below 0.05 if and only if the 90 % interval of the mean is inside the margin.

        Args:
            margin: The margin, as a fraction above 0, such as 0.004 for 0.4 percentage points.

        Returns:
            The larger of the two p-values; None if the pairs show no variation.
        """
        if self.half_width is None or not 2 * self.half_width >= _NO_WIDTH:  # It may be NaN.
            return None
        freedom = self.pairs - 1
        error = self.half_width / float(stdtrit(freedom, 0.975))
        # With a negative argument, stdtr is also exact if the p-value is very small.
        return max(float(stdtr(freedom, (sign * self.mean - margin) / error)) for sign in (1, -1))


@dataclass(frozen=True, eq=False)
class Group:
    """Runs that can be compared with each other.

    Attributes:
        label: The name of the group, such as ``lenet on digits``.
        runs: The runs, in the order of the arms and, within each arm, of the seeds.
    """

    label: str
    runs: tuple[Run, ...]

    @property
    def first(self) -> Summary:
        """The summary of the first run, whose network, data and evaluation are those of all."""
        return self.runs[0].summary

    @property
    def arms(self) -> list[str]:
        """The arms, in the order of the table."""
        return list(dict.fromkeys(run.summary.arm for run in self.runs))

    def of(self, arm: str) -> list[Run]:
        """Return the runs of an arm, in the order of their seeds; an empty list if it has none."""
        return [run for run in self.runs if run.summary.arm == arm]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One arm of a comparison, averaged over its seeds. None marks a value that is not available.

    Attributes:
        group: The group that the arm belongs to.
        arm: The name of the arm.
        seeds: The number of runs.
        rate_factor: The multiple of the recipe's learning rate that was chosen for the arm on
            held-out samples; None if none was chosen.
        seconds_train: The wall-clock time of the training in seconds, including the bookkeeping and
            excluding the evaluation.
        time_saved: The fraction of the training time of ``full`` that is saved, paired by seed.
        saved_in_epochs: The fraction of the training time that is saved, computed from median
            times of each run's epochs; see ``saved_in_epochs``.
        seconds_bookkeeping: The overhead of one run in seconds: the time for selecting samples,
            recording losses and updating counts.
        samples_trained: The number of sample-steps, that is, of samples summed over the epochs.
            Each of them is one backward pass of one sample.
        steps: The number of optimizer steps.
        seconds_of_both: The training time in seconds of a second training and of the first one,
            whose suspects it leaves out; None for any other arm.
        samples_of_both: The number of sample-steps of both.
        skipped: The fraction of the sample-steps of ``full`` that the arm does not train.
        accuracy_last: The accuracy after the last epoch, as a fraction. This is the main result.
        last_difference: The difference ``accuracy_last`` minus that of ``full``.
        equivalence: The p-value of the test that ``last_difference`` is within the margin; see
            ``Difference.equivalence``.
        accuracy_best3: The mean of the three best evaluations of a run, which is the accuracy that
            the paper reports. It is too high, because it selects epochs on the evaluated set.
        best3_difference: The difference ``accuracy_best3`` minus that of ``full``.
        reaching: The fraction of the seeds of both arms in which the run reaches the last-epoch
            accuracy of the full run with the same seed in any of its evaluations.
        seconds_to_full: The training time in seconds until the first such evaluation; None unless
            it is reached with every seed, because a mean over some of them would be too low.
        samples_to_full: The number of sample-steps until then.
    """

    group: Group
    arm: str
    seeds: int | None = None
    rate_factor: float | None = None
    seconds_train: float | None = None
    time_saved: float | None = None
    saved_in_epochs: float | None = None
    seconds_bookkeeping: float | None = None
    samples_trained: float | None = None
    steps: float | None = None
    seconds_of_both: float | None = None
    samples_of_both: float | None = None
    skipped: float | None = None
    accuracy_last: float | None = None
    last_difference: Difference | None = None
    equivalence: float | None = None
    accuracy_best3: float | None = None
    best3_difference: Difference | None = None
    reaching: float | None = None
    seconds_to_full: float | None = None
    samples_to_full: float | None = None


def grouped(runs: Sequence[Run]) -> list[Group]:
    """Split runs into groups with the same network and dataset, in the given order.

    If such a group contains runs with different settings, for example two comparisons of the same
    network, it is also split by comparison, and by the titles of runs that belong to none.
    """
    groups = []
    labelled = split_by(lambda run: f"{run.summary.network} on {run.summary.dataset}", runs)
    for label, same_data in labelled.items():
        if _conflict(same_data) is None:
            groups.append(_group(label, same_data))
            continue
        places = split_by(lambda run: run.comparison or run.title, same_data)
        titles = [together[0].title for together in places.values()]
        for place, together in places.items():
            title = together[0].title
            conflict = _conflict(together)
            if conflict is not None:
                raise InputError(
                    f"expected comparable runs of {label} in {title!r}, got {conflict}: "
                    f"report them separately"
                )
            named = title if titles.count(title) == 1 else str(place)
            groups.append(_group(f"{label}, {named}", together))
    return groups


def group_rows(group: Group, margin: float = MARGIN) -> list[Row]:
    """Return one row for each arm of the group."""
    return [_row(group, arm, margin) for arm in group.arms]


def paired_difference(pairs: Sequence[tuple[Run, Run]], of: Value) -> Difference | None:
    """Return the difference between the values of two arms.

    Args:
        pairs: The runs of both arms, from ``paired_runs``; the values of the second are subtracted.
        of: Returns the value of a run from its summary, such as ``accuracy_last``.

    Returns:
        The mean difference with its 95 % Student confidence interval, which has n - 1 degrees of
        freedom for n pairs; None if the arms have no seed in common.
    """
    differences = [of(run.summary) - of(base.summary) for run, base in pairs]
    return mean_difference(differences) if differences else None


def time_difference(group: Group, arm: str) -> Difference | None:
    """Return the fraction of the training time of ``full`` that an arm saved, paired by seed.

    It is None if the arm has no seed in common with ``full``.
    """
    saved = _saved(paired_runs(group, arm, BASELINE), lambda summary: summary.seconds_train)
    return mean_difference(saved) if saved else None


def mean_difference(differences: Sequence[float]) -> Difference:
    """Return the mean of one paired difference or more, with its 95 % Student interval."""
    mean = statistics.fmean(differences)
    if len(differences) == 1:
        return Difference(mean, None, 1)
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    quantile = float(stdtrit(len(differences) - 1, 0.975))
    return Difference(mean, quantile * error, len(differences))


def mean_known(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def saved_in_epochs(run: Run) -> float | None:
    """Return the fraction of the training time that the pruned epochs of a run saved.

    The fraction is computed from median times of this run only: a full epoch takes the median time
    of the full epochs, and a pruned epoch its number of samples times the median time per sample of
    the pruned epochs, which may differ much in length. If other work slows the machine down for
    some time, the total time changes, but this fraction does not change much.

    Returns:
        The fraction; None if no epoch is pruned or if every epoch is pruned.
    """
    full: list[float] = [line["seconds"] for line in run.metrics if not line["pruned"]]
    pruned = [line for line in run.metrics if line["pruned"] and line["samples"]]
    if not full or not pruned or not statistics.median(full):
        return None
    per_sample: float = statistics.median(line["seconds"] / line["samples"] for line in pruned)
    pruned_seconds: float = per_sample * sum(line["samples"] for line in pruned)
    number = len(run.metrics)
    return (number - len(full) - pruned_seconds / statistics.median(full)) / number


def cost_to_reach(run: Run, accuracy: float) -> tuple[float, int] | None:
    """Return what a run costs until its first evaluation with at least this accuracy.

    Returns:
        The training time in seconds and the number of sample-steps, both up to the end of the epoch
        that was evaluated; None if no evaluation reaches the accuracy.
    """
    seconds, samples = 0.0, 0
    for line in run.metrics:
        seconds += line["seconds"]
        samples += line["samples"]
        evaluated = line.get(f"{run.summary.evaluated_on}_accuracy")
        if evaluated is not None and evaluated >= accuracy:
            return seconds, samples
    return None


def boundaries_of(run: Run) -> tuple[int, ...]:
    """Return the epochs, from 1, at whose end the run's schedule clears the counts.

    The tuple is empty if the run's policy has no schedule.
    """
    pruning = run.recipe.get("pruning", {})
    # Other policies ignore the schedule of a recipe.
    has_windows = {"window", "windows_per_interval"} & pruning.keys()
    if not follows_schedule(pruning.get("policy", "")) or not has_windows:
        return ()
    return make_recipe(run.recipe).schedule().boundaries  # type: ignore[union-attr]


def _row(group: Group, arm: str, margin: float) -> Row:
    runs = group.of(arm)
    with_full = paired_runs(group, arm, BASELINE)
    pairs = [] if arm == BASELINE else with_full
    costs = [cost_to_reach(run, base.summary.accuracy_last) for run, base in with_full]
    reached = [cost for cost in costs if cost is not None]
    reached_always = len(reached) == len(costs)
    last_difference = paired_difference(pairs, lambda summary: summary.accuracy_last)
    if arm == BASELINE or not group.of(BASELINE):
        skipped = [run.summary.skipped_share for run in runs]
    else:
        skipped = _saved(pairs, lambda summary: summary.samples_trained)
    both = paired_runs(group, arm, FIRST) if arm == SECOND else []
    return Row(
        group=group,
        arm=arm,
        seeds=len(runs),
        rate_factor=runs[0].rate_factor,
        seconds_train=_mean_of(runs, lambda summary: summary.seconds_train),
        time_saved=mean_known(_saved(pairs, lambda summary: summary.seconds_train)),
        saved_in_epochs=mean_known(saved_in_epochs(run) for run in runs),
        seconds_bookkeeping=_mean_of(runs, lambda summary: summary.seconds_bookkeeping),
        samples_trained=_mean_of(runs, lambda summary: summary.samples_trained),
        steps=_mean_of(runs, lambda summary: summary.steps),
        seconds_of_both=_sum_of(both, lambda summary: summary.seconds_train),
        samples_of_both=_sum_of(both, lambda summary: summary.samples_trained),
        skipped=mean_known(skipped),
        accuracy_last=_mean_of(runs, lambda summary: summary.accuracy_last),
        last_difference=last_difference,
        equivalence=None if last_difference is None else last_difference.equivalence(margin),
        accuracy_best3=_mean_of(runs, lambda summary: summary.accuracy_best3),
        best3_difference=paired_difference(pairs, lambda summary: summary.accuracy_best3),
        reaching=len(reached) / len(costs) if costs else None,
        seconds_to_full=mean_known([seconds for seconds, _ in reached]) if reached_always else None,
        samples_to_full=mean_known([samples for _, samples in reached]) if reached_always else None,
    )


def paired_runs(group: Group, arm: str, other: str) -> list[tuple[Run, Run]]:
    """Return the runs of two arms with each seed that both have."""
    by_seed = {run.summary.seed: run for run in group.of(other)}
    return [
        (run, by_seed[run.summary.seed]) for run in group.of(arm) if run.summary.seed in by_seed
    ]


def _saved(pairs: Sequence[tuple[Run, Run]], of: Value) -> list[float]:
    return [1 - of(run.summary) / of(base.summary) for run, base in pairs]


def _sum_of(pairs: Sequence[tuple[Run, Run]], of: Value) -> float | None:
    return mean_known(of(run.summary) + of(first.summary) for run, first in pairs)


def _mean_of(runs: Sequence[Run], of: Value) -> float:
    return statistics.fmean(of(run.summary) for run in runs)


def _group(label: str, runs: Sequence[Run]) -> Group:
    return Group(label, tuple(sorted(runs, key=_position)))


def _position(run: Run) -> tuple[int, str, int]:
    """Return the sort key of a run: known arms in their order, then other arms by name.

    The trainings of a curve are sorted by their epochs.
    """
    arm = run.summary.arm
    name = f"{COOLDOWN}{run.summary.epochs:09}" if arm.startswith(COOLDOWN) else arm
    return (ALL_ARMS.index(arm) if arm in ALL_ARMS else len(ALL_ARMS), name, run.summary.seed)


def _conflict(runs: Sequence[Run]) -> str | None:
    """Return the reason why the runs cannot be compared in one table; None if they can."""
    seeds = Counter((run.summary.arm, run.summary.seed) for run in runs)
    (arm, seed), times = seeds.most_common(1)[0]
    if times > 1:
        return f"{times} runs of arm {arm} with seed {seed}"
    by_arm = split_by(lambda run: run.summary.arm, sorted(runs, key=_position))
    pairs = [pair for same_arm in by_arm.values() for pair in itertools.pairwise(same_arm)]
    # Two arms may both be comparable with a third one that lacks a setting in which they differ.
    pairs += itertools.combinations((same_arm[0] for same_arm in by_arm.values()), 2)
    for run, other in pairs:
        arms = {run.summary.arm, other.summary.arm}
        differing = differences(_settings(run, arms), _settings(other, arms))
        if differing:
            return f"{run.path.name} and {other.path.name}, in which {'; '.join(differing)}"
    return None


def _settings(run: Run, arms: set[str]) -> dict[str, dict[str, Any]]:
    """Return the settings and digests that comparable runs of the given arms have in common.

    Runs of the same arm may differ in their seeds only, and those of ``matched`` in their numbers.
    Runs of two arms may also differ in the ``pruning`` section, in a learning rate that was chosen
    for each of them, and the arms that train fewer epochs in what this changes. A second training
    leaves out what the run of its own seed suspects.
    """
    sections = method_of(run.recipe)
    del sections["run"]  # Seeds are compared as those of pairs.
    excluded: dict[str, Iterable[str]] = {}
    if arms == {MATCHED}:
        excluded["pruning"] = _REPEATED
    elif len(arms) > 1:
        sections.pop("pruning", None)
        if run.rate_factor is not None:
            # The recipe's rate, without the last digits, which are those of a rounded quotient.
            base = sections["training"]["lr"] / run.rate_factor
            sections["training"]["lr"] = f"{base:g}, tuned"
        excluded["training"] = {name for arm in arms for name in changed_settings(arm)}
    for section, keys in excluded.items():
        for key in keys:
            sections.get(section, {}).pop(key, None)
    sections.setdefault("data", {})["train_samples"] = run.summary.train_samples
    sections["sha256"] = {name: shortened(digest) for name, digest in run.summary.digests.items()}
    if SECOND in arms:
        del sections["data"]["train_samples"], sections["sha256"][LEFT_OUT]
    return sections
