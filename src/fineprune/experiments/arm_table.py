"""Statistics of comparisons: one row per arm, with differences that are paired by seed.

Runs with the same seed have the same initial weights and sample orders, so arms are compared seed
by seed. All values are fractions and seconds, as in ``summary.json``.
"""

import contextlib
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from scipy.special import stdtr, stdtrit

from fineprune.errors import InputError
from fineprune.runs.files import RECIPE
from fineprune.runs.run import Run, read_sections, split_by, told_apart
from fineprune.runs.summary import LEFT_OUT, Summary, shortened

# What the others are compared with, and what trains like it but keeps evidence on the labels. They
# are those of ``controls``, whose import takes longer.
BASELINE, WATCHED = "full", "watched"

# Two arms are equivalent if their accuracies differ by less than this fraction (0.4 percentage
# points), which is about the largest loss of accuracy in the paper's tables.
MARGIN = 0.004

# The level of the equivalence test. It corresponds to the 90 % interval.
_LEVEL = 0.05

# Accuracies on few samples have a coarse resolution, so all differences can be equal by chance.
# An interval below this width therefore shows nothing about the variation between seeds.
_NO_WIDTH = 1e-9

# A number of a run, which is compared between arms.
Value = Callable[[Summary], float]


@dataclass(frozen=True)
class Difference:
    """The difference between two arms, paired by seed.

    Attributes:
        mean: The mean difference over the pairs. For accuracies, 0.01 is one percentage point.
        half_width: Half the width of its 95 % Student confidence interval; None with one pair.
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

    def points(self) -> str:
        """Return the difference of fractions in points, with half its interval if any."""
        half = "" if self.half_width is None else f"\N{NO-BREAK SPACE}±{100 * self.half_width:.2f}"
        return f"{100 * self.mean:+.2f}{half}"

    def equivalence(self, margin: float) -> float | None:
        """Return the p-value of two one-sided t-tests (TOST, Schuirmann 1987).

        The null hypothesis is that the true difference is at least as large as the margin, a
        fraction such as 0.004. The p-value is below 0.05 if and only if the 90 % interval of the
        mean is inside the margin. None if the pairs show no variation.
        """
        if self.half_width is None or not 2 * self.half_width >= _NO_WIDTH:  # It may be NaN.
            return None
        freedom = self.pairs - 1
        error = self.half_width / float(stdtrit(freedom, 0.975))
        # With a negative argument, stdtr is also exact if the p-value is very small.
        return max(float(stdtr(freedom, (sign * self.mean - margin) / error)) for sign in (1, -1))

    def verdict(self, margin: float) -> str:
        """Return in a word or two what the seeds show.

        Returns:
            "equal" if the test of ``equivalence`` rejects at the level 0.05; otherwise "better" or
            "worse" if the 95 % interval excludes zero, "open" if it does not, and "no claim" if the
            pairs show no variation, as one pair does.
        """
        p_value = self.equivalence(margin)
        if p_value is None or self.low is None or self.high is None:
            return "no claim"
        if p_value < _LEVEL:
            return "equal"
        return "open" if self.low <= 0 <= self.high else "better" if self.low > 0 else "worse"


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
    def own_labels(self) -> bool:
        """Whether all samples are trained with the labels of the data set, as far as is known."""
        data = self.runs[0].recipe.get("data", {})
        return not any(data.get(name) for name in ("label_noise", "labels", "without"))

    @property
    def arms(self) -> list[str]:
        """The arms, in the order of the table."""
        return list(dict.fromkeys(run.summary.arm for run in self.runs))

    def of(self, arm: str) -> list[Run]:
        """Return the runs of an arm, in the order of their seeds; an empty list if it has none."""
        return [run for run in self.runs if run.summary.arm == arm]

    @property
    def method(self) -> str | None:
        """The arm that is compared with the others: the policy of the comparison's recipe.

        If this is no arm, or ``full``, it is the first other arm than ``full``; None without one.
        """
        folder, recipe = self.runs[0].comparison, {}
        if folder is not None:
            with contextlib.suppress(InputError):  # It is damaged, but a report needs only runs.
                recipe = read_sections(folder / RECIPE)
        others = [arm for arm in self.arms if arm not in (BASELINE, WATCHED)]
        policy = recipe.get("pruning", {}).get("policy")
        return str(policy) if policy in others else next(iter(others), None)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One arm of a comparison, averaged over its seeds. None marks a value that is not available.

    Attributes:
        group: The group that the arm belongs to.
        arm: The name of the arm.
        seeds: The number of runs.
        rate_factor: The multiple of the recipe's learning rate that was chosen for the arm.
        accuracy_last: The accuracy after the last epoch, as a fraction.
        difference: The accuracy of ``Group.method`` minus that of this arm; None for the method.
        verdict: What the seeds show about the difference; see ``Difference.verdict``.
        cost, time: The sample-steps and the training time of the method, divided by those of this
            arm, paired by seed.
        samples_trained: The number of sample-steps: of samples, summed over the epochs.
        skipped: The fraction of the sample-steps of ``full`` that the arm does not train.
        steps: The number of optimizer steps.
        seconds_train: The wall-clock time of the training in seconds, with the bookkeeping and
            without the evaluation.
        predicted_saving: The fraction that the paper's formulas predict; see ``Formulas``.
        time_saved: The fraction of the training time of ``full`` that is saved, paired by seed.
        overhead: The seconds of bookkeeping beyond those of ``full``, which orders its samples and
            takes the mean of their losses, too; paired by seed. That of ``watched`` is the cost of
            evidence on labels. None for ``full``.
        samples_of_both: The number of sample-steps of a second training, which leaves out suspects,
            and of ``watched``, which found them; None for any other arm.
    """

    group: Group
    arm: str
    seeds: int
    rate_factor: float | None
    accuracy_last: float
    difference: Difference | None
    verdict: str | None
    cost: float | None
    time: float | None
    samples_trained: float
    skipped: float | None
    steps: float
    seconds_train: float
    predicted_saving: float | None
    time_saved: Difference | None
    overhead: float | None
    samples_of_both: float | None


def grouped(runs: Sequence[Run]) -> list[Group]:
    """Split runs into groups that can be compared: by comparison, network and dataset.

    Raises:
        InputError: Runs of a group have an arm and a seed in common, were trained on other data, or
            belong to no comparison and differ in other settings than their policy and seed.
    """

    def place(run: Run) -> tuple[object, ...]:
        return run.comparison, run.summary.network, run.summary.dataset

    groups = list(split_by(place, runs).values())
    labels = [f"{s.network} on {s.dataset}" for s in (members[0].summary for members in groups)]
    labels = told_apart(labels, [f", {members[0].title}" for members in groups])
    labels = told_apart(labels, [f", {members[0].comparison}" for members in groups])
    for label, members in zip(labels, groups, strict=True):
        conflict = _conflict(members)
        if conflict is not None:
            raise InputError(
                f"expected comparable runs of {label}, got {conflict}: report them separately"
            )
    return [
        Group(label, tuple(_ordered(members)))
        for label, members in zip(labels, groups, strict=True)
    ]


def group_rows(group: Group, margin: float = MARGIN) -> list[Row]:
    """Return one row for each arm of the group."""
    method = group.method  # It reads a file.
    return [_row(group, arm, method, margin) for arm in group.arms]


def paired_runs(group: Group, arm: str, other: str) -> list[tuple[Run, Run]]:
    """Return the runs of two arms with each seed that both have."""
    by_seed = {run.summary.seed: run for run in group.of(other)}
    return [
        (run, by_seed[run.summary.seed]) for run in group.of(arm) if run.summary.seed in by_seed
    ]


def paired_difference(pairs: Sequence[tuple[Run, Run]], of: Value) -> Difference | None:
    """Return the difference between the values of two arms; None without a common seed.

    Args:
        pairs: The runs of both arms, from ``paired_runs``; the values of the second are subtracted.
        of: Returns the value of a run from its summary, such as ``accuracy_last``.
    """
    differences = [of(run.summary) - of(base.summary) for run, base in pairs]
    return mean_difference(differences) if differences else None


def mean_difference(differences: Sequence[float]) -> Difference:
    """Return the mean of n paired differences, with its Student interval (n - 1 degrees)."""
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


@dataclass(frozen=True)
class Formulas:
    """Formulas 2 to 7 of [P] for a run, with times from full training with the same seed.

    Attributes:
        step: T, the seconds of a step: the median over the epochs of full training.
        steps, steps_full: The number of steps of the run (formula 5) and of full training.
        overhead: The seconds of the method's own bookkeeping in all epochs: n_prune times t0.
    """

    step: float
    steps: int
    steps_full: int
    overhead: float

    @property
    def regular(self) -> float:
        """The time of full training, in seconds (formula 2)."""
        return self.steps_full * self.step

    @property
    def pruned(self) -> float:
        """The time of the run, in seconds (formula 6)."""
        return self.steps * self.step + self.overhead

    @property
    def saving(self) -> float:
        """The fraction of the time that is saved (formula 7 divided by formula 2)."""
        return 1 - self.pruned / self.regular


def formulas(run: Run, full: Run) -> Formulas:
    """Return what the paper's formulas predict for a run, given full training with its seed."""
    step = statistics.median(line["seconds"] / line["steps"] for line in full.metrics)
    return Formulas(step, run.summary.steps, full.summary.steps, _overhead(run, full))


def _row(group: Group, arm: str, method: str | None, margin: float) -> Row:
    runs = group.of(arm)

    def mean(of: Value) -> float:
        return statistics.fmean(of(run.summary) for run in runs)

    with_full = [] if arm == BASELINE else paired_runs(group, arm, BASELINE)
    against = [] if method in (None, arm) else paired_runs(group, str(method), arm)
    difference = paired_difference(against, lambda summary: summary.accuracy_last)
    skipped = [1 - ratio for ratio in _ratios(with_full, _samples)]
    if arm == BASELINE or not group.of(BASELINE):
        skipped = [run.summary.skipped_share for run in runs]
    saved = [1 - ratio for ratio in _ratios(with_full, _seconds)]
    second = [
        _samples(run.summary) + _samples(first.summary)
        for run, first in paired_runs(group, arm, WATCHED)
        if run.recipe.get("data", {}).get("without")
    ]
    return Row(
        group=group,
        arm=arm,
        seeds=len(runs),
        rate_factor=runs[0].rate_factor,
        accuracy_last=mean(lambda summary: summary.accuracy_last),
        difference=difference,
        verdict=None if difference is None else difference.verdict(margin),
        cost=mean_known(_ratios(against, _samples)),
        time=mean_known(_ratios(against, _seconds)),
        samples_trained=mean(_samples),
        skipped=mean_known(skipped),
        steps=mean(lambda summary: summary.steps),
        seconds_train=mean(_seconds),
        predicted_saving=mean_known(formulas(*pair).saving for pair in with_full),
        time_saved=mean_difference(saved) if saved else None,
        overhead=mean_known(_overhead(*pair) for pair in with_full),
        samples_of_both=mean_known(second),
    )


def _samples(summary: Summary) -> float:
    return summary.samples_trained


def _seconds(summary: Summary) -> float:
    return summary.seconds_train


def _overhead(run: Run, full: Run) -> float:
    return run.summary.seconds_bookkeeping - full.summary.seconds_bookkeeping


def _ratios(pairs: Sequence[tuple[Run, Run]], of: Value) -> list[float]:
    return [of(run.summary) / of(base.summary) for run, base in pairs]


def _ordered(runs: Sequence[Run]) -> list[Run]:
    """Return runs by arm, full training first and the others as given, and by seed."""
    arms = list(dict.fromkeys(run.summary.arm for run in runs))
    places = {arm: place for place, arm in enumerate(sorted(arms, key=lambda a: a != BASELINE))}
    return sorted(runs, key=lambda run: (places[run.summary.arm], run.summary.seed))


def _conflict(runs: Sequence[Run]) -> str | None:
    """Return the reason why the runs cannot be compared in one table; None if they can."""
    seeds = Counter((run.summary.arm, run.summary.seed) for run in runs)
    (arm, seed), times = seeds.most_common(1)[0]
    if times > 1:
        return f"{times} runs of arm {arm} with seed {seed}"
    first = _settings(runs[0])
    for run in runs[1:]:
        settings = _settings(run)
        differing = [
            f"{name} is {first.get(name)} and {settings.get(name)}"
            for name in sorted({*first, *settings})
            if first.get(name) != settings.get(name)
        ]
        if differing:
            return f"{runs[0].path.name} and {run.path.name}, in which {'; '.join(differing)}"
    return None


def _settings(run: Run) -> dict[str, Any]:
    """Return what comparable runs have in common, by its name.

    The arms of a comparison may change any setting, and say how in its file: only what they read
    must be the same, besides what a second training leaves out.
    """
    digests = run.summary.digests
    settings = {f"sha256.{name}": shortened(of) for name, of in digests.items() if name != LEFT_OUT}
    settings["evaluated_on"] = run.summary.evaluated_on
    if run.comparison is not None:
        return settings
    for section, values in run.recipe.items():
        if section not in ("run", "pruning"):
            settings |= {f"{section}.{name}": value for name, value in values.items()}
    return {**settings, "data.train_samples": run.summary.train_samples}
