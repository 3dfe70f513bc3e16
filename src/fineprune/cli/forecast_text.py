"""What ``fineprune plan`` prints about a forecast: lines of text, or JSON."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from rich.text import Text

from fineprune.pruning.policies.adaptive import Adaptive
from fineprune.pruning.policies.matched import Matched
from fineprune.pruning.schedule import Schedule
from fineprune.training.forecast import Forecast

_BAR = 40
_PER_ROW = 10


def forecast_dict(made: Forecast) -> dict[str, Any]:
    """Return a forecast as a dict for JSON. None marks a value that is not available."""
    schedule = made.schedule
    savings = {} if made.savings is None else dataclasses.asdict(made.savings)
    return {
        "epochs": len(made.kept),
        "num_samples": made.num_samples,
        "kept": made.kept,
        "prunes": made.prunes,
        "pruned_epochs": sum(made.prunes),
        "clears_after": None if schedule is None else list(schedule.boundaries),
        "closed_form_pruned_epochs": made.closed_form,
        "skipped_share": made.skipped_share,
        "saving": None if made.savings is None else made.savings.saving,
        **savings,
    }


def forecast_text(made: Forecast, block: str = "█") -> Iterator[str | Text]:
    """Yield the lines that show a forecast in a terminal, with bars made of a character."""
    schedule, policy = made.schedule, made.policy
    if schedule is not None:
        yield _picture(schedule, made.prunes)
        yield from _schedule_lines(made, schedule)
    elif isinstance(policy, Matched):
        yield "samples per epoch, as in the run that this control repeats, chosen at random:"
        yield from _bars(made.kept, block)
        yield (
            f"samples: {sum(made.kept):,} of {made.num_samples * len(made.kept):,} "
            f"({made.skipped_share:.2%} skipped)"
        )
        weights = set(policy.mean_weights)
        if weights != {1.0}:
            yield f"weights: {min(weights):.3g} to {max(weights):.3g}, the same within an epoch"
    else:
        adapts = isinstance(policy, Adaptive)
        learned = ", if none is skipped for its label" if adapts else ""
        yield f"samples per epoch{learned}:"
        yield from _bars(made.kept, block)
        if isinstance(policy, Adaptive):
            yield (
                f"also skipped, from epoch {policy.first_epoch + 1} on: samples whose labels have "
                f"a score above {policy.threshold:g}; later epochs then keep more of the others, "
                f"so the number of steps does not change"
            )
    yield from _totals(made)


def _bars(kept: list[int], block: str) -> Iterator[str]:
    """Yield how many samples each epoch keeps, in one line for epochs with bars of one length."""
    lengths = [max(1, round(_BAR * number / max(kept))) for number in kept]
    first = 0
    for length, equal in itertools.groupby(lengths):
        last = first + len(list(equal)) - 1
        name = f"{first + 1}" if first == last else f"{first + 1}-{last + 1}"
        least, most = min(kept[first : last + 1]), max(kept[first : last + 1])
        numbers = f"{most:,}" if least == most else f"{least:,} to {most:,}"
        yield f"{name:>9} {block * length:<{_BAR}} {numbers}"
        first = last + 1


def _picture(schedule: Schedule, prunes: list[bool]) -> Text:
    """Return numbered epochs, from 1 as in the paper's Figure 3, the pruned ones in brackets."""
    picture = Text()
    for epoch in range(schedule.epochs):
        number = f"{epoch + 1}".rjust(3)
        if prunes[epoch]:
            picture.append(f"[{number}]", style="black on orange1")
        else:
            picture.append(f" {number} ", style="black on grey74")
        picture.append("|" if schedule.clears(epoch) else " ")
        if (epoch + 1) % _PER_ROW == 0 or epoch == schedule.epochs - 1:
            picture.append("\n")
    return picture


def _schedule_lines(made: Forecast, schedule: Schedule) -> Iterator[str]:
    pruned = schedule.pruned_epochs()
    yield "in brackets: pruned epochs; | counts are cleared after this epoch"
    yield f"pruned epochs: {pruned} of {schedule.epochs} by Algorithm 2"
    if made.closed_form is not None:
        yield f"the paper's closed form, formula 3 or 4, gives {made.closed_form}"
    if made.savings is not None:
        yield (
            f"samples: {made.savings.samples:,} of {made.savings.samples_full:,} "
            f"({made.savings.skipped_share:.2%} skipped, {made.num_samples:,} per full epoch)"
        )


def _totals(made: Forecast) -> Iterator[str]:
    savings, batch, step = made.savings, made.batch_size, made.samples_per_step
    if savings is None:
        return
    size = f" in batches of {batch}"
    if step != batch:
        size = f", each of {step:,} samples ({step // batch} x {batch})"
    yield f"steps: {savings.steps:,} of {savings.steps_full:,}{size}"
    if savings.time is None:
        yield f"predicted saving: {savings.saving:.2%} of the steps (with --step-time: of the time)"
    else:
        yield (
            f"predicted time: {savings.time:,.1f} s of {savings.time_full:,.1f} s, "
            f"{savings.saving:.2%} saved"
        )
