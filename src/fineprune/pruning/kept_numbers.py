"""Distributes the samples to skip evenly over the epochs, in whole optimizer steps."""

from fineprune.errors import InputError


def check_save(save: float, shortened: int, epochs: int) -> float:
    """Return the share to save, as a float.

    Args:
        save: The share of the sample-steps of the whole training to save.
        shortened: Number of epochs that may skip samples.
        epochs: Number of epochs in the training.
    """
    if not 0 < save < 1:
        raise InputError(f"expected save as a share in (0, 1), got {save!r}")
    if save * epochs >= shortened:
        raise InputError(
            f"expected save below {shortened / epochs:.3g}, the share of the epochs that may skip "
            f"samples, got {save}: save less, or set a smaller anneal"
        )
    return float(save)


def kept_numbers(
    save: float, epochs: int, shortened: range, num_samples: int, samples_per_step: int
) -> list[int]:
    """Return how many samples each epoch keeps.

    Together, the shortened epochs save the given share to within half an optimizer step. The others
    keep all samples.

    Args:
        save: The share of the sample-steps of the whole training to save; see ``check_save``.
        epochs: Number of epochs in the training.
        shortened: The epochs that may skip samples, counted from 0.
        num_samples: Number of samples N in the data set.
        samples_per_step: Number of samples per optimizer step of all ranks.
    """
    wanted = save * epochs * num_samples
    numbers = [num_samples] * epochs
    skipped = 0
    for place, epoch in enumerate(shortened, start=1):
        due = wanted * place / len(shortened) - skipped
        steps = max(round((num_samples - due) / samples_per_step), 1)
        numbers[epoch] = min(steps * samples_per_step, num_samples)
        skipped += num_samples - numbers[epoch]
    if not skipped:
        raise InputError(
            f"expected a larger save or a smaller batch_size, got save={save} of {num_samples} "
            f"samples in steps of {samples_per_step} (batch x ranks x accumulation)"
        )
    if wanted - skipped > samples_per_step / 2 + 1e-6:
        raise InputError(
            f"expected save of at most {skipped / (epochs * num_samples):.3g} with one step of "
            f"{samples_per_step} samples (batch x ranks x accumulation) in each epoch, got "
            f"{save}: save less, or set a smaller batch_size or anneal"
        )
    return numbers
