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
        self._strict = strict
        self._once = once
        self.number = self.unplanned = 0
        full = plan.number == num_samples
        self._left: npt.NDArray[np.bool_] = np.full(num_samples, full, dtype=np.bool_)
        if not full:
            self._left[plan.kept.numpy()] = True
        if once:
            self._left[before] = False

    def check(self, index: npt.NDArray[np.integer]) -> None:
        """Check the indices of a batch, shape (B,), at least one.

        Raises:
            InputError: One is out of range, is not in the plan (with ``strict``), or was recorded
                before (with ``once``).
        """
        if np.minimum.reduce(index) < 0:
            raise self._out_of_range(index)
        try:
            allowed = self._left.take(index)
        except IndexError:
            raise self._out_of_range(index) from None
        if self._strict and np.count_nonzero(allowed) < len(index):
            raise InputError(self._refusal(int(index[~allowed][0])))

    def note(self, index: npt.NDArray[np.integer]) -> None:
        """Note that a batch was recorded, whose indices were checked."""
        self.number += len(index)
        if self._once:
            self._left[index] = False
        elif not self._strict:
            self.unplanned += len(index) - int(np.count_nonzero(self._left.take(index)))

    def _out_of_range(self, index: npt.NDArray[np.integer]) -> InputError:
        return InputError(
            f"expected indices in 0..{len(self._left) - 1}, got {index.min()}..{index.max()}"
        )

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
