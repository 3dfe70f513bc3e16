"""Learning rates as pure functions of the training progress, which is measured in epochs.

After 10 of the 40 batches of epoch 3, it is 3.25. Pruned epochs have fewer steps than full ones, so
a schedule in steps would not end with the training.
"""

import math

from fineprune.training.settings import TrainingSettings


def rate_at(settings: TrainingSettings, progress: float) -> float:
    """Return the learning rate after so many epochs, from 0 to ``settings.epochs``."""
    # It rises linearly to 1 during the warm-up, and is above 0 at the first step.
    factor = min(1.0, (progress + 1e-3) / settings.warmup) if settings.warmup else 1.0
    span = max(settings.epochs - settings.warmup, 1)
    done = max(progress - settings.warmup, 0.0) / span
    if settings.schedule == "milestones":
        # The rate falls after epoch m, counted from 1. Counted from 0, epoch m has the new rate.
        assert settings.gamma is not None
        factor *= settings.gamma ** sum(milestone <= progress for milestone in settings.milestones)
    elif settings.schedule == "rates":
        factor = settings.rates[min(int(progress), settings.epochs - 1)]
    elif settings.schedule == "cosine":
        factor *= (1 + math.cos(math.pi * done)) / 2
    elif settings.schedule == "linear":
        factor *= 1 - done
    return settings.lr * factor
