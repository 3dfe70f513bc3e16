"""Policy: how many samples an epoch keeps, which, and what is learned from their losses.

The contract for every method of skipping. A policy of your own is a subclass with ``num_kept`` and
``select``; ``observe``, ``merge`` and ``end_epoch`` where it learns from losses.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from fineprune.errors import InputError
from fineprune.pruning.plan import EpochPlan
from fineprune.pruning.replicas import Replicas


@dataclass(frozen=True, eq=False)
class LossRecords:
    """Losses of whole batches of one epoch, as this rank trained them.

    Attributes:
        index: int64, shape (n,); a sample that was repeated stands here as often.
        losses: float32, shape (n,); may hold values that are not finite.
        batch_means: float64, shape (n,): the mean of the finite losses of each loss's batch, over
            all ranks; NaN where none was finite.
    """

    index: npt.NDArray[np.int64]
    losses: npt.NDArray[np.float32]
    batch_means: npt.NDArray[np.float64]


class Policy(ABC):
    """One method of choosing an epoch's samples.

    ``Pruner`` works on a copy of its own, so one policy object may serve several pruners.

    Attributes:
        name: the name in recipes and tables.
        needs_losses: whether ``observe`` is to be called; without it recording costs nothing.
    """

    name: ClassVar[str]
    needs_losses: ClassVar[bool] = False

    @property
    @abstractmethod
    def epochs(self) -> int:
        """Length of the training, in epochs."""

    def bind(self, num_samples: int) -> None:  # noqa: B027 (learning nothing is a policy too)
        """Learn the number of samples, once; raise InputError where the policy cannot work."""

    @abstractmethod
    def num_kept(self, epoch: int) -> int | None:
        """Return how many samples ``epoch`` (from 0) keeps, or None where that depends on data.

        It must depend on the epoch alone: step counts and learning rates are planned with it.
        """

    @abstractmethod
    def select(self, epoch: int, num_kept: int | None, rng: np.random.Generator) -> EpochPlan:
        """Choose the samples of an epoch that skips some.

        Args:
            epoch: counted from 0.
            num_kept: ``num_kept(epoch)`` rounded up to whole batches over all ranks.
            rng: this epoch's stream for ties and chance, the same on every rank.
        """

    def observe(self, epoch: int, records: LossRecords) -> None:  # noqa: B027
        """Take in losses of this epoch; called any number of times before ``end_epoch``."""

    def merge(self, replicas: Replicas) -> None:  # noqa: B027
        """Exchange with all ranks what was observed, so that every rank knows all of it."""

    def end_epoch(self, epoch: int) -> None:  # noqa: B027
        """Commit what was observed; only from here on may ``select`` see it."""

    def open_window(self, epoch: int) -> None:
        """Make the end of ``epoch`` the start of a new window, where the policy has windows.

        Raises:
            InputError: the policy has none.
        """
        raise InputError(f"expected a policy with windows, got {self.name!r}, which has none")

    @property
    def counts(self) -> torch.Tensor | None:
        """DroppingCounts, integers, shape (N,), where the policy keeps them; else None."""
        return None

    def settings(self) -> dict[str, Any]:
        """Return what a saved state must agree with: numbers, strings and lists only."""
        return {"policy": self.name}

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned: tensors, numbers, strings, lists and dicts only."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Take up what ``state_dict`` returned; called after ``bind``."""


def prune_count(prune: float, num_samples: int) -> int:
    """Return the number of samples that a pruning epoch skips.

    Args:
        prune: a share in [0, 1) of all samples, or their whole number.
        num_samples: N.

    Raises:
        InputError: everything, or more, would be skipped.
    """
    # The small addend keeps a share such as 0.29 of 100 from losing a sample to rounding.
    number = prune if isinstance(prune, int) else int(prune * num_samples + 1e-9)
    if number >= num_samples:
        raise InputError(
            f"expected prune to leave at least one of {num_samples} samples, got {prune}"
        )
    return number


def checked_prune(prune: float) -> float:
    """Return ``prune`` as Python's own number.

    Raises:
        InputError: it is neither a share in [0, 1) nor a whole number from 0 on.
    """
    if isinstance(prune, Integral) and not isinstance(prune, bool) and prune >= 0:
        return int(prune)
    if isinstance(prune, Real) and not isinstance(prune, Integral) and 0 <= prune < 1:
        return float(prune)
    raise InputError(
        f"expected prune as a share in [0, 1) or a whole number of samples, got {prune!r}"
    )
