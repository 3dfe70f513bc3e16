"""The verdict: what a comparison says, in plain words and no stronger than its numbers."""

from fineprune.experiments.arm_table import BASELINE, Difference, Group, Row, paired_difference
from fineprune.runs.run import Run

METHOD = "fine-pruning"

# Differences of one run to another by chance alone: seeds differ by about as much on CIFAR-10.
CHANCE_POINTS = 0.5

# Accuracies on few samples come in coarse steps, and their differences may be equal by accident.
_NO_WIDTH = 1e-9


def verdict(group: Group, rows: list[Row]) -> list[str]:
    """Return sentences on the cost and accuracy of each arm against full training.

    A difference counts as one only where its 95 % interval over the seeds leaves out zero.

    Args:
        group: the runs.
        rows: their rows, as ``group_rows`` gives them.
    """
    by_arm = {row.arm: row for row in rows}
    compared = [row for row in rows if row.last_difference is not None]
    if not compared:
        return [_alone(row) for row in rows]
    method = by_arm.get(METHOD)
    if method is None or method.last_difference is None:
        return [_against_full(row) for row in compared]
    sentences = [_against_full(method)]
    for arm in ("random", "fewer-epochs"):
        difference = paired_difference(group, METHOD, arm, "accuracy_last")
        if difference is not None:
            sentences.append(_control(group, by_arm[arm], difference))
    return sentences


def _against_full(row: Row) -> str:
    assert row.last_difference is not None
    cost = f"skipped {_percent(row.skipped)} of the sample-steps"
    if row.time_saved is not None:
        share = _percent(abs(row.time_saved))
        saved = f"saved {share} of the" if row.time_saved >= 0 else f"took {share} more"
        cost += f" and {saved} training time"
    if row.saved_in_epochs is not None:
        cost += f" ({_percent(row.saved_in_epochs)} saved by the median times of its own epochs)"
    return (
        f"{_name(row.arm)} {cost}. Its last-epoch accuracy, {_percent(row.accuracy_last, 2)}, is "
        f"{_height(row.last_difference, 'full training')}: {_weight(row.last_difference)}."
    )


def _control(group: Group, row: Row, difference: Difference) -> str:
    method, control = group.of(METHOD)[0], group.of(row.arm)[0]
    if row.arm == "random":
        what = f"Skipping samples at random, {_as_many(method, control)},"
    else:
        epochs = control.summary["epochs"]
        what = f"Training all samples for {epochs} epochs instead, at {_cost(method, control)},"
    return (
        f"{what} reaches {_percent(row.accuracy_last, 2)}: fine-pruning is "
        f"{_height(difference, 'it')}, {_weight(difference)}."
    )


def _as_many(method: Run, control: Run) -> str:
    """Say whether a control skips as many samples as the method in each epoch."""
    samples = [[line["samples"] for line in run.metrics] for run in (method, control)]
    if samples[0] == samples[1]:
        return "as many in the same epochs"
    skipped = [_percent(run.summary["skipped_share"]) for run in (method, control)]
    return (
        f"{skipped[1]} of the sample-steps and not in the same epochs as fine-pruning with its "
        f"{skipped[0]} (no control of equal cost)"
    )


def _cost(method: Run, control: Run) -> str:
    """Say how a control's sample-steps compare with the method's."""
    ratio = control.summary["samples_trained"] / method.summary["samples_trained"]
    # Epochs are whole, so the nearest number of them is up to half an epoch off.
    if abs(ratio - 1) <= 0.5 / control.summary["epochs"] + 1e-9:
        return "about the same cost"
    return f"{ratio:.2f} times the sample-steps (no control of equal cost)"


def _alone(row: Row) -> str:
    reached = f"{_name(row.arm)} reached {_percent(row.accuracy_last, 2)} in the last epoch."
    missing = "another arm" if row.arm == BASELINE else "a full run"
    return f"{reached} Without {missing} of the same seed there is nothing to compare it with."


def _height(difference: Difference, other: str) -> str:
    mean = 100 * difference.mean
    if round(mean, 2) == 0:
        text = f"the same as {other} to a hundredth of a point"
    else:
        text = f"{abs(mean):.2f} points {'above' if mean > 0 else 'below'} {other}"
    if difference.low is None or difference.high is None:
        return text
    low, high = 100 * difference.low, 100 * difference.high
    return f"{text} (95 % interval {low:+.2f} to {high:+.2f}, {difference.pairs} seeds)"


def _weight(difference: Difference) -> str:
    if difference.low is None or difference.high is None:
        return f"one seed, so a difference below about {CHANCE_POINTS} points means nothing"
    if difference.high - difference.low < _NO_WIDTH:
        return "the same in every seed, so these seeds do not show how far chance reaches"
    if difference.low > 0:
        return "better, beyond what chance between seeds explains"
    if difference.high < 0:
        return "worse, beyond what chance between seeds explains"
    return "not distinguishable with these seeds"


def _name(arm: str) -> str:
    return arm[:1].upper() + arm[1:]


def _percent(share: float | None, digits: int = 1) -> str:
    return "an unknown share" if share is None else f"{100 * share:.{digits}f} %"
