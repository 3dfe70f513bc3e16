"""Pruner: one epoch's life in one object. Plan, record, end."""

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fineprune.errors import InputError
from fineprune.pruning.dropping_count import batch_means, batch_sums
from fineprune.pruning.indexed import Indexed
from fineprune.pruning.loss_buffer import LossBuffer, check_batch, check_range
from fineprune.pruning.plan import EpochPlan
from fineprune.pruning.plan_watch import UNDONE_EPOCHS, PlanWatch
from fineprune.pruning.policies.policy import LossRecords, Policy
from fineprune.pruning.random_streams import stream
from fineprune.pruning.replicas import Replicas
from fineprune.pruning.rescaling import Rescaling
from fineprune.pruning.sampler import PruningSampler, samples_per_rank
from fineprune.pruning.step_counts import (
    BatchShape,
    check_least,
    check_rounding,
    num_kept,
    total_steps,
)

STATE_VERSION = 1

# A single process turns losses into marks in blocks of this many, so that the buffer stays small
# (48 MB) however large the epoch is, and waits for the device once in a block.
_FLUSH_AT = 1 << 22


@dataclass
class _Progress:
    """An epoch of which batches have been recorded and which has not ended."""

    plan: EpochPlan
    batches: int = 0  # record calls, the same on every rank
    samples: int = 0  # of all ranks together: the position in the epoch's order
    recorded_here: bool = False  # false while all of it comes from a loaded state


class Pruner:
    """Decides which samples each epoch trains on, from the losses of the epochs before.

    The three lines: a loader over ``pruner.dataset`` with ``sampler=pruner.sampler``; the loop
    ``for epoch in pruner.epochs()``; and the loss ``pruner.record(index, losses)``. Losses are only
    copied while an epoch runs; counts change at its end alone ([P] section 4, in METHOD's order:
    select, train, clear, add).

    Args:
        dataset_or_length: a map-style data set, or the number of samples N for loops that index
            their own arrays by ``plan.kept``.
        policy: what to skip. The pruner works on a copy of it.
        seed: of the order, as in ``DistributedSampler``, and of ties and chance.
        batch_size: samples in a batch on each rank. Where given, an epoch that skips keeps whole
            batches over all ranks and accumulation, rounded up.
        accumulation: batches in an optimizer step.
        drop_last: whether the loader drops an incomplete last batch.
        num_replicas, rank: as in ``DistributedSampler``; by default those of the process group.
            Give ``num_replicas=1`` where a framework shards the batches itself (accelerate).
        process_group: over which counts are merged; by default the initialised world.

    Attributes:
        dataset: the data set wrapped in ``Indexed``; None where a length was given.
        sampler: this rank's ``PruningSampler``.
        nonfinite: losses of the last ended epoch that this rank trained and that were NaN or
            infinite.

    Raises:
        InputError: a value is out of range, or rounding to whole batches would skip nothing.
        RuntimeError: ``WORLD_SIZE`` is above 1 and no process group is initialised.
    """

    def __init__(
        self,
        dataset_or_length: Any,
        policy: Policy,
        *,
        seed: int = 0,
        batch_size: int | None = None,
        accumulation: int = 1,
        drop_last: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
        process_group: Any = None,
    ) -> None:
        if not isinstance(policy, Policy):
            raise TypeError(
                f"expected a policy such as FinePruning(schedule, 0.3), got {type(policy).__name__}"
            )
        if isinstance(dataset_or_length, int):
            self.dataset: Indexed | None = None
            self._num_samples = dataset_or_length
        else:
            given = dataset_or_length
            self.dataset = given if isinstance(given, Indexed) else Indexed(given)
            self._num_samples = len(self.dataset)
        check_least("the number of samples", self._num_samples, 1)
        check_least("seed", seed, 0)
        self._replicas = Replicas(process_group)
        num_replicas = self._replicas.size if num_replicas is None else num_replicas
        rank = min(self._replicas.rank, num_replicas - 1) if rank is None else rank
        self._shape = BatchShape(batch_size, accumulation, num_replicas, drop_last)
        if not 0 <= rank < num_replicas:
            raise InputError(f"expected rank in 0..{num_replicas - 1}, got {rank}")
        self._seed = seed
        self._policy = copy.deepcopy(policy)
        self._policy.bind(self._num_samples)
        check_rounding(self._policy, self._num_samples, self._shape)
        self.sampler = PruningSampler(
            range(self._num_samples) if self.dataset is None else self.dataset,
            num_replicas=num_replicas,
            rank=rank,
            seed=seed,
            drop_last=drop_last,
            choose_epoch=self.set_epoch,
        )
        self.nonfinite = 0
        self._nonfinite_so_far = 0
        self._progress: _Progress | None = None
        self._ended: int | None = None
        self._watch = PlanWatch(self._num_samples, num_replicas)
        self._open = True
        self._buffer = self._make_buffer()
        # A compiled training step must not trace into the buffer's bookkeeping.
        self._append: Callable[[torch.Tensor, torch.Tensor], None] = torch.compiler.disable(  # type: ignore[no-untyped-call]
            self._append_to_buffer
        )
        self._rescaling: Rescaling | None = None
        self._show(0)

    # -- the epoch ----------------------------------------------------------------------------

    @property
    def plan(self) -> EpochPlan:
        """The plan of the epoch that is set."""
        return self._plan

    @property
    def policy(self) -> Policy:
        """This pruner's own copy of the policy."""
        return self._policy

    @property
    def counts(self) -> torch.Tensor | None:
        """DroppingCounts as of the last ended epoch, shape (N,); None if the policy has none."""
        return self._policy.counts

    def epochs(self, start: int | None = None) -> Iterator[int]:
        """Go through the epochs: set each, yield it, end it.

        Goes on where a loaded state stopped, in the middle of an epoch too: the sampler then
        yields the rest of it. Leaving the loop by ``break`` leaves the epoch open.

        Args:
            start: the first epoch, from 0; by default the next one, or the one still open.

        Raises:
            InputError: ``start`` is outside the training.
        """
        if start is not None and not 0 <= start < self._policy.epochs:
            raise InputError(f"expected start in 0..{self._policy.epochs - 1}, got {start}")
        first = start
        if first is None:
            waiting = self._progress
            current = self._plan.epoch if waiting is None else waiting.plan.epoch
            first = current if self._open or waiting is not None else current + 1
        for epoch in range(first, self._policy.epochs):
            self.set_epoch(epoch)
            if self._progress is not None:
                self.sampler.follow(self._plan, self._progress.samples)
            yield epoch
            self.end_epoch()

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` (from 0) the current one and plan it from the committed counts.

        Changes no count, and keeps the plan of an epoch in progress, so it may be called any number
        of times. Where batches of another epoch have been recorded, that epoch is ended first.

        Raises:
            InputError: the epoch is outside the training.
        """
        self._check_epoch(epoch)
        if epoch == self._plan.epoch and self._open:
            return
        waiting = self._progress
        # A state loaded in the middle of an epoch waits while a trainer spins through the epochs
        # before it; going beyond it means that its rest is given up.
        if waiting is not None and (waiting.recorded_here or epoch > waiting.plan.epoch):
            self._commit()
        self._show(epoch)

    def record(self, index: Any, losses: torch.Tensor) -> torch.Tensor:
        """Remember a batch's losses and return the scalar to backpropagate.

        Copies both into a buffer on the losses' device: no synchronisation, no communication.

        Args:
            index: the samples' indices, integers, shape (B,): the first part of each batch.
            losses: one loss a sample, floating point, shape (B,) (``reduction="none"``).

        Returns:
            The mean of the losses, shape (); with a plan that has weights, of loss times weight.

        Raises:
            InputError: shapes, types or indices are wrong, or the epoch has ended.
            RuntimeError: the plan has weights, and the scalars returned were not backpropagated.
        """
        index = torch.as_tensor(index)
        self._append(index, losses.detach())
        return losses.mean() if self._rescaling is None else self._rescaling.mean(index, losses)

    def end_epoch(self) -> None:
        """Commit the epoch: batch means, marks, one exchange, clear, add (Algorithm 1).

        A second call in the same epoch does nothing. With several ranks, all must call it.

        Raises:
            RuntimeError: the plan has weights, and the scalars returned were not backpropagated.
        """
        if self._open:
            self._commit()

    def open_window(self) -> None:
        """Let the counts clear at the end of the current epoch and a new window begin.

        For a rate that falls while training: call it inside the epoch in which the plateau
        scheduler cut the rate, on every rank.

        Raises:
            InputError: the epoch has ended, or the policy has no windows.
        """
        if not self._open:
            raise InputError(
                f"expected an epoch in progress, but epoch {self._plan.epoch} has ended: "
                f"call open_window() before end_epoch()"
            )
        self._policy.open_window(self._plan.epoch)

    # -- state --------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Exchange what was recorded so far, so that ``state_dict`` holds all ranks' losses.

        Needed before a state is taken in the middle of an epoch with more than one rank; all ranks
        must call it after the same batch.
        """
        self._flush()

    def state_dict(self) -> dict[str, Any]:
        """Return everything a resumed run needs; never communicates.

        Holds tensors, numbers, strings, lists and dicts only, so that it loads with
        ``weights_only=True``.
        """
        if self._replicas.size == 1:
            self._flush()
        progress = self._progress
        kept = np.zeros(self._num_samples, dtype=np.bool_)
        if progress is not None:
            kept[progress.plan.kept.numpy()] = True
        return {
            "version": STATE_VERSION,
            "num_samples": self._num_samples,
            "seed": self._seed,
            "settings": self._policy.settings(),
            "epoch": self._plan.epoch if progress is None else progress.plan.epoch,
            "open": self._open or progress is not None,
            "synchronized": len(self._buffer) == 0,
            "nonfinite": self._nonfinite_so_far,
            "progress": None
            if progress is None
            else {
                "kept": torch.from_numpy(np.packbits(kept)),
                "weights": progress.plan.weights,
                "batches": progress.batches,
                "samples": progress.samples,
            },
            "learned": self._policy.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state; the number of ranks and the batch size may have changed.

        Raises:
            InputError: the state is of another version, N, seed or policy, or was taken in the
                middle of an epoch without ``synchronize()``.
        """
        expected = {
            "version": STATE_VERSION,
            "num_samples": self._num_samples,
            "seed": self._seed,
            "settings": self._policy.settings(),
        }
        for key, value in expected.items():
            if state.get(key) != value:
                raise InputError(
                    f"expected a pruner state with {key}={value}, got {state.get(key)}: "
                    f"resume with the settings that the state was made with"
                )
        if not state["synchronized"]:
            raise InputError(
                f"expected a state of all ranks, got one taken in the middle of epoch "
                f"{state['epoch']} without synchronize(): call it on every rank before state_dict()"
            )
        self._buffer = self._make_buffer()
        self._policy.load_state_dict(state["learned"])
        self._nonfinite_so_far = state["nonfinite"]
        self._progress = None
        saved = state["progress"]
        if saved is not None:
            mask = np.unpackbits(saved["kept"].numpy(), count=self._num_samples)
            kept = torch.from_numpy(np.flatnonzero(mask))
            plan = EpochPlan(state["epoch"], kept, saved["weights"])
            self._progress = _Progress(plan, saved["batches"], saved["samples"])
        self._ended = None if state["open"] else state["epoch"]
        self._show(state["epoch"])
        self._open = state["open"]

    def total_steps(self) -> int:
        """Count the optimizer steps of the whole training, exactly and before it starts.

        Raises:
            InputError: ``batch_size`` was not given, or the policy's numbers depend on data.
        """
        return total_steps(self._policy, self._num_samples, self._shape)

    def num_kept(self, epoch: int) -> int | None:
        """Return how many samples ``epoch`` trains over all ranks, padding apart.

        Rounded up to whole batches where some are skipped; None where it depends on data.
        """
        return num_kept(self._policy, self._num_samples, epoch, self._shape)

    # -- inside -------------------------------------------------------------------------------

    def _show(self, epoch: int) -> None:
        """Make ``epoch`` current: its plan in progress where there is one, else a new plan."""
        if self._progress is not None and self._progress.plan.epoch == epoch:
            self._plan = self._progress.plan
        else:
            self._plan = self._make_plan(epoch)
        self._open = True
        rescales = self._plan.weights is not None
        self._rescaling = Rescaling(self._plan, self._shape.accumulation + 1) if rescales else None
        self.sampler.follow(self._plan)

    def _make_plan(self, epoch: int) -> EpochPlan:
        num_kept = self.num_kept(epoch)
        if num_kept is not None and num_kept >= self._num_samples:
            return EpochPlan(epoch, torch.arange(self._num_samples))
        return self._policy.select(epoch, num_kept, stream(self._seed, epoch, "select"))

    def _append_to_buffer(self, index: torch.Tensor, losses: torch.Tensor) -> None:
        check_batch(index, losses)
        progress = self._progress
        if progress is None or progress.plan.epoch != self._plan.epoch:
            if progress is not None:  # a loaded epoch was left for an earlier one
                self._policy_ends(progress.plan)
            if self._plan.epoch == self._ended:
                raise InputError(
                    f"expected losses of another epoch, since epoch {self._ended} has ended: "
                    f"loop over pruner.epochs(), or call set_epoch({self._ended + 1})"
                )
            # Wrong indices fail with the first batch; later ones, when they are used, at the end of
            # the epoch: looking takes longer than copying, and on a GPU it would wait.
            if index.device.type == "cpu" and index.numel():
                check_range(int(index.min()), int(index.max()), self._num_samples)
            progress = self._progress = _Progress(self._plan)
            self._open = True
        progress.recorded_here = True
        progress.batches += 1
        progress.samples += len(index) * max(self._shape.num_replicas, self._replicas.size)
        if not self._policy.needs_losses:
            return
        if (
            self._replicas.size == 1
            and len(self._buffer)
            and (len(self._buffer) >= _FLUSH_AT or not self._buffer.fits(len(index)))
        ):
            self._flush()
        self._buffer.append(index, losses)

    def _flush(self) -> None:
        """Hand the buffered losses to the policy, with their batches' means over all ranks."""
        if not self._policy.needs_losses:
            return
        indices, losses, sizes = self._buffer.drain()
        if indices.size:
            check_range(int(indices.min()), int(indices.max()), self._num_samples)
        sums = batch_sums(losses, sizes)
        self._nonfinite_so_far += int(len(losses) - sums[:, 1].sum())
        batches = self._replicas.most(len(sizes))
        if batches:
            padding = np.zeros((batches - len(sizes), 2))
            sums = self._replicas.sum(np.concatenate([sums, padding]))[: len(sizes)]
            means = np.repeat(batch_means(sums), sizes)
            plan = self._plan if self._progress is None else self._progress.plan
            self._watch.see(plan, indices)
            self._policy.observe(plan.epoch, LossRecords(indices, losses, means))
            self._policy.merge(self._replicas)

    def _commit(self) -> None:
        if self._rescaling is not None:
            self._rescaling.check_used()
        progress = self._progress
        self._flush()
        self._policy_ends(self._plan if progress is None else progress.plan)

    def _policy_ends(self, plan: EpochPlan) -> None:
        epoch = plan.epoch
        self._policy.end_epoch(epoch)
        self._progress = None
        self._open = False
        self._ended = epoch
        self.nonfinite, self._nonfinite_so_far = self._nonfinite_so_far, 0
        if self.nonfinite:
            _warn(
                f"{self.nonfinite} losses of epoch {epoch} were NaN or infinite; they earned no "
                f"mark and have no part in their batch's mean"
            )
        if self._watch.undone(plan):
            _warn(
                f"in {UNDONE_EPOCHS} pruning epochs up to epoch {epoch} the samples to skip were "
                f"trained all the same: give the loader sampler=pruner.sampler"
            )

    def _make_buffer(self) -> LossBuffer:
        own = samples_per_rank(self._num_samples, self._shape.num_replicas, drop_last=False)
        return LossBuffer(min(own + (self._shape.batch_size or 1), _FLUSH_AT))

    def _check_epoch(self, epoch: int) -> None:
        if not 0 <= epoch < self._policy.epochs:
            raise InputError(
                f"expected an epoch in 0..{self._policy.epochs - 1}, got {epoch}: "
                f"make the schedule as long as the training"
            )


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=5)
