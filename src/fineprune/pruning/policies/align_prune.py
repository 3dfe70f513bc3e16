"""AlignPrune: InfoBatch by how well a sample's losses follow those of clean samples."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from fineprune.errors import InputError, check_whole_number
from fineprune.labels.ranking import Ranking
from fineprune.pruning.alignment import Floats, alignment, clean_indices, lowest
from fineprune.pruning.dropping_count import Counts, add_marks, counts_dtype
from fineprune.pruning.policies.infobatch import InfoBatch
from fineprune.pruning.policies.policy import Losses, Marks, Training

# The share of the samples that stand in for clean ones. The paper finds 1 % to be enough.
_REFERENCE = 0.01


class AlignPrune(InfoBatch):
    """AlignPrune with InfoBatch (Qin et al., "Beyond Loss Values: Robust Dynamic Pruning via Loss
    Trajectory Alignment", CVPR 2026, arXiv 2604.07306).

    It is InfoBatch with ``save``, whose score of a sample is not its last loss, but the Dynamic
    Alignment Score: the Pearson correlation of its losses in the last ``trajectory`` epochs with
    the mean losses of a small set of clean samples. The losses of a hard sample fall with those of
    clean ones; the losses of a wrong label do not.

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
        anneal, rescale: As for ``InfoBatch``.

    Raises:
        InputError: A value is out of range, or too many epochs are annealed.
    """

    name: ClassVar[str] = "align-prune"
    setting_names = ("epochs", "save", "anneal", "rescale", "trajectory", "reference")
    array_names = ("losses", "_trajectories", "_means", "_seen")

    def __init__(
        self,
        epochs: float,
        save: float = 0.35,
        *,
        trajectory: int = 10,
        reference: Sequence[int] | None = None,
        anneal: float = 0.125,
        rescale: bool = True,
    ) -> None:
        super().__init__(epochs, save=save, anneal=anneal, rescale=rescale)
        self.trajectory = check_whole_number("trajectory", trajectory, 2)
        usable = len(self._shortened)
        if trajectory >= usable:
            raise InputError(
                f"expected trajectory below {usable}, the number of epochs that may skip samples, "
                f"got {trajectory}: set a smaller trajectory, or train more epochs"
            )
        self.reference = None if reference is None else clean_indices(reference)

    def begin(self, training: Training) -> None:
        """Allocate four bytes per sample and epoch of ``trajectory``, and nine per sample."""
        super().begin(training)
        number = training.num_samples
        if self.reference and self.reference[-1] >= number:
            raise InputError(
                f"expected reference with indices below {number}, the number of samples, got "
                f"{self.reference[-1]}: give indices of samples of the training set"
            )
        self._trajectories: Floats = np.full((self.trajectory, number), np.nan, np.float32)
        # The mean of all losses and their number.
        self._means: Floats = np.full(number, np.inf, np.float32)
        self._seen: Counts = np.zeros(number, dtype=counts_dtype(self.epochs))

    def learn(
        self, epoch: int, losses: Losses | None, above_mean: Marks | None, ranking: Ranking | None
    ) -> None:
        """Add the losses of the epoch to the trajectories and the means."""
        assert losses is not None
        super().learn(epoch, losses, above_mean, ranking)
        of_epoch = np.where(np.isfinite(losses), losses, np.float32(np.nan))
        self._trajectories[epoch % self.trajectory] = of_epoch
        known = ~np.isnan(of_epoch)
        add_marks(self._seen, known)
        new = of_epoch[known].astype(np.float64)
        mean = np.where(self._seen[known] > 1, self._means[known], 0.0)
        self._means[known] = mean + (new - mean) / self._seen[known]

    def _scores(self, epoch: int, rng: np.random.Generator) -> npt.NDArray[np.floating[Any]]:
        """Return the alignment of each sample; in the first epochs, its last loss."""
        if epoch < self.trajectory:
            return self.losses
        if self.reference is not None:
            return alignment(self._trajectories, np.array(self.reference))
        number = math.ceil(_REFERENCE * self._num_samples)
        return alignment(self._trajectories, lowest(self._means, number, rng))
