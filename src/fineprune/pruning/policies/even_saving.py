"""EvenSaving: the common part of the policies that skip evenly many samples in each epoch."""

from fineprune.errors import InputError
from fineprune.pruning.plan_options import check_share
from fineprune.pruning.policies.policy import Policy


def check_save(save: float, shortened: int, epochs: int) -> float:
    """Return the share to save, as a float.

    Args:
        save: The share of the sample-steps of the whole training to save.
        shortened: Number of epochs that may skip samples.
        epochs: Number of training epochs.
    """
    share = check_share("save", save, "(0, 1)")
    if shortened <= 0:
        raise InputError(
            f"expected epochs that may skip samples, got none of {epochs}: train more epochs, or "
            f"let fewer of them train all samples"
        )
    if save * epochs >= shortened:
        raise InputError(
            f"expected save below {shortened / epochs:.3g}, the share of the epochs that may skip "
            f"samples, got {save}: save less, or let more epochs skip samples"
        )
    return share


class EvenSaving(Policy):
    """A policy that distributes the samples to skip evenly over some epochs, in whole steps.

    Together, these epochs save the given share, to within half an optimizer step. All other epochs
    keep all samples.

    Attributes:
        save: The share of the sample-steps of the whole training to save; None if the policy saves
            otherwise.
    """

    save: float | None

    def _set_save(self, save: float | None, begin: int = 0, end: int | None = None) -> None:
        """Set the share to save, and the epochs that may skip samples unless they are annealed."""
        last = self.epochs - self._annealed
        self._shortened = range(begin, last if end is None else min(end, last))
        self.save = None if save is None else check_save(save, len(self._shortened), self.epochs)
        self._numbers: list[int] = []

    def bind_steps(self, samples_per_step: int, steps_per_full_epoch: int) -> None:
        """Distribute the samples to skip over the epochs, in whole steps.

        Raises:
            InputError: The steps are too large to save anything, or to save that much, since each
                epoch takes at least one.
        """
        super().bind_steps(samples_per_step, steps_per_full_epoch)
        if self.save is None:
            return
        num_samples = self._num_samples
        wanted = self.save * self.epochs * num_samples
        self._numbers = [num_samples] * self.epochs
        skipped = 0
        for place, epoch in enumerate(self._shortened, start=1):
            due = wanted * place / len(self._shortened) - skipped
            steps = max(round((num_samples - due) / samples_per_step), 1)
            self._numbers[epoch] = min(steps * samples_per_step, num_samples)
            skipped += num_samples - self._numbers[epoch]
        if not skipped:
            raise InputError(
                f"expected a larger save or a smaller batch_size, got save={self.save} of "
                f"{num_samples} samples in steps of {samples_per_step} (batch x ranks x "
                f"accumulation)"
            )
        if wanted - skipped > samples_per_step / 2 + 1e-6:
            raise InputError(
                f"expected save of at most {skipped / (self.epochs * num_samples):.3g} with one "
                f"step of {samples_per_step} samples (batch x ranks x accumulation) in each epoch, "
                f"got {self.save}: save less, or set a smaller batch_size or anneal"
            )

    def num_kept(self, epoch: int) -> int | None:
        """Return how many samples the epoch keeps; None without ``save``: it depends on data."""
        return None if self.save is None else self._numbers[epoch]
