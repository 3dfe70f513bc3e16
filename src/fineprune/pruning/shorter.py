"""The shorter schedule: fewer epochs on all data, the control of every policy."""

import itertools
from collections.abc import Sized

from fineprune.errors import InputError, check_share
from fineprune.pruning.rates import Rates, are_steps, rates_of


def shorter(rates: Rates, save: float = 0.35, *, epochs: int | None = None) -> list[float]:
    """Return the learning rates of a shorter training on all data, one for each epoch that is left.

    If the rates fall in steps, epochs are removed from the last step until one is left, then from
    the step before it, and so on; a warm-up stays as it is if epochs are left after it. If the
    rates fall smoothly, the new rates are ``peak * (1 - u**2)``, where u rises from 0 at the
    largest rate to 1 at the end; a warm-up is shortened in proportion. Restarts are lost.

    Args:
        rates: The learning rate of each epoch of the full training: numbers, a function of the
            progress in epochs, or a torch scheduler that is stepped once per epoch.
        save: The share of the epochs to save, in [0, 1); at least one epoch is left.
        epochs: Number of epochs of the full training; by default, that of ``rates`` as numbers.

    Raises:
        InputError: A value is out of range, or rates fall in more steps than epochs are left.
    """
    check_share("save", save, "[0, 1)")
    if epochs is None:
        if not isinstance(rates, Sized):
            raise InputError(
                f"expected epochs=... with rates of the type {type(rates).__name__}, got none"
            )
        epochs = len(rates)
    given = rates_of(rates, epochs)
    left = max(1, round((1 - save) * epochs))
    if left == epochs:
        return given
    peak = max(range(epochs), key=given.__getitem__)
    if are_steps(given[peak:]) and left > peak:
        steps = [(rate, len(list(same))) for rate, same in itertools.groupby(given[peak:])]
        lengths = shortened_intervals([length for _, length in steps], left - peak)
        return given[:peak] + [
            rate for (rate, _), length in zip(steps, lengths, strict=True) for _ in range(length)
        ]
    rise = min(round(peak * left / epochs), left - 1)
    before = [given[round(epoch * peak / rise)] for epoch in range(rise)]
    falling = left - rise
    return before + [given[peak] * (1 - (epoch / falling) ** 2) for epoch in range(falling)]


def shortened_intervals(lengths: list[int], epochs: int) -> list[int]:
    """Shorten the intervals of a training from the last one on, each to one epoch at least."""
    surplus = sum(lengths) - epochs
    result = list(lengths)
    for interval in reversed(range(len(result))):
        removed = min(surplus, result[interval] - 1)
        result[interval] -= removed
        surplus -= removed
    if surplus:
        raise InputError(
            f"expected at least one epoch for each of {len(result)} learning rates, got {epochs} "
            f"epochs: save less"
        )
    return result
