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
        self._given: set[str] = set()
        self._broken_off = 0
        self._recorded = False

    def of_read(self, epoch: Epoch) -> None:
        """Warn of a loop that begins no epoch, when it reads the samples of this one."""
        if epoch.reads == _MOST_READS:
            self._once(
                "order",
                f"the samples of epoch {epoch.number} were loaded {_MOST_READS} times without a "
                f"new epoch, so the same samples are trained each time: loop over pruner.epochs(), "
                f"or call pruner.set_epoch(epoch)",
            )

    def of_rates(self, policy: Policy) -> None:
        """Warn if the policy needs learning rates and has none."""
        if policy.without_rates:
            self._once(
                "rates",
                f"policy {policy.name!r} was given no learning rates and takes them to be "
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
        self._recorded |= epoch.batches > 0
        if policy.learns_from_losses and epoch.reads and not self._recorded:
            self._once(
                "nothing",
                f"epoch {epoch.number} recorded no losses, so policy {policy.name!r} learns "
                f"nothing: train with pruner.loader(), and pass the losses of each batch to "
                f"pruner.record(index, losses)",
            )
        self._broken_off += counts and epoch.batches > 0 and not epoch.complete
        if self._broken_off == _BROKEN_OFF:
            self._once(
                "fewer",
                f"epoch {epoch.number} recorded the batches of {epoch.done} of {epoch.planned} "
                f"samples, and another one ended early, too, so fewer steps are taken than "
                f"planned: record every batch, let a framework read len(loader) in each epoch, and "
                f"give Pruner the loader's drop_last; ignore this if you end epochs early on "
                f"purpose",
            )

    def _once(self, kind: str, message: str, category: type[Warning] = RuntimeWarning) -> None:
        if kind not in self._given:
            self._given.add(kind)
            warn_user(message, category)
