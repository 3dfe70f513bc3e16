"""Warnings about a training loop that does less than the plan of the epoch says.

Each can be intended, and is given once. What cannot be right is an error; see ``loop_checks``.
"""

from fineprune.errors import warn_user
from fineprune.pruning.epoch import Epoch
from fineprune.pruning.policies.policy import Policy
from fineprune.pruning.seen_samples import SeenSamples

# How often the samples of an epoch are loaded before a warning, if none is recorded. Two passes may
# be for a look at the data.
_MOST_READS = 3

# An epoch may record a few samples less than planned, such as without files that cannot be read.
# The second epoch that records fewer than this share of them is warned of.
_ENOUGH = 0.8
_SHORT_EPOCHS = 2

# Number of epochs in a row that recorded nothing, or trained skipped samples, before a warning.
_IN_A_ROW = 3


class LoopWarnings:
    """Notes what one rank does, and warns of what may be a mistake.

    Args:
        policy: The policy of the pruner.
        num_samples: Number of samples N in the data set.
        has_dataset: Whether the pruner was made of a data set. A loop over arrays in memory may
            leave out epochs without a sign.
    """

    def __init__(self, policy: Policy, num_samples: int, has_dataset: bool) -> None:
        self._policy = policy
        self._num_samples = num_samples
        self._has_dataset = has_dataset
        self._reads = self._short = self._silent = self._ignored = 0
        self._has_recorded = False
        self._warned: set[str] = set()

    def begin_epoch(self) -> None:
        """Note that another epoch begins."""
        self._reads = 0

    def note_read(self, epoch: Epoch) -> None:
        """Note that a loop that names no epochs reads the samples of one."""
        self._reads += 1
        if self._reads == _MOST_READS and not epoch.batches:
            self._once(
                "reads",
                f"the samples of epoch {epoch.number} were loaded {_MOST_READS} times without a "
                f"new epoch, so the same samples are trained each time: loop over pruner.epochs(), "
                f"or call pruner.set_epoch(epoch)",
            )

    def of_rates(self) -> None:
        """Warn if the policy needs learning rates and has none."""
        if self._policy.without_rates:
            self._once("rates", self._policy.without_rates, UserWarning)

    def of_epoch(
        self,
        epoch: Epoch,
        seen: SeenSamples,
        nonfinite: int,
        *,
        read: bool,
        all_read: bool,
        used: bool,
        expected: int,
    ) -> None:
        """Warn of what an epoch did that has ended.

        Args:
            epoch: The epoch.
            seen: The samples that were recorded.
            nonfinite: Number of its losses that were NaN or infinite.
            read: Whether the loop has read the sampler.
            all_read: Whether the sampler has yielded all of it, and the batch size is known.
            used: Whether it has read the sampler or the plan.
            expected: The number of samples that this rank was to record; 0 if it is not known.
        """
        if nonfinite:
            warn_user(
                f"{nonfinite} losses of epoch {epoch.number} were NaN or infinite, and were left "
                f"out"
            )
        if not epoch.batches:
            self._of_silence(epoch, read, used)
            return
        self._has_recorded, self._silent = True, 0
        if seen.number < _ENOUGH * expected or (all_read and not epoch.complete):
            self._short += 1
            if self._short == _SHORT_EPOCHS:
                self._once(
                    "short",
                    f"epoch {epoch.number} recorded {seen.number} of {expected} samples, and "
                    f"another one ended early, too, so fewer steps are taken than planned: record "
                    f"every batch and every sample of it, let a framework read len(loader) in each "
                    f"epoch, and give Pruner the loader's drop_last; ignore this if you end epochs "
                    f"early on purpose",
                )
        # A loader without the sampler trains skipped samples as often as all others.
        skipped = 1 - epoch.plan.number / self._num_samples
        ignored = seen.unplanned > seen.number * skipped / 2
        self._ignored = self._ignored + 1 if ignored else 0
        if self._ignored == _IN_A_ROW:
            self._once(
                "ignored",
                f"in {_IN_A_ROW} pruning epochs up to epoch {epoch.number}, the samples to skip "
                f"were trained anyway: give the loader sampler=pruner.sampler, and give record "
                f"the indices that the loader yields, not numbers within the batch",
            )

    def _of_silence(self, epoch: Epoch, read: bool, used: bool) -> None:
        if used and not self._policy.learns_from_losses:
            return
        self._silent += used or self._has_dataset
        if self._silent == _IN_A_ROW or (read and not self._has_recorded):
            self._once(
                "silent",
                f"epoch {epoch.number} recorded no losses, so policy {self._policy.name!r} learns "
                f"nothing: pass the losses of each batch to pruner.record(index, losses)"
                if used
                else f"{_IN_A_ROW} epochs up to epoch {epoch.number} used neither the sampler nor "
                f"the plan of the pruner, so nothing was skipped: train with pruner.loader(), or "
                f"give your loader sampler=pruner.sampler",
            )

    def _once(self, kind: str, message: str, category: type[Warning] = RuntimeWarning) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warn_user(message, category)
