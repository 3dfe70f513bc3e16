"""RePB: keep the samples whose loss reached their batch's mean, and a random part of the others."""

from typing import ClassVar, Unpack

import numpy as np
import numpy.typing as npt
import torch

from fineprune.pruning.dropping_count import Counts, add_marks, counts_dtype
from fineprune.pruning.plan import EpochPlan
from fineprune.pruning.plan_options import Options
from fineprune.pruning.policies.even_saving import EvenSaving
from fineprune.pruning.policies.policy import LossRecords
from fineprune.pruning.replicas import Replicas

# The marks of a sample in the epoch in progress. The mark of a sample that was trained before is 1.
_TRAINED, _REACHED = 1, 2


class RePB(EvenSaving):
    """RePB, "resolving pruning biases" (Zhou et al., "Inconsistency Biases in Dynamic Data
    Pruning", ICLR 2026).

    The losses of different batches come from different networks, so they are not compared
    (Local Window Pruning): only whether a loss is at least the mean of its own batch counts. The
    samples of which this was so in the last epoch are kept. All others, those below the mean and
    those that were not trained, are kept with the same probability, so that a skipped sample can
    come back (Uniform Resampling). Each loss is multiplied by E / N, where E is the number of
    epochs so far and N the number of those that trained the sample (Cumulative Temporal
    Rescaling). The first epoch trains all samples.

    The weights are at least one: all of them in the second epoch, and their mean is larger later
    on, which raises the effective learning rate. A sample that was hardly ever trained may have a
    weight of up to E. ``rescale=False`` turns the weights off.

    Readings, where the sources that we know are silent or leave a choice:

    - Reading: the probability is chosen anew in each epoch so that a given share is saved exactly;
      in the paper it is fixed, and the number of samples varies. If the kept samples alone are too
      many, random ones of them are trained, and none of the others.
    - Reading: a window is one batch of all ranks (W = 1 in the paper, where it may also be several
      batches in a row), since the network does not change at all within it.
    - Reading: a sample that several batches of an epoch contain, as padding does, is kept if its
      loss reached the mean in any of them. A loss that is NaN or infinite did not reach it.
    - Reading: no epochs are annealed, unless ``anneal`` is set. An epoch that trains all samples
      has no weights.

    Args:
        epochs: Number of training epochs.
        save: The share of the sample-steps of the whole training to save, in (0, 1), to within half
            an optimizer step. All epochs but the first and the annealed ones skip the same share.
        options: The options of every policy; see ``PlanOptions``. By default, ``rescale`` is true.

    Raises:
        InputError: A value is out of range, or too few epochs may skip samples to save that much.
    """

    name: ClassVar[str] = "repb"
    _setting_names = ("epochs", "save")
    _array_names = ("_reached", "_trained", "_marks")
    needs_losses: bool = True
    of_nonfinite: ClassVar[str] = "count as below the mean of their batch"

    def __init__(self, epochs: float, save: float = 0.35, **options: Unpack[Options]) -> None:
        given: Options = {"rescale": True, **options}
        super().__init__(epochs, **given)
        self._set_save(save, begin=1)
        self._allocate(0)

    def bind(self, num_samples: int) -> None:
        """Allocate three bytes per sample, or more with more than 255 epochs."""
        super().bind(num_samples)
        self._allocate(num_samples)

    def _allocate(self, number: int) -> None:
        # Whether the loss of each sample reached the mean in the last epoch, in how many epochs it
        # was trained, and its mark in the epoch in progress.
        self._reached: npt.NDArray[np.bool_] = np.zeros(number, dtype=np.bool_)
        self._trained: Counts = np.zeros(number, dtype=counts_dtype(self.epochs))
        self._marks: npt.NDArray[np.uint8] = np.zeros(number, dtype=np.uint8)

    def select(self, epoch: int, num_kept: int | None, rng: np.random.Generator) -> EpochPlan:
        """Keep the samples that reached the mean, and fill the epoch with random other ones."""
        assert num_kept is not None
        reached, others = np.flatnonzero(self._reached), np.flatnonzero(~self._reached)
        of_reached = min(num_kept, len(reached))
        chosen = [
            rng.choice(group, number, replace=False, shuffle=False)
            for group, number in ((reached, of_reached), (others, num_kept - of_reached))
        ]
        weights = None
        if self.plan_options.rescale:
            weights = torch.from_numpy((epoch / np.maximum(self._trained, 1)).astype(np.float32))
        return EpochPlan(epoch, torch.from_numpy(np.sort(np.concatenate(chosen))), weights)

    def observe(self, epoch: int, records: LossRecords) -> None:
        """Mark the trained samples, and those whose loss reached the mean of their batch."""
        with np.errstate(invalid="ignore"):  # A comparison with NaN is False, as it should be here.
            reached = (records.losses >= records.batch_means) & np.isfinite(records.losses)
        np.maximum.at(self._marks, records.index, np.where(reached, _REACHED, _TRAINED))

    def merge(self, replicas: Replicas) -> None:
        """Take the largest mark that any rank gave each sample."""
        self._marks = replicas.maximum(self._marks)

    def end_epoch(self, epoch: int) -> None:
        """Take the marks of the epoch, and count the samples that it trained."""
        self._reached = self._marks == _REACHED
        add_marks(self._trained, self._marks > 0)
        self._marks[:] = 0
