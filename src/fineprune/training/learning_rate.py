"""Learning rates as pure functions of progress, so that shorter epochs do not disturb them.

Progress is counted in epochs: epoch 3, batch 10 of 40 is 3.25. A schedule by steps would be planned
on full epochs and end too high when some are shorter; by progress the end is always the end.
"""

import math

from fineprune.training.settings import TrainingSettings


def rate_at(settings: TrainingSettings, progress: float) -> float:
    """Return the learning rate.

    Args:
        settings: the training section of the recipe.
        progress: epochs done, from 0 to ``settings.epochs``, with fractions inside an epoch.
    """
    if settings.schedule == "one-cycle":
        return settings.lr * _one_cycle(progress, settings.warmup, settings.epochs)
    factor = _warmup(progress, settings.warmup)
    if settings.schedule == "milestones":
        # Milestone m is an epoch from 1 after which the rate falls: epoch m from 0 has the new one.
        passed = sum(milestone <= progress for milestone in settings.milestones)
        factor *= settings.gamma**passed
    elif settings.schedule == "cosine":
        span = max(settings.epochs - settings.warmup, 1)
        done = max(progress - settings.warmup, 0.0) / span
        factor *= (1 + math.cos(math.pi * done)) / 2
    return settings.lr * factor


def _warmup(progress: float, warmup: int) -> float:
    return min(1.0, (progress + 1e-3) / warmup) if warmup else 1.0


def _one_cycle(progress: float, warmup: int, epochs: int) -> float:
    """Rise from 1/25 over the warm-up (30 % of the training unless given), fall to nearly zero."""
    rise = warmup or 0.3 * epochs
    if progress < rise:
        return 1 + (1 / 25 - 1) * (1 + math.cos(math.pi * progress / rise)) / 2
    done = (progress - rise) / max(epochs - rise, 1e-9)
    return 1e-4 / 25 + (1 - 1e-4 / 25) * (1 + math.cos(math.pi * done)) / 2
