"""SharedPlan: the plan of the current epoch in memory that loader processes share."""

import numpy as np
import numpy.typing as npt
import torch

# The places of the numbers beside the mask.
_PASSES, _EPOCH, _TRAINED, _WORKERS = range(4)


class SharedPlan:
    """Which samples the epoch keeps, as one byte per sample, and where the training is.

    The process of the training writes it before each pass over the stream. Its loader processes
    read it in shared memory, so those that persist from epoch to epoch see each new plan.

    Args:
        num_samples: Number of samples N.
    """

    def __init__(self, num_samples: int) -> None:
        self._mask = torch.from_numpy(np.zeros(num_samples, np.bool_)).share_memory_()
        self._numbers = torch.from_numpy(np.zeros(4, np.int64)).share_memory_()

    def publish(self, epoch: int, kept: torch.Tensor, trained: int, workers: int) -> int:
        """Write what the next pass yields.

        Args:
            epoch: The epoch, counted from 0.
            kept: Indices of the samples that it keeps, int64, shape (number kept,).
            trained: Number of samples that this rank has trained in this epoch already.
            workers: Number of loader processes; 0 if the process of the training reads by itself.

        Returns:
            The number of passes so far.
        """
        mask = self.mask
        mask[:] = False
        mask[kept.numpy()] = True
        passes = self.passes + 1
        for place, number in (
            (_EPOCH, epoch),
            (_TRAINED, trained),
            (_WORKERS, workers),
            (_PASSES, passes),
        ):
            self._numbers[place] = number
        return passes

    @property
    def mask(self) -> npt.NDArray[np.bool_]:
        """Whether each sample is kept, shape (N,)."""
        mask: npt.NDArray[np.bool_] = self._mask.numpy()
        return mask

    @property
    def passes(self) -> int:
        """How many times ``publish`` was called."""
        return int(self._numbers[_PASSES])

    @property
    def epoch(self) -> int:
        """The epoch, counted from 0."""
        return int(self._numbers[_EPOCH])

    @property
    def trained(self) -> int:
        """Number of samples that this rank had trained in this epoch when the pass began."""
        return int(self._numbers[_TRAINED])

    @property
    def workers(self) -> int:
        """Number of loader processes; 0 if the process of the training reads by itself."""
        return int(self._numbers[_WORKERS])
