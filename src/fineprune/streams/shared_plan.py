"""SharedPlan: the plan of the current epoch in memory that loader processes share."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch


class Pass(NamedTuple):
    """Where the training is when it begins a pass over the stream.

    Attributes:
        number: The number of passes so far; 0 before the first one.
        epoch: The epoch, counted from 0.
        trained: Number of samples that this rank has trained in this epoch already.
        workers: Number of loader processes; 0 if the process of the training reads by itself.
    """

    number: int
    epoch: int
    trained: int
    workers: int


class SharedPlan:
    """Which samples the epoch keeps, as one byte per sample, and where the training is.

    The training writes it before each pass over the stream, and loader processes read it in shared
    memory, so those that persist from epoch to epoch see each new plan.
    """

    def __init__(self, num_samples: int) -> None:
        self._mask = torch.from_numpy(np.zeros(num_samples, np.bool_)).share_memory_()
        self._pass = torch.from_numpy(np.zeros(4, np.int64)).share_memory_()

    def publish(self, epoch: int, kept: torch.Tensor, trained: int, workers: int) -> int:
        """Write what the next pass yields, see ``Pass`` and ``EpochPlan``; return its number."""
        mask = self.mask
        mask[:] = False
        mask[kept.numpy()] = True
        number = self.current.number + 1
        self._pass.numpy()[:] = Pass(number, epoch, trained, workers)
        return number

    @property
    def mask(self) -> npt.NDArray[np.bool_]:
        """Whether each sample is kept, shape (N,)."""
        mask: npt.NDArray[np.bool_] = self._mask.numpy()
        return mask

    @property
    def current(self) -> Pass:
        """The pass that was begun last."""
        return Pass(*self._pass.tolist())
