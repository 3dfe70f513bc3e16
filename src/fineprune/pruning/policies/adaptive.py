"""Adaptive: save a given share of the steps where this costs the least."""

import hashlib
import math
from numbers import Real
from typing import Any, ClassVar, Unpack

import numpy as np
import numpy.typing as npt
import torch

from fineprune.errors import InputError, check_whole_number, warn_user
from fineprune.labels.advice import FullCost, advice_of_losses, doubt_of
from fineprune.labels.label_watch import LabelWatch
from fineprune.labels.ranking import Ranking
from fineprune.labels.spared_classes import of_unlearned_classes
from fineprune.pruning.dropping_count import add_marks, keep_least_counted
from fineprune.pruning.learning_rates import Rates
from fineprune.pruning.plan import EpochPlan
from fineprune.pruning.plan_options import Options, check_share
from fineprune.pruning.policies.budgeted import BudgetedPolicy
from fineprune.pruning.policies.epoch_losses import EpochLosses
from fineprune.pruning.policies.policy import LossRecords
from fineprune.pruning.replicas import Replicas

_LONGEST_STREAK = 255

# While hardly a class is learned, all samples of the others contradict those. Stale gradients make
# the first epochs so slow that the correct samples of such a class were skipped, too, and learned
# even later (docs/results/joint.md). The mean loss, in which no loss is larger than chance, was
# above this share of chance then, and below it from the first epoch on in trainings without that.
_LEARNED = 0.925

# Below this share, most samples are learned, and most of those whose losses are above chance on
# average have wrong labels. Earlier, more of them are hard samples, which a network that is still
# learning needs (docs/results/adaptive.md, "Variants").
_MOSTLY_LEARNED = 0.5

# So many times the passes of an earlier training are more than those: no rounding is.
_LONGER = 1.1

# With correct labels, the estimate of the number of wrong ones falls faster than the number of
# samples that contradict. Once most samples were learned, it was the larger one for at most one
# epoch (a LeNet, a ResNet-9 and a thin ResNet-18); for more than ten if labels were confused.
_CONSISTENT_EPOCHS = 3

# The losses of a class that is not learned are above chance, as those of a small class are while
# predicting the large ones costs less. It would be skipped as a whole, and never learned. So none
# of its samples is skipped for its loss if more than this share of them would be, and many more
# than of the other classes (docs/results/adaptive.md, "Small classes").
_UNLEARNED_CLASS = 0.5


class Adaptive(BudgetedPolicy):
    """Save a given share of the optimizer steps; the run itself decides which ones.

    Three rules decide:

    1. *Samples that contradict the others are skipped.* These are samples whose loss was above
       chance in each of their last ``patience`` epochs, not counting epochs in which hardly
       anything was learned. Once most samples are learned, samples whose average loss is above
       chance are skipped, too. If logits are recorded, so are samples whose labels are confused
       with another class (``Ranking.confused``), because consistent mistakes have small losses. In
       each epoch, a share of the skipped samples is trained anyway, so that a loss below chance can
       clear them; if rule 2 shortens the epoch, the share shrinks in proportion.

       If labels are wrong, most of the skipped samples are wrongly labelled. If all labels are
       correct, only a few samples stay above chance for ``patience`` epochs, and these are hard
       samples that are worth training. So none is skipped for its loss unless at least the share
       ``evidence`` of all samples is above chance for that long. None is skipped as confused unless
       at least the same share is confused and mistakes were consistent in three epochs in a row. If
       you know that labels are wrong, set ``suspects_after``: the suspects of the ranking are then
       skipped without waiting for consistent mistakes.

       A class that is not learned looks wrong as a whole, such as a small class while the network
       predicts only the large ones. If the labels are known (logits are recorded, or the pruner was
       given labels), such a class is spared: none of its samples is skipped for its loss while more
       than half of them would be, and more than 1.5 times the share of the other classes. In such
       an epoch, no sample is skipped as confused either, unless ``suspects_after`` is set.
    2. *The rest of the budget is saved where the learning rate is small.* If the rate falls in
       steps, an epoch keeps a number of samples in proportion to its rate. If the rate falls
       smoothly, epochs are shortened so that the rate, as a function of the steps, falls as
       1 - u^2, the shape of ``fp.shorter``. During warm-up, epochs are as long as at the largest
       rate.
    3. *A shortened epoch chooses its samples at random, without repeats until all were chosen.*

    The number of optimizer steps of the whole training is exact and known before the start: after
    each epoch, the remaining steps are distributed again. If more samples contradict than the
    budget skips, some of them are trained.

    Args:
        epochs: Number of training epochs.
        save: The share of the optimizer steps to save, in [0, 1).
        rates: The learning rate of each epoch: a sequence of ``epochs`` numbers, a function of the
            progress in epochs (0.0 to ``epochs``), or a torch scheduler that is stepped once per
            epoch. Only the ratios of the rates matter. For rates that change per step, see
            ``Pruner.set_rates``. By default, the rate is constant.
        patience: The number of consecutive epochs with a loss above chance after which a sample is
            skipped; no sample is skipped as confused before this many epochs either. With 0, no
            sample is skipped for its losses or its label.
        returning: The share of the contradicting samples that each epoch trains anyway.
        evidence: The share of all samples that must stay above chance for ``patience`` epochs, or
            be suspects of ``earlier``, before any is skipped for its losses. The same share must be
            confused, or suspects of ``suspects_after``, before any is skipped for its label.
        earlier: The ``LabelWatch`` of an earlier training on the same samples and labels. Its clear
            suspects (``Ranking.to_skip_again``) are skipped from the first epoch on. If none is
            clear, a warning says so, and this training finds samples by their losses, as without an
            earlier one. Otherwise, it skips samples for their losses only if wrong labels can be
            memorised: if the earlier training has learned the other samples (``Ranking.learned``),
            or if this one makes more passes over the data, and never if mistakes are in few pairs
            of classes (``Ranking.confused``).
        suspects_after: The number of epochs after which all suspects are skipped, except in classes
            that are not learned or are rare (``Ranking.to_skip``). Suspects are the samples with a
            positive score in the ranking of the labels, as many as labels are estimated to be
            wrong. Epochs in which hardly anything was learned change nothing. The training loop
            must record logits. By default, only confused samples are skipped.
        chance: The loss of an untrained network, such as ``math.log(classes)``. By default, it is
            the mean loss of the first batch.
        options: The options of every policy; see ``PlanOptions``. The steps of annealed epochs are
            part of the budget, so the other epochs are shortened more.

    Raises:
        InputError: A value is out of range, the earlier training was not recorded, or too many
            epochs are annealed to save that much.
    """

    name: ClassVar[str] = "adaptive"
    _array_names = ("_streaks", "_confused", "_spared", "_chosen")
    needs_losses: bool = True
    of_nonfinite: ClassVar[str] = "count as above chance"

    def __init__(
        self,
        epochs: float,
        save: float = 0.35,
        rates: Rates | None = None,
        *,
        patience: int = 5,
        returning: float = 0.1,
        evidence: float = 0.075,
        earlier: LabelWatch | None = None,
        suspects_after: int | None = None,
        chance: float | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(epochs, save, rates, returning, **options)
        patience = check_whole_number("patience", patience, 0)
        self.evidence = check_share("evidence", evidence)
        if patience > _LONGEST_STREAK:
            raise InputError(f"expected patience of at most {_LONGEST_STREAK}, got {patience}")
        if chance is not None and not (isinstance(chance, Real) and 0 < chance < math.inf):
            raise InputError(f"expected chance as a loss above 0, got {chance!r}")
        if suspects_after is not None:
            suspects_after = check_whole_number("suspects_after", suspects_after, 1)
            if suspects_after >= self.epochs:
                raise InputError(
                    f"expected suspects_after below the {self.epochs} epochs of the training, got "
                    f"{suspects_after}: set it to fewer epochs"
                )
            if not patience:
                raise InputError(
                    f"expected patience of at least 1 with suspects_after={suspects_after}, got 0: "
                    f"with patience=0, no sample is skipped for its label"
                )
        self.patience = patience
        self.suspects_after = suspects_after
        self._given_chance = None if chance is None else float(chance)
        self.needs_ranking = patience > 0
        self.needs_logits = suspects_after is not None
        self._earlier: npt.NDArray[np.bool_] | None = None
        self._num_earlier = 0
        self._above_means_wrong = True
        if earlier is not None:
            self._begin_with(earlier)
        self._forget(0)

    def bind(self, num_samples: int) -> None:
        """Allocate twelve bytes per sample.

        Raises:
            InputError: The earlier training had another number of samples.
        """
        if self._earlier is not None and len(self._earlier) != num_samples:
            raise InputError(
                f"expected earlier=... of a training on the same {num_samples} samples, got one on "
                f"{len(self._earlier)}: if samples were added or removed, give fp.Ranked the "
                f"scores of the current ones"
            )
        self._forget(num_samples)
        super().bind(num_samples)

    def _forget(self, num_samples: int) -> None:
        self._chance = math.nan if self._given_chance is None else self._given_chance
        self._mostly_learned = False
        self._consistent_epochs = 0
        self._ranking: Ranking | None = None
        self._labels: torch.Tensor | None = None
        self._spared: npt.NDArray[np.bool_] = np.zeros(num_samples, dtype=np.bool_)
        # How long each epoch was, as a share of a full one; None for one that was not trained.
        self._lengths: list[float | None] = [None] * self.epochs
        self._streaks: npt.NDArray[np.uint8] = np.zeros(num_samples, dtype=np.uint8)
        self._confused: npt.NDArray[np.bool_] = np.zeros(num_samples, dtype=np.bool_)
        self._chosen: npt.NDArray[np.bool_] = np.zeros(num_samples, dtype=np.bool_)
        self._losses = EpochLosses(num_samples)

    def bind_labels(self, labels: npt.NDArray[np.integer]) -> None:
        """Keep the classes, in as few bytes as their number allows, for when no logits come."""
        if self.needs_ranking:
            classes, numbers = np.unique(labels, return_inverse=True)
            numbers -= np.count_nonzero(classes < 0)
            fewest_bytes = np.min_scalar_type(-len(classes))
            self._labels = torch.from_numpy(numbers.clip(-1).astype(fewest_bytes))

    def planned_numbers(self) -> list[int]:
        """Return how many samples each epoch keeps if only suspects of ``earlier`` contradict."""
        return self._planned(self._num_earlier)

    def num_kept(self, epoch: int) -> int | None:
        """Return None, because the number depends on the samples that contradict the others."""
        return None

    def select(self, epoch: int, num_kept: int | None, rng: np.random.Generator) -> EpochPlan:
        """Choose the samples of an epoch, which fill the steps that it is given."""
        total = self._num_samples
        number = self._number_kept(self._steps_now(epoch))
        if number == total:
            return EpochPlan.full(epoch, total)
        skipped = self._contradicting()
        # Samples with a smaller number are preferred: those that return, those not yet chosen in
        # this round, those chosen already, and the others that contradict.
        order = self._chosen.astype(np.uint8) + np.uint8(1)
        order[skipped] = 3
        returning = self._number_returning(int(np.count_nonzero(skipped)), number)
        if returning:
            order[self._returning(np.flatnonzero(skipped), returning, rng)] = 0
        return EpochPlan(epoch, torch.from_numpy(keep_least_counted(order, number, rng)))

    def observe(self, epoch: int, records: LossRecords) -> None:
        """Take the losses; chance is the mean of the first batch, unless it was given."""
        if math.isnan(self._chance):
            finite = records.batch_means[np.isfinite(records.batch_means)]
            if len(finite):
                self._chance = float(finite[0])
                self._check_chance()
        self._losses.observe(records)

    def merge(self, replicas: Replicas) -> None:
        """Take the losses of all ranks."""
        self._losses.merge(replicas)

    def observe_ranking(self, epoch: int, ranking: Ranking) -> None:
        """Keep what ``end_epoch`` decides on, once it knows whether most samples are learned."""
        self._ranking = ranking

    def end_epoch(self, epoch: int) -> None:
        """Lengthen or clear the streaks of the trained samples, and charge the epoch's steps."""
        steps = self._steps_now(epoch)
        number = self._number_kept(steps)
        if number < len(self._streaks):
            self._note_chosen(number)
        losses = self._losses.values.numpy()
        mean = self._losses.mean(self._chance)
        if mean < 0 and self.patience and self._chance < math.inf:
            warn_user(
                f"the losses of epoch {epoch} have a mean of {mean:.3g}, so they do not tell what "
                f"was learned, and no sample is skipped for its loss any more: give Adaptive "
                f"patience=0 if losses may be negative"
            )
            self._chance = math.inf
        above = losses > np.float32(self._chance)  # A loss that is not finite is above chance.
        self._streaks *= above  # An untrained sample keeps its streak, because it has infinity.
        learned = mean < _LEARNED * self._chance
        if learned:
            add_marks(self._streaks, above & (losses < np.inf))
        self._mostly_learned |= mean < _MOSTLY_LEARNED * self._chance
        self._losses.end_epoch()
        ranking, self._ranking = self._ranking, None
        labels = self._labels
        if ranking is not None:
            self._note_confused(epoch, learned, ranking)
            labels = ranking.labels.cpu()
        if labels is not None:
            # Earlier suspects are skipped all the same.
            counted = None if self._earlier is None else torch.from_numpy(~self._earlier)
            marked = torch.from_numpy(self._above_chance())
            spared = of_unlearned_classes(labels.long(), marked, _UNLEARNED_CLASS, counted)
            self._spared = spared.numpy()
        self._lengths[epoch] = steps / self._full_steps

    @property
    def counts(self) -> torch.Tensor:
        """Number of epochs in a row with a loss above chance, uint8, shape (N,), a copy."""
        return torch.from_numpy(self._streaks.copy())

    def suspicion(self) -> torch.Tensor:
        """Return the moving average of each sample's loss, float32, shape (N,).

        It ranks wrong labels better than the streaks that decide which samples are skipped, because
        many samples have equal streaks.
        """
        return self._losses.averages.clone()

    def num_suspects(self) -> int | None:
        """Return how many samples contradict; None if ``patience`` is 0 and ``earlier`` is None."""
        if not len(self._streaks):  # No pruner has bound this policy.
            return None if self._earlier is None else self._num_earlier
        known = self.patience or self._earlier is not None
        return self._number_contradicting() if known else None

    def advice(self, epochs: int, cost: FullCost) -> list[str]:
        """Say which way of saving steps fits best, based on the contradicting samples."""
        if not 0 < self.patience <= epochs or self._chance == math.inf:
            return []
        found = self._number_contradicting()
        return advice_of_losses(
            found, self._num_samples, self.patience, cost, has_classes=self._labels is not None
        )

    def settings(self) -> dict[str, Any]:
        """Return the arguments and a digest of earlier suspects, with which a state must agree."""
        begun = {}
        if self._earlier is not None:
            begun["earlier"] = hashlib.sha256(self._earlier.tobytes()).hexdigest()
        return {
            **super().settings(),
            "patience": self.patience,
            "evidence": self.evidence,
            **begun,
            "suspects_after": self.suspects_after,
            "chance": self._given_chance,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return what decides on samples to skip, those chosen already, and the epochs' lengths."""
        return {
            **super().state_dict(),
            "consistent_epochs": self._consistent_epochs,
            "lengths": list(self._lengths),
            "chance": self._chance,
            "mostly_learned": self._mostly_learned,
            "losses": self._losses.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state. If the size of a step has changed, shares of epochs are kept."""
        super().load_state_dict(state)
        self._consistent_epochs = state["consistent_epochs"]
        self._lengths = list(state["lengths"])
        self._chance = state["chance"]
        self._mostly_learned = state["mostly_learned"]
        self._losses.load_state_dict(state["losses"])

    # -- internals ----------------------------------------------------------------------------

    def _check_chance(self) -> None:
        # Shares of it tell how much was learned, which means nothing if losses may be negative.
        if self._chance < 0 and self.patience:
            raise InputError(
                f"expected losses of at least 0, such as cross-entropies, got a first batch whose "
                f"mean is {self._chance:.3g}: give Adaptive patience=0, so that no sample is "
                f"skipped for its loss"
            )

    def _begin_with(self, watch: LabelWatch) -> None:
        """Take the suspects and the labels of an earlier training."""
        if not isinstance(watch, LabelWatch):
            raise InputError(
                f"expected earlier as the LabelWatch of another training, got "
                f"{type(watch).__name__}: to use scores of your own, give them to fp.Ranked"
            )
        ranking = watch.ranking()
        doubt = doubt_of(ranking)
        if doubt:
            warn_user(doubt)
        self._earlier = ranking.to_skip_again.cpu().numpy()
        self._num_earlier = int(np.count_nonzero(self._earlier))
        if self._num_earlier == len(self._earlier):
            raise InputError("expected some samples that are not suspects, got none in earlier=...")
        # Other samples above chance are hard ones, which a network needs that could not learn them
        # before. One that has learned nearly everything, or is trained longer, loses more by wrong
        # labels than by hard samples (docs/results/second-training.md). The losses of confused
        # labels are small.
        longer = self.epochs * (1 - self.save) > _LONGER * watch.passes
        memorises = (ranking.learned or longer) and not bool(ranking.confused.any())
        self._above_means_wrong = memorises or doubt is not None
        self.known_labels = watch.labels()

    def _contradicting(self) -> npt.NDArray[np.bool_]:
        """Return a mask of the samples to skip, as far as the budget allows it."""
        contradicting = np.zeros(len(self._streaks), dtype=np.bool_)
        if self._earlier is not None:
            contradicting |= self._earlier
        if not self.patience:
            return contradicting
        enough = self.evidence * len(contradicting)
        often_above = (self._streaks >= self.patience) & ~self._spared
        # Suspects of an earlier training are evidence, too: where it has memorised labels, hardly
        # as many others are above chance as without it (docs/results/second-training.md).
        found = np.count_nonzero(often_above | contradicting)
        if self._above_means_wrong and found >= enough:
            contradicting |= self._above_chance() & ~self._spared
        # An unlearned class looks as if it was confused, too.
        confusable = self.suspects_after is not None or not self._spared.any()
        if confusable and np.count_nonzero(self._confused) >= enough:
            contradicting |= self._confused
        return contradicting

    def _above_chance(self) -> npt.NDArray[np.bool_]:
        """Return a mask of the samples that contradict by their losses."""
        above = self._streaks >= self.patience
        if self._mostly_learned:
            above |= self._losses.averages.numpy() > np.float32(self._chance)
        return above

    def _returning(
        self, skipped: npt.NDArray[np.int64], number: int, rng: np.random.Generator
    ) -> npt.NDArray[np.int64]:
        """Choose skipped samples at random, at first earlier suspects that were never trained."""
        if self._earlier is None:
            return rng.choice(skipped, number, replace=False)
        never = np.isnan(self._losses.averages.numpy()[skipped])
        first, others = skipped[never], skipped[~never]
        if len(first) >= number:
            return rng.choice(first, number, replace=False)
        return np.concatenate([first, rng.choice(others, number - len(first), replace=False)])

    def _note_confused(self, epoch: int, learned: bool, ranking: Ranking) -> None:
        """Note the confused samples, as soon as mistakes are known to be consistent.

        Before most samples are learned, and if the labels are correct, they are merely hard. No
        evidence tells these from mistakes of hard samples (docs/results/resnet9.md), so the user
        says by ``suspects_after`` that there are mistakes.
        """
        consistent = self._mostly_learned and ranking.consistent
        self._consistent_epochs = self._consistent_epochs + 1 if consistent else 0
        begins = epoch + 1 >= self.patience and self._consistent_epochs >= _CONSISTENT_EPOCHS
        if self.suspects_after is not None and epoch + 1 >= self.suspects_after:
            if learned:
                self._confused = ranking.to_skip.cpu().numpy()
        elif begins or self._confused.any():
            self._confused = ranking.confused.cpu().numpy()

    def _number_contradicting(self) -> int:
        return int(np.count_nonzero(self._contradicting()))

    def steps_before(self, epoch: int) -> int:
        """Return the number of steps that the epochs before this one used.

        Epochs that were left out count as if they had been trained as planned.
        """
        used = 0
        for earlier, length in enumerate(self._lengths[:epoch]):
            if length is None:
                used += self._steps(earlier, used, self._num_earlier)
            else:
                used += round(length * self._full_steps)
        return used

    def _steps_now(self, epoch: int) -> int:
        """Return the number of steps of an epoch, after those that were trained before it."""
        return self._steps(epoch, self.steps_before(epoch), self._number_contradicting())

    def _note_chosen(self, number: int) -> None:
        """Note the ``number`` samples of a shortened epoch; begin a new round after the last."""
        trained = self._losses.values.numpy() < np.inf
        skipped = self._contradicting()
        left = np.count_nonzero(~(self._chosen | skipped))
        returning = self._number_returning(int(np.count_nonzero(skipped)), number)
        # Samples that the loop leaves out of its batches are chosen, too, and never trained.
        if left <= number - returning:
            self._chosen &= trained
        else:
            self._chosen |= trained
