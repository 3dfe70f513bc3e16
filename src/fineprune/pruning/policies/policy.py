"""Policy: how many samples each epoch trains, which ones, and what is learned from their losses.

An own policy is a subclass with ``select``, and with ``learn`` if it learns from losses
(``examples/own_policy.py``).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from fineprune.errors import InputError, check_whole_number
from fineprune.labels.ranking import Ranking
from fineprune.pruning.dropping_count import exceeds
from fineprune.pruning.plan import EpochPlan

if TYPE_CHECKING:  # It imports this module.
    from fineprune.pruning.policies.step_budget import StepBudget

# One value per loss or sample: a loss, the mean of its batch, and whether it exceeds this mean.
Losses = npt.NDArray[np.float32]
Means = npt.NDArray[np.float64]
Marks = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Training:
    """What a policy is told of the training before it begins.

    Attributes:
        num_samples: Number of samples N.
        samples_per_step: Number of samples per optimizer step of all ranks; the number of ranks if
            the batch size is not known.
        steps_per_epoch: Number of steps of an epoch that trains all samples; 0 if ``drop_last``
            drops the only batch of each rank.
        seed: The seed of the run, for random choices that span epochs.
    """

    num_samples: int
    samples_per_step: int = 1
    steps_per_epoch: int = 0
    seed: int = 0


class Policy(ABC):
    """A method of choosing the samples of each epoch. All ranks learn the same.

    Args:
        epochs: Number of training epochs. A subclass may override the property ``epochs`` instead.

    Attributes:
        name: The name of the policy in recipes and tables.
        needs_losses: Whether ``learn`` uses the losses.
        needs_marks: Whether ``learn`` uses which losses exceeded the mean of their batch.
        needs_ranking: Whether ``learn`` uses the ranking of the labels, if logits are recorded.
        budget: Steps that learning rates distribute over the epochs; None if there are none.
        setting_names: The attributes that a saved state must agree with.
        array_names: The NumPy arrays of learned values that are saved, one value per sample. The
            state leaves out leading underscores.

    Raises:
        InputError: A value is out of range.
    """

    name: ClassVar[str]
    setting_names: ClassVar[tuple[str, ...]] = ()
    array_names: ClassVar[tuple[str, ...]] = ()
    needs_losses: bool = False
    needs_marks: bool = False
    needs_ranking: bool = False
    budget: "StepBudget | None" = None
    _num_samples = _seed = 0

    def __init__(self, epochs: float) -> None:
        # Some trainers have the number of epochs as a float, such as 3.0.
        whole = int(epochs) if isinstance(epochs, float) and epochs.is_integer() else epochs
        self._epochs = check_whole_number("epochs", whole, 1)

    @property
    def epochs(self) -> int:
        """Number of training epochs."""
        return self._epochs

    @property
    def learns_from_losses(self) -> bool:
        """Whether ``learn`` uses what is recorded. If it does not, recording costs nothing."""
        return self.needs_losses or self.needs_marks

    def begin(self, training: Training) -> None:
        """Receive the size of the training, before any other method, and forget what was learned.

        Raises:
            InputError: The policy cannot work with so few samples or so large steps.
        """
        self._num_samples, self._seed = training.num_samples, training.seed

    def lengths(self) -> list[int] | None:
        """Return how many samples each epoch keeps, before it is rounded up to whole steps.

        None if this depends on what is learned; ``select`` is then free in its number.
        """
        return None

    @abstractmethod
    def select(self, epoch: int, number: int | None, rng: np.random.Generator) -> EpochPlan:
        """Choose the samples of an epoch. With ``lengths``, it is not called for full epochs.

        Args:
            epoch: The epoch, counted from 0.
            number: How many samples to keep: that of ``lengths``, rounded up to whole steps; None
                without ``lengths``.
            rng: The random stream of this epoch, the same on every rank.
        """

    def exceeds(self, losses: Losses, means: Means) -> Marks:
        """Return which losses count as above the mean of their batch, shape (n,) as both arguments.

        By default, those larger than the mean count (Li et al., NPC 2018, Algorithm 1, line 5). NaN
        and infinite losses, and those of a batch whose mean is NaN, must not count.
        """
        return exceeds(losses, means, 0.0)

    def learn(  # noqa: B027
        self, epoch: int, losses: Losses | None, above_mean: Marks | None, ranking: Ranking | None
    ) -> None:
        """Learn from an epoch that has ended. The arguments are the same on every rank.

        Args:
            epoch: The epoch, counted from 0.
            losses: The last loss of each sample, float32, shape (N,): NaN if it was not trained,
                infinity if its loss was not finite. None without ``needs_losses``.
            above_mean: Whether a loss of each sample exceeded the mean of its batch, bool, shape
                (N,). None without ``needs_marks``.
            ranking: The ranking of the labels by all logits so far; None without ``needs_ranking``
                or without logits.
        """

    @property
    def counts(self) -> torch.Tensor | None:
        """DroppingCounts, integers, shape (N,); None if the policy does not count."""
        return None

    @property
    def without_rates(self) -> bool:
        """Whether the policy needs learning rates, and takes them to be constant without any."""
        return self.budget is not None and not self.budget.has_rates

    def settings(self) -> dict[str, Any]:
        """Return what a saved state must agree with: numbers, strings, and lists and dicts of them.

        By default, these are the name and what ``setting_names`` lists.
        """
        return {"policy": self.name, **{name: getattr(self, name) for name in self.setting_names}}

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned: tensors, numbers, strings, and lists and dicts of them.

        By default, these are the arrays that ``array_names`` lists, those of bools as bits.
        """
        state = {}
        for name in self.array_names:
            array = getattr(self, name)
            packed = np.packbits(array) if array.dtype == np.bool_ else array.copy()
            state[name.lstrip("_")] = torch.from_numpy(packed)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the result of ``state_dict``. This is called after ``begin``."""
        for name in self.array_names:
            array, before = state[name.lstrip("_")].numpy(), getattr(self, name)
            if before.dtype == np.bool_:
                array = np.unpackbits(array, count=len(before)).view(np.bool_)
            setattr(self, name, array.copy())


def check_is_policy(policy: object) -> None:
    """Raise TypeError unless ``policy`` is a ``Policy`` with a name."""
    if not isinstance(policy, Policy) or not isinstance(getattr(policy, "name", None), str):
        got = f"the class {policy.__name__}" if isinstance(policy, type) else type(policy).__name__
        raise TypeError(
            f"expected a policy such as Adaptive(epochs) with a name, got {got}: make an object of "
            f"the class, and set the class attribute name of your own to a string"
        )


def prune_count(prune: float, num_samples: int) -> int:
    """Return how many of N samples are skipped, of which ``prune`` is the share or the number.

    Raises:
        InputError: This leaves no sample.
    """
    # The small addend prevents 0.29 * 100 = 28.999999999999996 from losing a sample.
    number = prune if isinstance(prune, int) else int(prune * num_samples + 1e-9)
    if number >= num_samples:
        raise InputError(
            f"expected prune to leave at least one of {num_samples} samples, got {prune}"
        )
    return number


def checked_prune(prune: float) -> float:
    """Return a share of the samples as a float of Python, or a number of samples as an int."""
    if isinstance(prune, Integral) and not isinstance(prune, bool) and prune >= 0:
        return int(prune)
    if isinstance(prune, Real) and not isinstance(prune, Integral) and 0 <= prune < 1:
        return float(prune)
    raise InputError(
        f"expected prune as a share in [0, 1) or a whole number of samples, got {prune!r}"
    )
