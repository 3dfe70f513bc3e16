"""AlignPrune: InfoBatch by how well a sample's losses follow those of clean samples."""

import math
from collections.abc import Sequence
from typing import ClassVar, Unpack

import numpy as np
import numpy.typing as npt

from fineprune.errors import InputError, check_whole_number
from fineprune.pruning.alignment import Floats, alignment, clean_indices
from fineprune.pruning.dropping_count import Counts, add_marks, counts_dtype
from fineprune.pruning.lowest import lowest
from fineprune.pruning.plan_options import Options
from fineprune.pruning.policies.infobatch import InfoBatch
from fineprune.pruning.policies.policy import LossRecords

# The share of the samples that stand in for clean ones. The paper finds 1 % to be enough.
_REFERENCE = 0.01


class AlignPrune(InfoBatch):
    """AlignPrune with InfoBatch (Qin et al., "Beyond Loss Values: Robust Dynamic Pruning via Loss
    Trajectory Alignment", CVPR 2026, arXiv 2604.07306).

    Wrong labels have large losses, so InfoBatch keeps them. Here, the score of a sample is not its
    loss, but the Dynamic Alignment Score: the Pearson correlation of its losses in the last
    ``trajectory`` epochs with the mean losses of a small set of clean samples in the same epochs.
    The losses of a hard sample fall with those of clean ones; the losses of a wrong label do not.
    The rest is the form of ``InfoBatch`` with ``save``: random samples with a score below the mean
    of all scores are skipped, and the weight of a sample is the inverse of the probability with
    which its group is kept. The mean weight is above one, which raises the effective learning rate.

    Readings, where the sources that we know are silent:

    - Reading: in the first ``trajectory`` epochs, the last losses are the scores, as in InfoBatch.
    - Reading: a skipped sample has no loss in that epoch, which is left out of its correlation. If
      fewer than two epochs remain, or all losses in them are the same, its score is unknown, and
      not below the mean. If a sample is trained twice in an epoch, its last loss counts.
    - Reading: the clean samples are part of the training set, and may be skipped, too. The mean of
      an epoch is that of those that it trained.
    - Reading: without ``reference``, 1 % of the samples (rounded up) stand in for clean ones, anew
      in each epoch: those with the smallest mean loss so far.

    Args:
        epochs: Number of training epochs.
        save: The share of the sample-steps of the whole training to save, in (0, 1), to within half
            an optimizer step.
        trajectory: The number of epochs, at least 2, whose losses are compared.
        reference: The indices of clean samples: different whole numbers in 0..N-1, at least one.
        options: As for ``InfoBatch``: ``anneal=0.125``; ``rescale=False`` turns the weights off.

    Raises:
        InputError: A value is out of range, or too many epochs are annealed.
    """

    name: ClassVar[str] = "align-prune"
    _setting_names = ("epochs", "save", "trajectory", "reference")
    _array_names = ("losses", "_new", "_trajectories", "_means", "_seen")

    def __init__(
        self,
        epochs: float,
        save: float = 0.35,
        *,
        trajectory: int = 10,
        reference: Sequence[int] | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(epochs, save=save, **options)
        self.trajectory = check_whole_number("trajectory", trajectory, 2)
        usable = self.epochs - self._annealed
        if trajectory >= usable:
            raise InputError(
                f"expected trajectory below {usable}, the number of epochs that may skip samples, "
                f"got {trajectory}: set a smaller trajectory, or train more epochs"
            )
        self.reference = None if reference is None else clean_indices(reference)

    def bind(self, num_samples: int) -> None:
        """Allocate four bytes per sample and epoch of ``trajectory``, and thirteen per sample.

        Raises:
            InputError: ``reference`` has an index of N or more.
        """
        super().bind(num_samples)
        if self.reference and self.reference[-1] >= num_samples:
            raise InputError(
                f"expected reference with indices below {num_samples}, the number of samples, got "
                f"{self.reference[-1]}: give indices of samples of the training set"
            )
        self._trajectories: Floats = np.full((self.trajectory, num_samples), np.nan, np.float32)
        # The losses of the epoch in progress, and the mean of all earlier ones and their number.
        self._new: Floats = np.full(num_samples, np.nan, np.float32)
        self._means: Floats = np.full(num_samples, np.inf, np.float32)
        self._seen: Counts = np.zeros(num_samples, dtype=counts_dtype(self.epochs))

    def observe(self, epoch: int, records: LossRecords) -> None:
        """Remember the last loss of each trained sample, also as that of the epoch."""
        super().observe(epoch, records)
        self._new[records.index] = self.losses[records.index]

    def end_epoch(self, epoch: int) -> None:
        """Add the losses of the epoch to the trajectories and the means."""
        self._trajectories[epoch % self.trajectory] = self._new
        known = ~np.isnan(self._new)
        add_marks(self._seen, known)
        new = self._new[known].astype(np.float64)
        mean = np.where(self._seen[known] > 1, self._means[known], 0.0)
        self._means[known] = mean + (new - mean) / self._seen[known]
        self._new[:] = np.nan

    def _scores(self, epoch: int, rng: np.random.Generator) -> npt.NDArray[np.floating]:
        """Return the alignment of each sample; in the first epochs, its last loss."""
        if epoch < self.trajectory:
            return self.losses
        if self.reference is not None:
            return alignment(self._trajectories, np.array(self.reference))
        number = math.ceil(_REFERENCE * self._num_samples)
        return alignment(self._trajectories, lowest(self._means, number, rng))
