"""ShardedPruner: a pruner whose ranks each know the counts of their own samples only."""

import copy
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from fineprune.errors import InputError, check_whole_number
from fineprune.pruning.indexed import Indexed, indexed_and_length
from fineprune.pruning.loader import PrunedLoaders
from fineprune.pruning.loss_recorder import check_batch
from fineprune.pruning.plan_options import NAMES, PlanOptions
from fineprune.pruning.policies.fine_pruning import FinePruning
from fineprune.pruning.policies.full import FullData
from fineprune.pruning.policies.policy import Policy
from fineprune.pruning.policies.random import RandomPruning
from fineprune.pruning.position import Position
from fineprune.pruning.pruner_state import check_state, unsynchronized
from fineprune.pruning.replicas import Replicas
from fineprune.pruning.sample_counts import SampleCounts
from fineprune.pruning.sharded.recorder import ShardedRecorder
from fineprune.pruning.sharded.sampler import ShardedSampler
from fineprune.pruning.sharded.selection import MOST_TIES, full_share, pruned_share
from fineprune.pruning.sharded.share import Share, owned_samples
from fineprune.pruning.step_counts import (
    BatchShape,
    batches_of,
    check_epoch,
    check_rounding,
    num_kept,
    steps_of,
    total_steps,
)

STATE_VERSION = 1

_KEYS = ("epoch", "open", "batches", "samples", "nonfinite", "kept", "foreign", "learned")


class ShardedPruner:
    """Decides which samples each epoch trains on, for more samples than one process should count.

    Rank r of R owns the samples from ``r * N // R`` to ``(r + 1) * N // R - 1``, and holds the
    counts and marks of these only (two bytes each, plus four bytes for each that an epoch keeps).
    The rule is that of ``FinePruning``: the samples with the smallest counts of all ranks are kept,
    and ties are broken uniformly at random. Each rank trains the samples that it owns, in a random
    order. Ranks that keep more samples than others hand some over, so that all ranks train equally
    many.

    The training loop is that of ``Pruner``. These calls exchange data, so every rank must make them
    at the same time: the constructor, ``set_epoch`` and each pass of the loop over ``epochs()``,
    ``end_epoch``, ``synchronize``, ``load_state_dict`` and, once in a million losses, ``record``.

    Args:
        dataset_or_length: The data set (map-style) of all ranks together, or its number of samples
            N, at least one per rank. Indices of the samples are those of this data set.
        policy: ``FinePruning``, ``RandomPruning`` or ``FullData``, without options.
        seed: Seeds the order of the samples and the random choice among ties.
        batch_size: Number of samples per batch and rank.
        accumulation: Number of batches per optimizer step.
        drop_last: Whether an incomplete last batch is dropped.
        process_group: The group whose ranks share the samples. The default is the initialised
            world.

    Attributes:
        sampler: The sampler of this rank.
        owned: The samples that this rank owns, as a range.
        nonfinite: Number of losses that all ranks together recorded in the last epoch that ended
            and that were NaN or infinite. It is 0 if the policy needs no losses.

    Raises:
        InputError: A value is out of range or differs between the ranks, the policy is another one
            or has options, rounding to whole batches would skip nothing, or this process does not
            belong to ``process_group``.
        TypeError: The data set is not map-style, or the policy is not a ``Policy``.
        RuntimeError: ``WORLD_SIZE`` is above 1, but no process group is initialised.
    """

    def __init__(
        self,
        dataset_or_length: Any,
        policy: Policy,
        *,
        seed: int = 0,
        batch_size: int,
        accumulation: int = 1,
        drop_last: bool = False,
        process_group: Any = None,
    ) -> None:
        _check_policy(policy)
        self._dataset, self._num_samples = indexed_and_length(dataset_or_length)
        self._replicas = Replicas(process_group)
        check_whole_number("the number of samples", self._num_samples, self._replicas.size)
        check_whole_number("seed", seed, 0)
        check_whole_number("batch_size", batch_size, 1)
        self._shape = BatchShape(batch_size, accumulation, self._replicas.size, drop_last)
        self._seed = seed
        self.owned = owned_samples(self._num_samples, self._replicas.size, self._replicas.rank)
        if len(self.owned) >= MOST_TIES:
            raise InputError(
                f"expected fewer than {MOST_TIES} samples per rank, got {len(self.owned)}: use "
                f"more ranks"
            )
        self._agreed = {
            "version": STATE_VERSION,
            "num_samples": self._num_samples,
            "seed": seed,
            "settings": policy.settings(),
            "num_replicas": self._replicas.size,
        }
        self._check_agreement(
            [self._agreed, batch_size, accumulation, drop_last],
            "the same number of samples (of all ranks together), policy, seed, batch_size, "
            "accumulation and drop_last",
        )
        self._name = policy.name
        self._counts: SampleCounts | None = None
        tolerance = 0.0
        if isinstance(policy, FinePruning):
            self._counts = SampleCounts(len(self.owned), policy.schedule.longest_window)
            tolerance = policy.tolerance
            # It keeps as many samples in each epoch, and holds no counts of all samples.
            policy = RandomPruning(policy.schedule, policy.prune)
        self._numbers = copy.deepcopy(policy)
        self._numbers.bind(self._num_samples)
        check_rounding(self._numbers, self._num_samples, self._shape)
        self._recorder = ShardedRecorder(
            self._counts, tolerance, self._num_samples, batch_size, self._replicas
        )
        self.nonfinite = 0
        self.sampler = ShardedSampler(self.set_epoch)
        self._loaders = PrunedLoaders(self.sampler, self._num_samples, batch_size, drop_last)
        # A compiled training step must not trace the bookkeeping.
        self._record_untraced: Callable[[torch.Tensor, torch.Tensor], None] = (
            torch.compiler.disable(self._record_batch)
        )
        self._started: int | None = None  # The epoch that ``epochs`` began.
        self._open = True
        self._share: Share
        self._show(0)

    @property
    def dataset(self) -> Indexed:
        """The data set wrapped in ``Indexed``.

        Raises:
            InputError: The pruner was given a length instead of a data set.
        """
        if self._dataset is None:
            raise InputError(
                f"expected a pruner of a data set, got one of {self._num_samples} samples: give "
                f"ShardedPruner the data set, or loop over its sampler"
            )
        return self._dataset

    def loader(
        self,
        dataset: Any = None,
        *,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **options: Any,
    ) -> DataLoader[Any]:
        """Return a ``DataLoader`` over this rank's samples, whose batches are ``(index, batch)``.

        Args:
            dataset: Another data set with the same N samples. The default is that of the pruner.
            num_workers: Number of worker processes.
            collate_fn: Your collate function, which receives the items without their indices.
            options: Further keyword arguments of ``DataLoader``, as in ``Pruner.loader``.

        Raises:
            InputError: As for ``Pruner.loader``.
        """
        return self._loaders.get(
            self.dataset if dataset is None else dataset,
            batch_size=options.pop("batch_size", None),
            num_workers=num_workers,
            collate_fn=collate_fn,
            **options,
        )

    # -- the epoch ----------------------------------------------------------------------------

    @property
    def counts(self) -> torch.Tensor | None:
        """DroppingCounts of the samples in ``owned``, as of the last epoch that ended, a copy.

        They have the shape ``(len(owned),)``. It is None if the policy does not count.
        """
        return None if self._counts is None else self._counts.copied()

    @property
    def position(self) -> Position:
        """Where this rank is: the epoch in progress (or the next one), and what it recorded."""
        epoch = self._share.epoch + (not self._open)
        return Position(epoch, self._recorder.batches, self._recorder.samples)

    def epochs(self) -> Iterator[int]:
        """Iterate over the epochs: start each one, yield its number, and end it.

        After a state was loaded, the iteration continues where that state was taken. If that was in
        the middle of an epoch, the sampler yields the rest of this epoch. If it was after the last
        batch of an epoch, that epoch is ended at once. Leaving the loop by ``break`` leaves the
        epoch open.
        """
        if self._is_complete():
            self._commit()
        for epoch in range(self.position.epoch, self._numbers.epochs):
            self.set_epoch(epoch)
            self.sampler.follow(self._share, self._recorder.samples)
            self._started = epoch
            try:
                yield epoch
            except GeneratorExit:  # The loop was left by ``break``.
                self._started = None
                raise
            self.end_epoch()

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` (counted from 0) current, and choose its samples from the counts.

        A second call with the same epoch does nothing. If losses of an earlier epoch have been
        recorded, that epoch is ended first. Epochs may be left out, but not repeated.

        Raises:
            InputError: The epoch is outside the training or has ended, or ``epochs`` has another
                one in progress.
        """
        self._check_epoch(epoch)
        if self._started not in (None, epoch):
            raise InputError(
                f"expected set_epoch({self._started}), since this epoch is in progress, got "
                f"{epoch}: call end_epoch() first"
            )
        if epoch < self.position.epoch:
            raise InputError(
                f"expected an epoch of at least {self.position.epoch}, since all earlier ones have "
                f"ended, got {epoch}: loop over pruner.epochs()"
            )
        if epoch == self._share.epoch:
            return
        if self._recorder.batches:
            self._commit()
        self._show(epoch)

    def record(self, index: Any, losses: torch.Tensor) -> torch.Tensor:
        """Record the losses of a batch, and return the scalar to backpropagate.

        Both arguments are copied into a buffer on the device of the losses, without
        synchronisation. Whenever each rank has recorded about a million losses, the ranks exchange
        the sums of their batches; all of them have then recorded the same number of batches.

        Args:
            index: Indices of the samples, integers, shape (B,): the first part of each batch.
            losses: One loss per sample, floating point, shape (B,) (``reduction="none"``).

        Returns:
            The mean of the losses, shape ().

        Raises:
            InputError: A shape, a type or an index is wrong, or the epoch has ended.
        """
        if not isinstance(index, torch.Tensor):
            index = torch.as_tensor(index)
        if torch.compiler.is_compiling():
            self._record_untraced(index, losses.detach())
        else:  # Outside a compiled step, the call above takes longer.
            self._record_batch(index, losses.detach())
        return losses.mean()

    def end_epoch(self) -> None:
        """End the current epoch: batch means, marks, clear, add (Algorithm 1).

        A second call in the same epoch does nothing.

        Warns:
            RuntimeWarning: Losses were NaN or infinite; no losses were recorded, although the
                policy needs them; or the batches that were trained are not those of the sampler.

        Raises:
            InputError: An index is out of range, or the ranks are in different epochs.
        """
        self._started = None
        if self._open:
            self._commit()

    def open_window(self) -> None:
        """Clear the counts at the end of the current epoch and begin a new window.

        Call it on every rank in the same epoch; see ``Pruner.open_window``.

        Raises:
            InputError: The epoch has ended, or the policy has no windows.
        """
        if not self._open:
            raise InputError(
                f"expected an epoch in progress, but epoch {self._share.epoch} has ended: "
                f"call open_window() before end_epoch()"
            )
        self._numbers.open_window(self._share.epoch)

    # -- state --------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Take the means of what was recorded so far, so that ``state_dict`` includes it.

        If there is more than one rank, this must precede a ``state_dict()`` in the middle of an
        epoch. All ranks must call it after the same batch.
        """
        self._recorder.flush(self._share)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that this rank needs to resume: its own part, without communication.

        Each rank must save its own state. It loads with ``weights_only=True``.

        Raises:
            InputError: There are several ranks, and ``synchronize()`` was not called after the last
                batch.
        """
        if self._replicas.size == 1:
            self.synchronize()
        if not self._recorder.flushed:
            raise InputError(unsynchronized(self._share.epoch))
        learned = self._numbers.state_dict()
        if self._counts is not None:
            learned.update(self._counts.state_dict())
        return {
            **self._identity(),
            "epoch": self._share.epoch,
            "open": self._open,
            "batches": self._recorder.batches,
            "samples": self._recorder.samples,
            "nonfinite": self._recorder.nonfinite,
            "kept": self.num_kept(self._share.epoch),
            "foreign": torch.from_numpy(self._recorder.foreign),
            "learned": learned,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state of this rank. All ranks must call it.

        Raises:
            InputError: The state has another version, comes from a run with another N, seed, policy
                or number of ranks, from another rank, or from the middle of an epoch that kept
                another number of samples, because the batches were larger or smaller; or the ranks
                saved their states after different batches.
        """
        check_state(state, self._identity(), _KEYS)
        numbers = copy.deepcopy(self._numbers)
        numbers.load_state_dict(state["learned"])
        kept = num_kept(numbers, self._num_samples, state["epoch"], self._shape)
        if state["batches"] and kept != state["kept"]:
            raise InputError(
                f"expected a pruner state of an epoch that keeps {kept} samples, got one that "
                f"keeps {state['kept']}: resume inside an epoch with the same batch_size "
                f"and accumulation"
            )
        self._check_agreement(
            [state[key] for key in ("epoch", "open", "batches", "samples", "nonfinite")],
            "states that were saved after the same batch",
        )
        self._numbers = numbers
        if self._counts is not None:
            self._counts.load_state_dict(state["learned"])
        self._recorder.load(
            state["batches"], state["samples"], state["nonfinite"], state["foreign"].numpy().copy()
        )
        self._started = None
        self._show(state["epoch"], ended=not state["open"])

    # -- numbers known in advance --------------------------------------------------------------

    def num_kept(self, epoch: int) -> int:
        """Return how many samples all ranks together train in ``epoch``, without padding.

        The number is rounded up to whole batches on every rank if some samples are skipped.

        Raises:
            InputError: The epoch is outside the training.
        """
        self._check_epoch(epoch)
        kept = num_kept(self._numbers, self._num_samples, epoch, self._shape)
        assert kept is not None  # The accepted policies know it in advance.
        return kept

    def batches(self, epoch: int) -> int:
        """Return the number of batches per rank of ``epoch``, which is the same on every rank.

        Raises:
            InputError: The epoch is outside the training.
        """
        return batches_of(self.num_kept(epoch), self._shape)

    def steps(self, epoch: int) -> int:
        """Return the number of optimizer steps of ``epoch``.

        Raises:
            InputError: The epoch is outside the training.
        """
        return steps_of(self.num_kept(epoch), self._shape)

    def total_steps(self) -> int:
        """Return the number of optimizer steps of the whole training."""
        return total_steps(self._numbers, self._num_samples, self._shape)

    def __repr__(self) -> str:
        return (
            f"ShardedPruner({self._num_samples} samples, policy {self._name!r}, rank "
            f"{self._replicas.rank} of {self._replicas.size} owns {len(self.owned)} of them)"
        )

    # -- internals ----------------------------------------------------------------------------

    def _show(self, epoch: int, ended: bool = False) -> None:
        """Make ``epoch`` current. The samples of an epoch that has ended are not chosen again."""
        kept = self._num_samples if ended else self.num_kept(epoch)
        if kept == self._num_samples:
            share = full_share(epoch, kept, self._replicas, self._seed, self._shape.drop_last)
        else:
            # Without counts, all samples tie.
            none = np.broadcast_to(np.uint8(0), len(self.owned))
            counts = none if self._counts is None else self._counts.counts
            share = pruned_share(epoch, self._num_samples, kept, counts, self._replicas, self._seed)
        self._share = share
        self._open = not ended
        self.sampler.follow(share, self._recorder.samples)

    def _record_batch(self, index: torch.Tensor, losses: torch.Tensor) -> None:
        check_batch(index, losses)
        if not self._open:
            raise InputError(
                f"expected losses of another epoch, since epoch {self._share.epoch} has ended: "
                f"loop over pruner.epochs(), or call set_epoch({self._share.epoch + 1})"
            )
        self._recorder.append(self._share, index, losses)

    def _is_complete(self) -> bool:
        """Return whether nothing is left to train of the epoch in progress."""
        left = self._share.length - self._recorder.samples
        least = self._shape.batch_size if self._shape.drop_last else 1
        return self._recorder.batches > 0 and left < (least or 1)

    def _commit(self) -> None:
        epoch = self._share.epoch
        self._recorder.flush(self._share)
        numbers = self._numbers
        clear = isinstance(numbers, RandomPruning) and numbers.schedule.clears(epoch)
        self.nonfinite, messages = self._recorder.end_epoch(
            self._share, clear, self.sampler.was_read
        )
        self._started = None
        self._show(epoch, ended=True)  # This frees the kept indices.
        for message in messages:
            warnings.warn(message, RuntimeWarning, stacklevel=3)

    def _check_agreement(self, values: list[Any], expected: str) -> None:
        """Raise InputError unless all ranks have equal values. All of them must call it."""
        own = zlib.crc32(repr(values).encode())
        largest, smallest = self._replicas.maximum(np.array([own, -own]))
        if largest != -smallest:
            raise InputError(f"expected {expected} on every rank, got different ones")

    def _identity(self) -> dict[str, Any]:
        """Return what a saved state must agree with."""
        return {**self._agreed, "rank": self._replicas.rank}

    def _check_epoch(self, epoch: int) -> None:
        check_epoch(epoch, self._numbers.epochs)


def _check_policy(policy: object) -> None:
    """Raise an error unless the policy can choose samples by a sum over the ranks."""
    if not isinstance(policy, Policy):
        raise TypeError(
            f"expected a policy such as FinePruning(schedule, 0.3), got {type(policy).__name__}"
        )
    if type(policy) not in (FinePruning, RandomPruning, FullData):
        raise InputError(
            f"expected FinePruning, RandomPruning or FullData, since each rank knows what it has "
            f"learned of its own samples only, got {type(policy).__name__}: use Pruner"
        )
    options, defaults = policy.plan_options, PlanOptions()
    for name in NAMES:
        if getattr(options, name) != getattr(defaults, name):
            raise InputError(
                f"expected a policy without options, since they need the plan of all samples, got "
                f"{name}={getattr(options, name)}: leave it out, or use Pruner"
            )
