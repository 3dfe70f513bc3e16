"""Warnings about a training loop that may be meant as it is. What cannot be is an error."""

from fineprune.errors import warn_user
from fineprune.pruning.epoch import Epoch
from fineprune.pruning.policies.policy import Policy

# How often the samples of an epoch are read before a warning. Two passes may be a look at the data.
_MOST_READS = 3

# How many epochs are broken off before a warning. One may be, such as by an interrupt.
_BROKEN_OFF = 2


class LoopWarnings:
    """Warns the user, of each mistake once."""

    def __init__(self) -> None:
        self._ended = self._broken_off = 0

    def of_read(self, epoch: Epoch) -> None:
        """Warn of a loop that begins no epoch, when it reads the samples of this one."""
        if epoch.reads == _MOST_READS:
            warn_user(
                f"the samples of epoch {epoch.number} were loaded {_MOST_READS} times without a "
                f"new epoch, so the same samples are trained each time: loop over pruner.epochs(), "
                f"or call pruner.set_epoch(epoch)"
            )

    def of_rates(self, policy: Policy) -> None:
        """Warn if the policy needs learning rates and has none, when the training begins."""
        if policy.without_rates and not self._ended:
            warn_user(
                f"{type(policy).__name__} was given no learning rates and takes them to be "
                f"constant, so all epochs are shortened alike: give rates=..., or call "
                f"pruner.set_rates(scheduler) before the training",
                UserWarning,
            )

    def of_epoch(self, epoch: Epoch, policy: Policy, nonfinite: int, counts: bool) -> None:
        """Warn of what an epoch did that has ended, with some losses that were not finite.

        ``counts`` says whether the batch size is known, and with it when an epoch is complete.
        """
        if nonfinite:
            warn_user(
                f"{nonfinite} losses of epoch {epoch.number} were NaN or infinite, and were left "
                f"out"
            )
        self._ended += 1
        if policy.learns_from_losses and epoch.reads and not epoch.batches and self._ended == 1:
            warn_user(
                f"epoch {epoch.number} recorded no losses, so policy {policy.name!r} learns "
                f"nothing: train with pruner.loader(), and pass the losses of each batch to "
                f"pruner.record(index, losses)"
            )
        if counts and epoch.batches and not epoch.complete:
            self._broken_off += 1
            if self._broken_off == _BROKEN_OFF:
                warn_user(
                    f"epoch {epoch.number} recorded the batches of {epoch.done} of {epoch.planned} "
                    f"samples, and another one ended early, too, so fewer steps are taken than "
                    f"planned: record every batch, let a framework read len(loader) in each epoch, "
                    f"and give Pruner the loader's drop_last; ignore this if you end epochs early "
                    f"on purpose"
                )
