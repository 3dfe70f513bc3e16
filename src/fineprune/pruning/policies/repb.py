"""RePB: keep the samples whose loss reached their batch's mean, and a random part of the others."""

from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from fineprune.errors import check_flag
from fineprune.labels.ranking import Ranking
from fineprune.pruning.dropping_count import Counts, add_marks, counts_dtype
from fineprune.pruning.plan import EpochPlan
from fineprune.pruning.policies.even_lengths import checked_save, even_lengths, shortened_epochs
from fineprune.pruning.policies.policy import Losses, Marks, Means, Policy, Training


class RePB(Policy):
    """RePB, "resolving pruning biases" (Zhou et al., "Inconsistency Biases in Dynamic Data
    Pruning", ICLR 2026).

    The losses of different batches come from different networks, so only whether a loss is at least
    the mean of its own batch counts (Local Window Pruning). The samples of which this was so in the
    last epoch are kept. All others, trained or not, are kept with the same probability (Uniform
    Resampling). Each loss is multiplied by E / N, where E is the number of epochs so far and N the
    number of those that trained the sample (Cumulative Temporal Rescaling), which raises the
    effective learning rate. The first epoch trains all samples.

    Readings, where the sources that we know are silent or leave a choice:

    - Reading: the probability is chosen anew in each epoch so that a given share is saved exactly;
      in the paper it is fixed, and the number of samples varies. If the kept samples alone are too
      many, random ones of them are trained, and none of the others.
    - Reading: a window is one batch of all ranks (W = 1 in the paper).
    - Reading: a sample that several batches of an epoch contain is kept if its loss reached the
      mean in any of them. A loss that is NaN or infinite did not reach it.
    - Reading: no epochs are annealed, unless ``anneal`` is set. A full epoch has no weights.

    Args:
        epochs: Number of training epochs.
        save: The share of the sample-steps of the whole training to save, in (0, 1), to within half
            an optimizer step. All epochs but the first and the annealed ones skip the same share.
        anneal: The share of the epochs, in [0, 1], at the end of the training, that train all
            samples.
        rescale: Whether the losses are multiplied by the weights.

    Raises:
        InputError: A value is out of range, or too few epochs may skip samples to save that much.
    """

    name: ClassVar[str] = "repb"
    setting_names = ("epochs", "save", "anneal", "rescale")
    array_names = ("_reached", "_trained")
    needs_losses: bool = True  # They tell which samples were trained.
    needs_marks: bool = True

    def __init__(
        self, epochs: float, save: float = 0.35, *, anneal: float = 0.0, rescale: bool = True
    ) -> None:
        super().__init__(epochs)
        self._shortened = shortened_epochs(1, self.epochs, anneal)
        self.anneal, self.rescale = float(anneal), check_flag("rescale", rescale)
        self.save = checked_save(save, self._shortened, self.epochs)

    def begin(self, training: Training) -> None:
        """Allocate two bytes per sample; raise InputError if the steps are too large."""
        super().begin(training)
        number = training.num_samples
        self._lengths = even_lengths(self.save, self._shortened, self.epochs, training)
        # Whether the loss of each sample reached the mean in the last epoch, and in how many epochs
        # it was trained.
        self._reached: npt.NDArray[np.bool_] = np.zeros(number, dtype=np.bool_)
        self._trained: Counts = np.zeros(number, dtype=counts_dtype(self.epochs))

    def lengths(self) -> list[int]:
        """Return how many samples each epoch keeps."""
        return self._lengths

    def select(self, epoch: int, number: int | None, rng: np.random.Generator) -> EpochPlan:
        """Keep the samples that reached the mean, and fill the epoch with random other ones."""
        assert number is not None
        reached, others = np.flatnonzero(self._reached), np.flatnonzero(~self._reached)
        of_reached = min(number, len(reached))
        chosen = [
            rng.choice(group, size, replace=False, shuffle=False)
            for group, size in ((reached, of_reached), (others, number - of_reached))
        ]
        weights = None
        if self.rescale:
            weights = torch.from_numpy((epoch / np.maximum(self._trained, 1)).astype(np.float32))
        return EpochPlan(epoch, torch.from_numpy(np.sort(np.concatenate(chosen))), weights)

    def exceeds(self, losses: Losses, means: Means) -> Marks:
        """Return which losses reached the mean of their batch."""
        with np.errstate(invalid="ignore"):  # A comparison with NaN is False, as it should be here.
            reached: npt.NDArray[np.bool_] = (losses >= means) & np.isfinite(losses)
        return reached

    def learn(
        self, epoch: int, losses: Losses | None, above_mean: Marks | None, ranking: Ranking | None
    ) -> None:
        """Take which samples reached the mean, and count those that the epoch trained."""
        assert losses is not None
        assert above_mean is not None
        self._reached = above_mean.copy()
        add_marks(self._trained, ~np.isnan(losses))
