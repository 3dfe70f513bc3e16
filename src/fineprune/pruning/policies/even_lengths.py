"""The lengths of the epochs of policies that save a given share, evenly over some epochs."""

import math

from fineprune.errors import InputError, check_share
from fineprune.pruning.policies.policy import Training


def shortened_epochs(first: int, epochs: int, anneal: float) -> range:
    """Return the epochs that may skip samples: all from the first on but the last, annealed ones.

    Raises:
        InputError: ``anneal``, the share of the annealed epochs, is not in [0, 1].
    """
    # Rounded up, except for an error such as that of 0.07 * 100 = 7.000000000000001.
    annealed = math.ceil(check_share("anneal", anneal) * epochs - 1e-9)
    return range(first, epochs - annealed)


def checked_save(save: float, shortened: range, epochs: int) -> float:
    """Return ``save``, the share of the sample-steps of a whole training to save, as a float.

    Raises:
        InputError: It is not in (0, 1), or the epochs that may skip samples cannot save that much.
    """
    share = check_share("save", save, "(0, 1)")
    if not shortened:
        raise InputError(
            f"expected epochs that may skip samples, got none of {epochs}: train more epochs, or "
            f"let fewer of them train all samples"
        )
    if save * epochs >= len(shortened):
        raise InputError(
            f"expected save below {len(shortened) / epochs:.3g}, the share of the epochs that may "
            f"skip samples, got {save}: save less, or let more epochs skip samples"
        )
    return share


def even_lengths(save: float, shortened: range, epochs: int, training: Training) -> list[int]:
    """Distribute the samples to skip evenly over some epochs, to within half an optimizer step.

    The arguments are those of ``checked_save``, and the size of the training.

    Raises:
        InputError: The steps are too large to save anything, or to save that much, since each epoch
            takes at least one.
    """
    num_samples, per_step = training.num_samples, training.samples_per_step
    wanted = save * epochs * num_samples
    numbers = [num_samples] * epochs
    skipped = 0
    for place, epoch in enumerate(shortened, start=1):
        due = wanted * place / len(shortened) - skipped
        steps = max(round((num_samples - due) / per_step), 1)
        numbers[epoch] = min(steps * per_step, num_samples)
        skipped += num_samples - numbers[epoch]
    if not skipped:
        raise InputError(
            f"expected a larger save or a smaller batch_size, got save={save} of {num_samples} "
            f"samples in steps of {per_step} (batch x ranks x accumulation)"
        )
    if wanted - skipped > per_step / 2 + 1e-6:
        raise InputError(
            f"expected save of at most {skipped / (epochs * num_samples):.3g} with one step of "
            f"{per_step} samples (batch x ranks x accumulation) in each epoch, got {save}: save "
            f"less, or set a smaller batch_size or anneal"
        )
    return numbers
