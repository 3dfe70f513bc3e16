"""Policy: how many samples an epoch keeps, which ones, and what it learns from their losses.

This is the interface of every method that skips samples. A policy of your own is a subclass that
implements ``num_kept`` and ``select``, and also ``observe`` and ``end_epoch`` if it learns from
losses. All ranks must learn the same; see ``Policy.merge``.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, ClassVar, Unpack

import numpy as np
import numpy.typing as npt
import torch

from fineprune.errors import InputError, check_whole_number
from fineprune.labels.ranking import Ranking
from fineprune.pruning.learning_rates import Rates
from fineprune.pruning.plan import EpochPlan
from fineprune.pruning.plan_options import NAMES, Options, PlanOptions
from fineprune.pruning.replicas import Replicas


@dataclass(frozen=True, eq=False)
class LossRecords:
    """The losses of some batches of one epoch, batch after batch.

    Attributes:
        index: The sample of each loss, int64, shape (n,). A sample that was trained several times
            occurs several times.
        losses: The losses, float32, shape (n,). Some may be NaN or infinite.
        batch_means: The mean of the finite losses of each loss's batch over all ranks, float64,
            shape (n,); NaN if no loss of the batch was finite.
    """

    index: npt.NDArray[np.int64]
    losses: npt.NDArray[np.float32]
    batch_means: npt.NDArray[np.float64]


class Policy(ABC):
    """A method of choosing the samples of each epoch.

    A ``Pruner`` works on its own copy, so one policy object may be given to several pruners.

    Args:
        epochs: Number of training epochs. A subclass may override the property ``epochs`` instead.
        options: The options that every policy takes, ``anneal`` and ``rescale``; see
            ``PlanOptions``. Both are off in a subclass that does not call this constructor.

    Attributes:
        name: The name of the policy in recipes and tables.
        needs_losses: Whether ``observe`` is called. If it is not, recording costs nothing.
        needs_ranking: Whether ``observe_ranking`` is called if the training loop records logits.
        needs_logits: Whether the training loop must record logits.
        plan_options: The options, which ``Pruner`` applies to the plans of the policy.
        of_nonfinite: What happens to losses that are NaN or infinite, for a warning.

    Raises:
        InputError: A value is out of range.
    """

    name: ClassVar[str]
    _setting_names: ClassVar[tuple[str, ...]] = ()
    _array_names: ClassVar[tuple[str, ...]] = ()
    needs_losses: bool = False
    needs_ranking: bool = False
    needs_logits: bool = False
    of_nonfinite: ClassVar[str] = "were left out"
    plan_options: PlanOptions = PlanOptions()
    _num_samples = _seed = 0

    def __init__(self, epochs: float | None = None, **options: Unpack[Options]) -> None:
        if epochs is not None:
            # Some trainers have the number of epochs as a float, such as 3.0.
            whole = int(epochs) if isinstance(epochs, float) and epochs.is_integer() else epochs
            self._epochs = check_whole_number("epochs", whole, 1)
        if unknown := options.keys() - {*NAMES}:
            raise InputError(
                f"expected the options of every policy, {', '.join(NAMES)}, got "
                f"{', '.join(sorted(unknown))}"
            )
        self.plan_options = PlanOptions(**options)

    @property
    def uses_labels(self) -> bool:
        """Whether the policy depends on labels that are given before the training."""
        return self.needs_ranking

    @property
    def epochs(self) -> int:
        """Number of training epochs."""
        return self._epochs

    @property
    def _annealed(self) -> int:
        """Number of last epochs that train all samples because of ``anneal``."""
        # Rounded up, except for an error such as that of 0.07 * 100 = 7.000000000000001.
        return math.ceil(self.plan_options.anneal * self.epochs - 1e-9)

    def anneals(self, epoch: int) -> bool:
        """Return whether ``epoch`` (counted from 0) trains all samples because of ``anneal``.

        ``num_kept`` and ``select`` are not called for such an epoch.
        """
        return epoch >= self.epochs - self._annealed

    @property
    def without_rates(self) -> str | None:
        """What the policy assumes because it was given no learning rates, for a warning.

        None if it uses no rates or was given them.
        """
        return None

    def set_rates(self, rates: Rates, by: str = "epochs") -> None:
        """Receive the learning rates of the training; see ``Pruner.set_rates``.

        Raises:
            InputError: The policy takes no learning rates, or they do not fit.
        """
        raise InputError(
            f"expected a policy that uses learning rates, got {self.name!r}, which uses none"
        )

    def bind(self, num_samples: int) -> None:
        """Receive the number of samples, before any other method, and forget all that was learned.

        Raises:
            InputError: The policy cannot work with so few samples.
        """
        self._num_samples = num_samples

    def bind_steps(self, samples_per_step: int, steps_per_full_epoch: int) -> None:  # noqa: B027
        """Receive the size of an optimizer step, after ``bind``, to plan in whole steps.

        Args:
            samples_per_step: Number of samples per optimizer step of all ranks. If the batch size
                is not known, this is the number of ranks.
            steps_per_full_epoch: Number of steps of an epoch that trains all samples; 0 if each
                rank has less than one batch and ``drop_last`` leaves it out.
        """

    def bind_labels(self, labels: npt.NDArray[np.integer]) -> None:  # noqa: B027
        """Receive the label of each sample, after ``bind``, if the data set or the user gives them.

        Args:
            labels: Any integers, shape (N,); negative ones are unknown. The same on all ranks.
        """

    def bind_seed(self, seed: int) -> None:
        """Receive the seed of the run, after ``bind``, for random choices that span epochs.

        Within one epoch, ``select`` draws from its argument ``rng`` only.
        """
        self._seed = seed

    @property
    def total_steps(self) -> int | None:
        """Number of optimizer steps of the whole training, if it is fixed although the lengths of
        single epochs depend on data; else None."""
        return None

    def steps_before(self, epoch: int) -> int | None:
        """Number of optimizer steps of all epochs before ``epoch``, if the lengths of single epochs
        depend on data and ``total_steps`` is fixed; else None."""
        return None

    def planned_numbers(self) -> list[int] | None:
        """Return how many samples each epoch keeps if nothing is learned from the losses.

        A policy with ``total_steps`` may return None. The numbers are then found by choosing the
        samples of every epoch, in a time proportional to the number of samples.
        """
        return None

    @abstractmethod
    def num_kept(self, epoch: int) -> int | None:
        """Return how many samples ``epoch`` (counted from 0) keeps; None if it depends on data.

        The result must depend on the epoch only, because step counts and learning rates are planned
        from it.
        """

    @abstractmethod
    def select(self, epoch: int, num_kept: int | None, rng: np.random.Generator) -> EpochPlan:
        """Choose the samples of an epoch that skips some.

        Args:
            epoch: The epoch, counted from 0.
            num_kept: The number of samples to keep: ``num_kept(epoch)``, rounded up to whole
                batches over all ranks; None if it depends on data.
            rng: The random stream of this epoch, which is the same on every rank.
        """

    def observe(self, epoch: int, records: LossRecords) -> None:  # noqa: B027
        """Observe losses of ``epoch``. This is called any number of times before ``end_epoch``.

        Args:
            epoch: The epoch, counted from 0.
            records: The losses that all ranks recorded since the last call, the same on every rank;
                only those of this rank if the policy implements ``merge``.
        """

    def merge(self, replicas: Replicas) -> None:  # noqa: B027
        """Exchange the observations of all ranks, so that every rank has all of them.

        Implement this method if the policy can exchange less than all losses, for example one mark
        per sample. Otherwise, ``observe`` receives the losses of all ranks, for which each rank
        needs 20 bytes per sample that any rank trained. The method is called on every rank after
        each ``observe``.
        """

    def observe_ranking(self, epoch: int, ranking: Ranking) -> None:  # noqa: B027
        """Observe which labels the logits of all ranks contradict, right before ``end_epoch``.

        Args:
            epoch: The epoch, counted from 0.
            ranking: The ranking by all logits of the training so far, the same on every rank.
        """

    def end_epoch(self, epoch: int) -> None:  # noqa: B027
        """Commit what was observed. Before this call, ``select`` must not depend on it."""

    @property
    def counts(self) -> torch.Tensor | None:
        """DroppingCounts, integers, shape (N,); None if the policy does not count."""
        return None

    def suspicion(self) -> torch.Tensor | None:
        """Return how strongly the policy suspects each sample of a wrong label.

        Returns:
            One value per sample, larger for more suspicious ones; float32, shape (N,), a copy. None
            if the policy suspects no samples.
        """
        return None

    def suspects(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the samples in the order in which their labels should be checked.

        The network contradicts the labels of the first ones most. If labels are wrong, these are
        mostly wrong ones; if all are correct, these are the hardest or least typical samples.

        Returns:
            The indices of the samples, the most suspicious first, int64, shape (n,), and the
            suspicion of each, float32, shape (n,). Samples without a loss so far are left out.

        Raises:
            InputError: The policy suspects no samples, because it learns nothing from losses.
        """
        suspicion = self.suspicion()
        if suspicion is None:
            raise InputError(
                f"expected a policy that learns from losses, got {self.name!r}, which suspects no "
                f"samples: use Adaptive, which skips nothing with save=0"
            )
        known = (~suspicion.isnan()).nonzero().flatten()
        order = suspicion[known].argsort(descending=True, stable=True)
        return known[order], suspicion[known[order]]

    def num_suspects(self) -> int | None:
        """Return how many samples the policy would skip now as the most suspicious ones.

        None if the policy names no suspects.
        """
        return None

    def settings(self) -> dict[str, Any]:
        """Return what a saved state must agree with: the name, and what ``_setting_names`` lists.

        These are numbers, strings, and lists, tuples and dicts of them.
        """
        return {"policy": self.name, **{name: getattr(self, name) for name in self._setting_names}}

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned: tensors, numbers, strings, and lists, tuples and dicts of them.

        These are copies of the arrays that ``_array_names`` lists, by their names. Those of bools
        are packed as bits.
        """
        state = {}
        for name in self._array_names:
            array = getattr(self, name)
            packed = np.packbits(array) if array.dtype == np.bool_ else array.copy()
            state[name.lstrip("_")] = torch.from_numpy(packed)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the result of ``state_dict``. This is called after ``bind``."""
        for name in self._array_names:
            array, before = state[name.lstrip("_")].numpy(), getattr(self, name)
            if before.dtype == np.bool_:
                array = np.unpackbits(array, count=len(before)).view(np.bool_)
            setattr(self, name, array.copy())


def check_is_policy(policy: object) -> None:
    """Raise TypeError unless ``policy`` is a ``Policy`` with a name and a number of epochs."""
    if not isinstance(policy, Policy):
        given = (
            f"the class {policy.__name__}" if isinstance(policy, type) else type(policy).__name__
        )
        raise TypeError(f"expected a policy such as Adaptive(epochs), got {given}")
    if not isinstance(getattr(policy, "name", None), str):
        raise TypeError(
            f"expected a policy with a name, got {type(policy).__name__}: set its class attribute "
            f"name to a string"
        )
    if getattr(policy, "epochs", None) is None:
        raise TypeError(
            f"expected a policy with a number of epochs, got {type(policy).__name__}: call "
            f"super().__init__(epochs)"
        )


def prune_count(prune: float, num_samples: int, name: str = "prune") -> int:
    """Return the number of samples that a pruning epoch skips.

    Args:
        prune: The share of all samples to skip, in [0, 1), or their number as an int.
        num_samples: Number of samples N in the data set.
        name: The name of the argument, for errors.
    """
    # The small addend prevents 0.29 * 100 = 28.999999999999996 from losing a sample.
    number = prune if isinstance(prune, int) else int(prune * num_samples + 1e-9)
    if number >= num_samples:
        raise InputError(
            f"expected {name} to leave at least one of {num_samples} samples, got {prune}"
        )
    return number


def checked_prune(prune: float, name: str = "prune") -> float:
    """Return a share or a number of samples as a Python float or int."""
    if isinstance(prune, Integral) and not isinstance(prune, bool) and prune >= 0:
        return int(prune)
    if isinstance(prune, Real) and not isinstance(prune, Integral) and 0 <= prune < 1:
        return float(prune)
    raise InputError(
        f"expected {name} as a share in [0, 1) or a whole number of samples, got {prune!r}"
    )
