"""Learning rates as pure functions of the training progress, which is measured in epochs.

For example, the progress after 10 of the 40 batches of epoch 3 is 3.25. Pruned epochs have fewer
steps than full ones. A schedule that is planned in steps of full epochs would therefore not reach
its end, whereas a schedule in epochs always ends with the training.
"""

import math
from collections.abc import Callable

from fineprune.training.settings import TrainingSettings

# How the rate falls from 1 to 0 while the share of the training that is done rises to 1.
_SHAPES: dict[str, Callable[[float], float]] = {
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "linear": lambda done: 1 - done,
    "quadratic": lambda done: 1 - done**2,
}

# The share of the epochs, rounded to whole ones, in which the rate of ``cooldown`` falls.
_COOLDOWN = 0.2


def rate_at(settings: TrainingSettings, progress: float) -> float:
    """Return the learning rate at a point of the training.

    The progress is the number of epochs trained so far, from 0 to ``settings.epochs``. Inside an
    epoch, it includes the fraction of the epoch's batches that are trained.
    """
    if settings.schedule == "one-cycle":
        rise = settings.warmup or 0.3 * settings.epochs
        return settings.lr * _one_cycle(progress, rise, settings.epochs)
    # It rises linearly to 1 during the warm-up, and is above 0 at the first step.
    factor = min(1.0, (progress + 1e-3) / settings.warmup) if settings.warmup else 1.0
    if settings.schedule == "milestones":
        # The rate falls after epoch m, counted from 1. Counted from 0, epoch m has the new rate.
        passed = sum(milestone <= progress for milestone in settings.milestones)
        assert settings.gamma is not None
        factor *= settings.gamma**passed
    elif settings.schedule == "rates":
        factor = settings.rates[min(int(progress), settings.epochs - 1)]
    elif settings.schedule in _SHAPES:
        span = max(settings.epochs - settings.warmup, 1)
        done = max(progress - settings.warmup, 0.0) / span
        factor *= _SHAPES[settings.schedule](done)
    elif settings.schedule == "cooldown":
        begin = settings.epochs - max(1, round(_COOLDOWN * settings.epochs))
        factor *= 1 - math.sqrt(max(progress - begin, 0.0) / (settings.epochs - begin))
    return settings.lr * factor


def _one_cycle(progress: float, rise: float, epochs: int) -> float:
    """Return a factor that rises from 1/25 to 1 during the warm-up and then falls to almost 0."""
    if progress < rise:
        return 1 + (1 / 25 - 1) * (1 + math.cos(math.pi * progress / rise)) / 2
    done = (progress - rise) / max(epochs - rise, 1e-9)
    return 1e-4 / 25 + (1 - 1e-4 / 25) * (1 + math.cos(math.pi * done)) / 2
