"""The verdict on a comparison, in sentences that claim no more than the numbers support."""

import contextlib
from collections.abc import Iterator, Sequence

from fineprune.errors import InputError
from fineprune.experiments.arm_table import (
    BASELINE,
    MARGIN,
    Difference,
    Group,
    Row,
    paired_difference,
    paired_runs,
    time_difference,
)
from fineprune.experiments.controls import MATCHED, METHODS, SECOND, is_shorter
from fineprune.report.facts import comparison_of, listed, same_machine
from fineprune.report.table import percent, whole
from fineprune.report.table import points as points_of
from fineprune.runs.files import RECIPE
from fineprune.runs.run import Run, read_sections, split_by

# On CIFAR-10, runs that differ only in their seed differ by about this many percentage points.
CHANCE_POINTS = 0.5

# The headline gives the time saved if half the 95 % interval is at most this fraction.
_PRECISE = 0.05

_EQUAL = "about the same cost"

# The level of the equivalence test. It corresponds to the 90 % interval.
_LEVEL = 0.05


def verdict(group: Group, rows: list[Row], margin: float = MARGIN) -> list[str]:
    """Return sentences on the cost and the accuracy of the arms.

    The method is compared with full training and with the other arms. Without a method, each arm is
    compared with full training. An arm is called better or worse only if the 95 % interval of the
    difference over the seeds excludes zero, and equivalent only if the 90 % interval is inside the
    margin.
    """
    by_arm = {row.arm: row for row in rows}
    compared = [row for row in rows if row.last_difference is not None]
    if not compared:
        return [_alone(row) for row in rows]
    name = method_of(group)
    if name is None or by_arm[name].last_difference is None:
        return [_against_full(row, margin) for row in compared]
    return [
        _against_full(by_arm[name], margin),
        *(
            _control(group, name, by_arm[arm], difference, margin)
            for arm, difference in _to_others(group, name)
        ),
    ]


def _no_claim(rows: Sequence[Row]) -> str:
    common = " in common" if any((row.seeds or 0) > 1 for row in rows) else ""
    return f"one seed{common} allows no claim on accuracies"


def headline(group: Group, rows: list[Row], margin: float = MARGIN) -> str:
    """Return the verdict in one sentence, which claims no more than the sentences of ``verdict``.

    The method is compared with full training and with every arm that costs about as much or less.
    """
    by_arm = {row.arm: row for row in rows}
    compared = [row for row in rows if row.last_difference]
    if not compared:
        return _alone(rows[0]) if len(rows) == 1 else "No arm has a full run with the same seed."
    name = method_of(group)
    if name is None or by_arm[name].last_difference is None:
        if len(compared) > 1:
            arms = [(r.last_difference.negated, r.arm) for r in compared if r.last_difference]
            if all(difference.pairs == 1 for difference, _ in arms):
                reached = [f"{r.arm} {_percent(r.accuracy_last)}" for r in rows]
                return f"Accuracy: {', '.join(reached)}; {_no_claim(rows)}."
            return f"Full training is {_standings(arms, margin)}."
        name = compared[0].arm
    row = by_arm[name]
    assert row.last_difference is not None
    parts = f"{_capitalized(name)}: {_saving(group, row)}"
    if row.last_difference.pairs == 1:
        full = _percent(by_arm[BASELINE].accuracy_last)
        return (
            f"{parts}, accuracy {_percent(row.accuracy_last)} beside {full} of full training; "
            f"{_no_claim([row, by_arm[BASELINE]])}."
        )
    parts += f", {_beside_full(row.last_difference, margin)}"
    controls = []
    for arm, difference in _to_others(group, name):
        if SECOND in (name, arm):
            continue  # It costs a first training besides its own.
        method, control = paired_runs(group, name, arm)[0]
        cheaper = control.summary.samples_trained < method.summary.samples_trained
        if cheaper or _cost(method, control) == _EQUAL:
            controls.append((difference, _short_name(method, control)))
    return f"{parts}; {_standings(controls, margin) or 'no other arm of this cost was trained'}."


def method_of(group: Group) -> str | None:
    """Return the arm that is compared with the controls; None if there is none.

    It is the policy of the comparison's recipe. Runs that belong to no comparison have no such
    recipe: the first arm out of ``METHODS`` is returned.
    """
    folder, recipe = comparison_of(group.runs), {}
    if folder is not None:
        with contextlib.suppress(InputError):  # It is damaged, but a report needs the runs only.
            recipe = read_sections(folder / RECIPE)
    policy = recipe.get("pruning", {}).get("policy")
    if policy in group.arms and policy != BASELINE:
        return str(policy)
    return next((name for name in METHODS if name in group.arms), None)


def _to_others(group: Group, name: str) -> Iterator[tuple[str, Difference]]:
    """Yield every other arm but full training, and the difference of an arm's accuracy to its."""
    for arm in group.arms:
        if arm in (name, BASELINE):
            continue
        pairs = paired_runs(group, name, arm)
        difference = paired_difference(pairs, lambda summary: summary.accuracy_last)
        if difference is not None:
            yield arm, difference


def _saving(group: Group, row: Row) -> str:
    """Describe the cost relative to full training in a few words.

    It is the time if the seeds show it precisely, and the number of sample-steps otherwise, which
    other work on the machine does not change.
    """
    time = time_difference(group, row.arm)
    share, less, what = row.skipped or 0, "fewer", "sample-steps"
    precise = time is not None and time.half_width is not None and time.half_width <= _PRECISE
    if time is not None and precise and same_machine(group.runs):
        share, less, what = time.mean, "less", "time"
    if row.arm == SECOND:
        what += " than in the first training"
    if round(100 * share) == 0:
        return f"no {less} {what}"
    return f"{abs(100 * share):.0f} % {less if share > 0 else 'more'} {what}"


def _beside_full(difference: Difference, margin: float) -> str:
    """Describe the accuracy relative to full training, with several seeds, in a few words."""
    points = f"{abs(100 * difference.mean):.1f}"
    side = "above" if difference.mean > 0 else "below"
    standing, equivalent = _standing(difference, margin)
    if standing is None:
        return f"{points} points {side} full training in every seed, which allows no claim"
    within = f"within {100 * margin:g} points"
    if standing == "not distinguishable":
        if equivalent:
            return f"equivalent to full training {within}"
        return f"not distinguishable from full training ({points_of(difference)} points)"
    text = f"{points} ± {100 * (difference.half_width or 0):.1f} points {side} full training"
    return f"{text}, but equivalent {within}" if equivalent else text


def _standings(others: Sequence[tuple[Difference, str]], margin: float) -> str:
    """Say how a method stands beside other arms, those that are better than it first.

    Args:
        others: The difference of the method from each arm, and the name of the arm.
        margin: The margin of equivalence, as a fraction.
    """
    within = f"within {100 * margin:g} points"
    phrases = {
        ("worse", False): "worse than {}",
        ("worse", True): f"worse than {{}} but equivalent {within}",
        ("not distinguishable", False): "not distinguishable from {}",
        ("not distinguishable", True): f"equivalent to {{}} {within}",
        ("better", True): f"better than {{}} but equivalent {within}",
        ("better", False): "better than {}",
        (None, False): "with no claim on {}",
    }
    arms = split_by(lambda other: _standing(other[0], margin), others)
    return "; ".join(
        phrase.format(listed(name for _, name in arms[standing]))
        for standing, phrase in phrases.items()
        if standing in arms
    )


def _short_name(method: Run, control: Run) -> str:
    arm = control.summary.arm
    if is_shorter(arm):
        arm = f"{control.summary.epochs} epochs ({arm})"
    elif arm in ("random", MATCHED):
        arm = f"a random choice ({arm})"
    cost = _cost(method, control)
    return arm if cost == _EQUAL else f"{arm} at {cost.partition(' (')[0]}"


def _against_full(row: Row, margin: float) -> str:
    assert row.last_difference is not None
    cost = f"skipped {_percent(row.skipped)} of the sample-steps"
    if row.time_saved is not None:
        share = _percent(abs(row.time_saved))
        saved = f"saved {share} of the" if row.time_saved >= 0 else f"took {share} more"
        cost += f" and {saved} training time"
    if row.saved_in_epochs is not None:
        saved = _percent(row.saved_in_epochs)
        cost += f" ({saved} according to the median times of its epochs)"
    if row.samples_of_both is not None:
        cost += f"; both trainings took {whole(row.samples_of_both)} sample-steps"
    return (
        f"{_capitalized(row.arm)} {cost}. Its last-epoch accuracy, "
        f"{_percent(row.accuracy_last, 2)}, is {_size(row.last_difference, 'full training')}: "
        f"{_significance(row.last_difference, margin)}."
    )


def _control(group: Group, name: str, row: Row, difference: Difference, margin: float) -> str:
    method, control = paired_runs(group, name, row.arm)[0]
    if row.arm == "random":
        control_name = _random_control(method, control)
    elif row.arm == MATCHED:
        control_name = _matched_control(method, control)
    elif row.arm == SECOND and row.samples_of_both is not None:
        ratio = row.samples_of_both / method.summary.samples_trained
        control_name = (
            f"A second training without the suspects of full training, at {ratio:.2f} times the "
            f"sample-steps for both (not a control of equal cost),"
        )
    elif not is_shorter(row.arm):
        control_name = f"{_capitalized(row.arm)}, at {_cost(method, control)},"
    else:
        epochs = control.summary.epochs
        cost = _cost(method, control)
        schedule, late, rate = control.recipe["training"]["schedule"], "", ""
        if schedule == "milestones" and ("late" in row.arm or "shorter" in row.arm):
            late = ", removed where the learning rate is smallest"
        elif schedule == "cooldown":
            late = ", with a constant rate and a cooldown"
        elif schedule != method.recipe["training"]["schedule"]:
            late = ", with a rate that falls as 1 - u^2"
        ratio = control.recipe["training"]["lr"] / method.recipe["training"]["lr"]
        if ratio != 1 and method.rate_factor is None:  # The facts give the chosen rates.
            rate = f", with {ratio:.2f} times the learning rate"
        control_name = (
            f"Training on all samples for {epochs} epochs instead{late}{rate}, at {cost},"
        )
    return (
        f"{control_name} reaches {_percent(row.accuracy_last, 2)}: {name} is "
        f"{_size(difference, 'it')}, {_significance(difference, margin)}."
    )


def _random_control(method: Run, control: Run) -> str:
    """Describe the random control, and whether its cost equals that of the method."""
    samples = [[line["samples"] for line in run.metrics] for run in (method, control)]
    if samples[0] == samples[1]:
        return "Skipping the same number of samples in the same epochs, but at random,"
    skipped = [_percent(run.summary.skipped_share) for run in (method, control)]
    cost = _cost(method, control)
    if cost == _EQUAL:
        return (
            f"Skipping {skipped[1]} of the sample-steps at random, at {cost} but with other "
            f"numbers of samples per epoch,"
        )
    return (
        f"Skipping {skipped[1]} of the sample-steps at random (not a control of equal cost: "
        f"the method skips {skipped[0]}, and other numbers of samples per epoch)"
    )


def _matched_control(method: Run, control: Run) -> str:
    """Describe the control ``matched``, and whether it repeats the numbers of this method."""
    skipped = [[line["skipped"] for line in run.metrics] for run in (method, control)]
    if skipped[0] != skipped[1]:
        cost = _cost(method, control)
        return f"{_capitalized(MATCHED)}, the control of another method, at {cost},"
    weighted = any("mean_weight" in line for line in method.metrics)
    mean = " and with the same mean weight" if weighted else ""
    return f"Skipping as many samples in every epoch{mean}, but at random,"


def _cost(method: Run, control: Run) -> str:
    """Describe the cost of a control relative to the method, in sample-steps."""
    ratio = control.summary.samples_trained / method.summary.samples_trained
    # The control has a whole number of epochs, so its cost may differ by up to half an epoch.
    half_epoch = 0.5 * ratio / control.summary.epochs  # As a share of the method's cost.
    if abs(ratio - 1) <= half_epoch + 1e-9:
        return _EQUAL
    return f"{ratio:.2f} times the sample-steps (not a control of equal cost)"


def _alone(row: Row) -> str:
    accuracy = _percent(row.accuracy_last, 2)
    missing = "another arm" if row.arm == BASELINE else "a full run"
    return (
        f"{_capitalized(row.arm)} reached {accuracy} in the last epoch. Without {missing} with the "
        f"same seed, it cannot be compared."
    )


def _size(difference: Difference, other: str) -> str:
    """Describe the size of a difference and its interval."""
    mean = 100 * difference.mean
    if round(mean, 2) == 0:
        text = f"within 0.01 percentage points of {other}"
    else:
        text = f"{abs(mean):.2f} percentage points {'above' if mean > 0 else 'below'} {other}"
    if difference.low is None or difference.high is None:
        return text
    low, high = 100 * difference.low, 100 * difference.high
    return f"{text} (95 % interval {low:+.2f} to {high:+.2f}, {difference.pairs} seeds)"


def _standing(difference: Difference, margin: float) -> tuple[str | None, bool]:
    """Return what the seeds show about a difference, and whether they show equivalence.

    The first is "better", "worse" or "not distinguishable", and None if the seeds do not show how
    much the difference varies.
    """
    p_value = difference.equivalence(margin)
    if difference.low is None or difference.high is None or p_value is None:
        return None, False
    if difference.low <= 0 <= difference.high:
        return "not distinguishable", p_value < _LEVEL
    return "better" if difference.low > 0 else "worse", p_value < _LEVEL


def _significance(difference: Difference, margin: float) -> str:
    """Describe what the seeds show about a difference."""
    if difference.pairs == 1:
        return f"with one seed, a difference below about {CHANCE_POINTS} points is not meaningful"
    p_value = difference.equivalence(margin)
    standing, equivalent = _standing(difference, margin)
    if p_value is None:
        return "the same in every seed, so these seeds do not show the variation between seeds"
    probability = "p < 0.001" if p_value < 0.001 else f"p = {p_value:.3f}"
    within = f"equivalent within {100 * margin:g} points ({probability})"
    if standing == "not distinguishable":
        shown = "and" if equivalent else "and not shown to be"
        return f"not distinguishable with these seeds, {shown} {within}"
    text = f"significantly {standing} (the interval excludes zero)"
    return f"{text}, but {within}" if equivalent else text


def _capitalized(arm: str) -> str:
    return arm[:1].upper() + arm[1:]


def _percent(share: float | None, digits: int = 1) -> str:
    return "an unknown share" if share is None else f"{percent(share, digits)} %"
