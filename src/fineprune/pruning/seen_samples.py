"""SeenSamples: checks that each index of an epoch is in its plan, and recorded once.

Without a batch size, the loop groups samples as it likes, and may repeat some. A sample outside of
the plan is then counted instead of refused.
"""

import numpy as np
import numpy.typing as npt

from fineprune.errors import InputError
from fineprune.pruning.plan import EpochPlan


class SeenSamples:
    """The samples of an epoch that may still be recorded: one bool for each of N.

    Args:
        plan: The plan of the epoch.
        num_samples: Number of samples N in the data set.
        strict: Whether a sample outside of the plan is refused.
        once: Whether one that is recorded twice is refused. Padding repeats some.
        before: Samples that were recorded before; int64, shape (n,).

    Attributes:
        number: How many samples were recorded.
        unplanned: How many of them are not in the plan.
    """

    def __init__(
        self,
        plan: EpochPlan,
        num_samples: int,
        *,
        strict: bool,
        once: bool,
        before: npt.NDArray[np.int64],
    ) -> None:
        self._plan = plan
        self._num_samples = num_samples
        self._strict = strict
        self._once = once
        self.number = self.unplanned = 0
        self._left: npt.NDArray[np.bool_] | None = None
        self._before = before

    def check(self, index: npt.NDArray[np.integer]) -> None:
        """Check the indices of a batch, shape (B,), at least one.

        Raises:
            InputError: One is out of range, is not in the plan (with ``strict``), or was recorded
                before (with ``once``).
        """
        lowest, highest = int(index.min()), int(index.max())
        if lowest < 0 or highest >= self._num_samples:
            raise InputError(
                f"expected indices in 0..{self._num_samples - 1}, got {lowest}..{highest}"
            )
        if not self._strict:
            return
        allowed = self._allowed(index)
        if not allowed.all():
            raise InputError(self._refusal(int(index[~allowed][0])))

    def note(self, index: npt.NDArray[np.integer]) -> None:
        """Note that a batch was recorded, whose indices were checked."""
        self.number += len(index)
        if self._once:
            assert self._left is not None
            self._left[index] = False
        elif not self._strict:
            self.unplanned += int(np.count_nonzero(~self._allowed(index)))

    def _allowed(self, index: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        if not self._once and self._plan.number == self._num_samples:
            return np.ones(len(index), dtype=np.bool_)
        if self._left is None:
            self._left = self._at_first()
        allowed: npt.NDArray[np.bool_] = self._left[index]
        return allowed

    def _at_first(self) -> npt.NDArray[np.bool_]:
        left = np.zeros(self._num_samples, dtype=np.bool_)
        left[self._plan.kept.numpy()] = True
        if self._once:
            left[self._before] = False
        return left

    def _refusal(self, sample: int) -> str:
        epoch = self._plan.epoch
        if not self._plan.includes(np.array([sample]))[0]:
            return (
                f"expected samples that epoch {epoch} trains, got sample {sample}, which it skips: "
                f"train with pruner.loader(), or give your loader sampler=pruner.sampler and begin "
                f"it anew in each epoch, and give record the indices that it yields, not numbers "
                f"within the batch"
            )
        return (
            f"expected each sample once in epoch {epoch}, got sample {sample} twice: give record "
            f"the indices that the loader yields, not numbers within the batch, and one loss per "
            f"sample, such as the mean of two views"
        )
