"""Pruner: decides which samples each epoch trains on, for a training loop of any kind.

An ``Epoch`` is shown, whose samples the sampler yields. With its first batch, it is open. At its
end, the ranks merge what they recorded, and the policy learns from it. Other files have what this
one puts together: ``epoch`` checks indices, ``recorder`` keeps losses, ``sampler`` makes orders,
and ``step_counts`` counts steps.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.utils.data import DataLoader

from fineprune.errors import InputError, check_whole_number, explaining
from fineprune.interrupts import uninterrupted
from fineprune.labels.batch import as_local, as_numbers, check_not_recomputed
from fineprune.labels.label_watch import LabelWatch
from fineprune.labels.untraced import Untraced
from fineprune.pruning.epoch import Epoch, Position
from fineprune.pruning.indexed import indexed_and_length
from fineprune.pruning.loader import pruned_loader
from fineprune.pruning.loop_checks import (
    check_batch,
    check_first_batch,
    check_logits,
    check_not_ended,
    check_order,
    check_recorded_labels,
    check_room,
    compare_ranks,
)
from fineprune.pruning.loop_warnings import LoopWarnings
from fineprune.pruning.plan import EpochPlan
from fineprune.pruning.policies.policy import Policy, check_is_policy
from fineprune.pruning.pruner_state import (
    OF_ANOTHER_VERSION,
    check_state,
    pack_epoch,
    plain,
    unpack_epoch,
)
from fineprune.pruning.rates import Rates
from fineprune.pruning.recorder import Recorder
from fineprune.pruning.replicas import Replicas, share_of_rank, size_of_sharded_batches
from fineprune.pruning.sampler import PruningSampler
from fineprune.pruning.schedule import check_epoch
from fineprune.pruning.step_counts import BatchShape, StepCounts

STATE_VERSION = 1

_TOTALS = ("epochs", "samples", "steps")
_KEYS = ("epoch", "shape", "order", "progress", "recorded", "learned", "totals", "watch")


class Pruner(Untraced):
    """Decides which samples each epoch trains on, based on the losses of earlier epochs.

    A training loop iterates over ``pruner.epochs()``, reads its batches from ``pruner.loader()`` or
    from a loader over ``pruner.dataset`` with ``sampler=pruner.sampler``, and backpropagates
    ``pruner.record(index, losses)``. The policy learns from the losses at the end of each epoch,
    with ``FinePruning`` as in Li et al., NPC 2018, section 4.

    Args:
        dataset_or_length: The map-style data set; or the number of samples N, for a loop that
            indexes its own arrays with ``sampler.order()``.
        policy: The policy that chooses the samples. The pruner works on a copy of it.
        seed: The seed of the order, as in ``DistributedSampler``, and of the policy's choices.
        batch_size: Number of samples per batch and rank. If it is given, an epoch that skips
            samples is rounded up to whole batches on every rank.
        accumulation: Number of batches per optimizer step; see ``step_is_due``.
        drop_last: Whether the loader drops an incomplete last batch.
        num_replicas, rank: Number of ranks that share the samples of an epoch, and of this one; by
            default, those of the process group.
        process_group: The group whose ranks merge their counts; by default, the world.
        sharded_by_loader: Whether a framework, such as Accelerate, itself divides the batches of
            one sampler over the ranks. It requires ``batch_size``, still that of one rank.
        log: A ``callable(dict, step)``, such as ``wandb.log``, to which the first rank reports each
            epoch that ended: ``fineprune/epoch`` (counted from 0), ``fineprune/skipped`` (its share
            of skipped samples), ``fineprune/saved`` (the share of the sample-steps so far), and the
            number of optimizer steps so far.

    Attributes:
        policy: This pruner's own copy of the policy.
        dataset: The data set wrapped in ``Indexed``; None if a length was given.
        num_samples: The number of samples N.
        shape: The ``BatchShape``: how samples are grouped into batches and optimizer steps.
        step_counts: The ``StepCounts``: how many samples and steps each epoch has.
        sampler: The ``PruningSampler`` of this rank.
        order_settings: Numbers on which the order of a stream's samples depends; else nothing.
        watch: The evidence on the labels, part of ``state_dict``; None until logits are recorded.
            With several ranks, ``synchronize`` merges it.
        nonfinite: Number of NaN or infinite losses of all ranks in the last epoch that ended; 0 if
            the policy needs no losses.

    Raises:
        InputError: A value is out of range, or rounding to whole batches leaves nothing to skip.
        TypeError: The data set is not map-style, or the policy is not a ``Policy`` with a name.
        RuntimeError: ``WORLD_SIZE`` is above 1, but no process group is initialised.
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
        sharded_by_loader: bool = False,
        log: Callable[[dict[str, float], int], object] | None = None,
    ) -> None:
        super().__init__()
        check_is_policy(policy)
        self.dataset: Any
        self.dataset, self.num_samples = indexed_and_length(dataset_or_length)
        self._seed = check_whole_number("seed", seed, 0)
        self._replicas = Replicas(process_group)
        self._loader_batch_size = batch_size
        if sharded_by_loader:
            batch_size = size_of_sharded_batches(
                batch_size, self._replicas.size, num_replicas, rank
            )
            num_replicas, rank = 1, 0
        num_replicas, rank = share_of_rank(
            self._replicas.size, self._replicas.rank, num_replicas, rank
        )
        if log is not None and not callable(log):
            raise InputError(
                f"expected log as a callable(dict, step), such as wandb.log, got "
                f"{type(log).__name__}"
            )
        self._log = log
        self._num_ranks = max(num_replicas, self._replicas.size)
        self.shape = BatchShape(batch_size, accumulation, num_replicas, drop_last)
        self._batch = self.shape.samples_per_batch or 0  # That of all ranks; 0 if it is not known.
        self.policy = copy.deepcopy(policy)
        self.step_counts = StepCounts(self.policy, self.num_samples, self.shape, self._seed)
        self.step_counts.check_rounding()
        self.sampler = PruningSampler(
            range(self.num_samples) if self.dataset is None else self.dataset,
            num_replicas=num_replicas,
            rank=rank,
            seed=self._seed,
            drop_last=drop_last,
            choose_epoch=self.set_epoch,
            note_read=self._note_read,
        )
        self.nonfinite = 0
        self.order_settings: dict[str, int] = {}
        self._saved_order: dict[str, int] = {}  # Those of the state that was loaded.
        self.watch: LabelWatch | None = None
        self._recorder = Recorder(self.policy, self._replicas, self.num_samples)
        self._warnings = LoopWarnings()
        self._epochs = self._samples = self._steps = 0  # Those of the epochs that ended.
        self._next = 0  # The open epoch; without one, the first behind all that have ended.
        self._open: Epoch | None = None
        self._shown = self._planned_epoch(0)
        self._read_again = False  # Whether an iterator went on with the epoch shown before.
        self._in_progress = False  # Whether a loop has begun the current epoch.
        self._resumed = False  # Whether nothing was recorded since a state was loaded.
        self._compared = self._replicas.size == 1  # Whether the ranks were compared.
        self._show(0)

    # -- the data ----------------------------------------------------------------------------------

    @property
    def plan(self) -> EpochPlan:
        """The plan of the current epoch."""
        return self._shown.plan

    @property
    def counts(self) -> torch.Tensor | None:
        """DroppingCounts as of the last epoch that ended, shape (N,); None if there are none."""
        return self.policy.counts

    def loader(self, dataset: Any = None, **options: Any) -> DataLoader[Any]:
        """Return a ``DataLoader`` over this pruner's samples, whose batches are ``(index, batch)``.

        With workers, make it before the loop over the epochs, in which they persist.

        Args:
            dataset: Another data set with the same N samples. By default, that of the pruner.
            options: Keyword arguments of ``DataLoader``, such as ``num_workers``, or ``batch_size``
                if the pruner has none. ``collate_fn`` receives the items without their indices;
                with ``IndexedCollate(function, key="index")``, batches are dicts with the indices.

        Raises:
            InputError: An option would undo the pruning or differs from the pruner's own, there is
                no batch size or no data set, or the data set has another number of samples.
        """
        shape = replace(self.shape, batch_size=self._loader_batch_size)
        data = self.dataset if dataset is None else dataset
        return pruned_loader(data, self.sampler, self.num_samples, shape, options)

    def set_rates(self, rates: Rates, by: str = "epochs") -> None:
        """Give the policy the learning rates, for schedulers that need the pruner's steps.

        Args:
            rates: One number per epoch or step; a function of the progress in epochs, or of the
                number of steps; or a torch learning-rate scheduler, of which a copy is stepped.
            by: What each rate belongs to: "epochs" or "steps".

        Raises:
            InputError: The policy takes no rates, they do not fit, or losses have been recorded.
        """
        if self._next or self._open is not None:
            raise InputError(
                "expected set_rates() before the training, got a call after losses were recorded: "
                "call it before the first epoch and before load_state_dict()"
            )
        if self.policy.budget is None:
            raise InputError(
                f"expected a policy that uses learning rates, got {self.policy.name!r}, which uses "
                f"none"
            )
        self.policy.budget.set_rates(rates, by)
        self._show(self._shown.number)

    # -- the epochs --------------------------------------------------------------------------------

    @property
    def position(self) -> Position:
        """Where this rank is: the epoch in progress (or the next one), and what it recorded."""
        epoch = self._open
        if epoch is None:
            return Position(max(self._next, self._shown.number), 0, 0)
        samples = min(epoch.done, epoch.planned) // self._num_ranks
        return Position(epoch.number, epoch.batches, samples)

    def epochs(self, start: int | None = None) -> Iterator[int]:
        """Iterate over the epochs: start each one, yield its number, and end it.

        Leaving the loop by ``break`` leaves the epoch open. After this, and after a state was
        loaded, the iteration continues there with the rest of the epoch, or ends it if nothing is
        left.

        Args:
            start: The first epoch, counted from 0: the one in progress, or a later one. It is
                yielded even if it has no batches left, so that ``epochs(pruner.position.epoch)``
                runs what the loop does after the last batch.

        Raises:
            InputError: ``start`` is not an epoch that is left, or none is left; or losses were
                recorded before the loop.
        """
        last = self.policy.epochs
        check_epoch(start or 0, last)
        if self._next >= last and not self._resumed:
            raise InputError(
                f"expected a pruner with epochs left to train, got one that has trained all "
                f"{last}: make a new Pruner for another training"
            )
        unfinished = self._open
        if unfinished is not None and not (self._resumed or self.sampler.named):
            raise InputError(
                f"expected no losses before the loop over the epochs, got those of "
                f"{unfinished.batches} batches of epoch {unfinished.number}, perhaps from a trial: "
                f"make a new Pruner for the training"
            )
        if start is None and unfinished is not None and unfinished.complete:
            self._commit(unfinished)
        for epoch in range(self.position.epoch if start is None else start, last):
            self.start_epoch(epoch)
            try:
                yield epoch
            except GeneratorExit:  # The loop was left by ``break``.
                self._in_progress = False
                raise
            self.end_epoch()

    def start_epoch(self, epoch: int) -> None:
        """Begin ``epoch`` (counted from 0), or continue it where the losses recorded so far end.

        In the loop of a framework, this and ``end_epoch`` replace one pass of ``epochs``. Between
        them, ``set_epoch`` with another epoch is an error.

        Raises:
            InputError: The epoch is outside the training, or has ended.
        """
        check_epoch(epoch, self.policy.epochs)
        check_not_ended(epoch, self._next)
        self._in_progress = False
        self.set_epoch(epoch)
        if self._shown.batches:
            self._show(epoch)
        self._in_progress = True

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` (counted from 0) current, and plan it from the current counts.

        It may be called any number of times, and keeps the plan of an epoch in progress. With a
        later epoch, one of which losses were recorded is ended first. An epoch that has ended can
        be looked at, but not be recorded again.

        Raises:
            InputError: The epoch is not one of the training, or ``epochs`` or ``start_epoch`` has
                another one in progress.
        """
        check_epoch(epoch, self.policy.epochs)
        self.sampler.named = True
        if epoch == self._shown.number:
            return
        if self._in_progress:
            raise InputError(
                f"expected set_epoch({self._shown.number}), since this epoch is in progress, got "
                f"{epoch}: call end_epoch() first, or let the framework count from epoch "
                f"{self._shown.number}"
            )
        if self._open is not None and epoch > self._open.number:
            self._commit(self._open)
        self._show(epoch)

    def end_epoch(self) -> None:
        """End the current epoch: merge what the ranks recorded, and let the policy learn from it.

        A second call in the same epoch does nothing. All ranks must call this method. It warns if
        losses were not finite, nothing was recorded, or two epochs recorded too few batches.

        Raises:
            InputError: An index is wrong, or the ranks have different plans, or record differently.
            RuntimeError: The plan has weights, but the returned scalars were not backpropagated.
        """
        self._in_progress = False
        if self._shown.number >= self._next:  # An earlier one was only looked at.
            self._commit(self._shown)

    # -- recording ---------------------------------------------------------------------------------

    def record(
        self,
        index: Any,
        losses: torch.Tensor,
        logits: torch.Tensor | None = None,
        labels: Any = None,
    ) -> torch.Tensor:
        """Record the losses of a batch, and return the scalar to backpropagate.

        With logits and labels, the training is watched for wrong labels (``watch.suspects()``),
        from which ``Adaptive`` learns. Everything is copied at once, without waiting for the
        device. Record each batch in one call: with a known batch size, the number of calls says how
        far the epoch got.

        Args:
            index: The indices of the samples, integers, shape (B,): the first part of each batch.
            losses: One loss per sample, floating point, shape (B,) (``reduction="none"``).
            logits: The output of a classifier for them, floating point, shape (B, C).
            labels: Their labels, required with ``logits``, integers, shape (B,); -100 for none.

        Returns:
            The mean of the losses, shape (), each times its weight if the plan has weights.

        Raises:
            InputError: A shape, a type or an index is wrong; a sample is skipped in this epoch, or
                was recorded before (indices on a GPU are checked when the epoch ends); the epoch
                has ended, or all of it was recorded; the first batch shows that the loop cannot
                work; or this is called in a backward pass, as by ``torch.utils.checkpoint``.
        """
        index = as_numbers("indices", index)
        if is_compiling():
            of_batch = None if logits is None else logits.detach()
            self._record_untraced(self, index, losses.detach(), of_batch, labels)
        else:  # Outside a compiled step, the call above takes longer.
            check_not_recomputed()
            self._record(index, losses, logits, labels)
        rescaling = self._shown.rescaling
        return losses.mean() if rescaling is None else rescaling.mean(index, losses)

    def observe(
        self,
        index: Any,
        losses: torch.Tensor,
        logits: torch.Tensor | None = None,
        labels: Any = None,
    ) -> None:
        """Record, as ``record`` does, losses that are backpropagated elsewhere, with their weights.

        Unlike ``record``, this does not check that a gradient arrives.
        """
        self._record(as_numbers("indices", index), losses, logits, labels)

    def weighted(self, index: Any, losses: torch.Tensor) -> torch.Tensor:
        """Return the losses times the weights of the plan, if any, for a scalar of your own.

        Nothing is recorded: call ``record`` as well, and ignore its result.

        Args:
            index: Indices of the samples, integers, shape (B,), also repeated ones.
            losses: Their losses, floating point, shape (B,) or (B, ...), such as (B, tokens).

        Raises:
            InputError: A shape or a type is wrong.
        """
        index = as_numbers("indices", index)
        if not losses.ndim or index.shape != losses.shape[:1]:
            raise InputError(
                f"expected losses of shape (B, ...) for indices of shape (B,), got losses of shape "
                f"{tuple(losses.shape)} and indices of shape {tuple(index.shape)}"
            )
        rescaling = self._shown.rescaling
        return losses if rescaling is None else rescaling.weighted(index, losses)

    def _record(
        self,
        index: torch.Tensor,
        losses: torch.Tensor,
        logits: torch.Tensor | None,
        labels: Any,
    ) -> None:
        losses = as_local("losses", losses)
        check_batch(index, losses)
        epoch = self._shown
        if epoch.left is None:
            self._begin(epoch, losses)
        samples = len(losses) * self._num_ranks
        if self._batch and (samples > self._batch or epoch.done >= epoch.planned):
            check_room(epoch, self.shape, self._num_ranks, samples)
        numbers = index.numpy() if index.is_cpu else None
        if numbers is not None:
            epoch.check(numbers)
        if logits is not None or labels is not None:
            logits = check_logits(logits, labels)
            watch = self.watch or self._new_watch(logits.shape[1])
            watch.record_for_pruner(index, logits, labels)
            if self.watch is None and self.dataset is not None:
                check_recorded_labels(self.dataset.dataset, index, labels)
            self.watch = watch
        self._open, self._next, self._resumed = epoch, epoch.number, False
        covered = max(samples, self._batch)
        watched = logits is not None
        if self._recorder.add(epoch, index, numbers, losses, covered, with_logits=watched):
            self._recorder.reduce(epoch)

    def _begin(self, epoch: Epoch, losses: torch.Tensor) -> None:
        """Check what can be checked with the first batch of an epoch."""
        check_not_ended(epoch.number, self._next)
        if self._read_again and not epoch.reads:
            raise InputError(
                f"expected batches that were loaded in epoch {epoch.number}, got some of an "
                f"iterator that began in the epoch before, whose samples it yields: begin the "
                f"loader anew in each epoch, or use pruner.loader()"
            )
        check_first_batch(self.policy, self.shape, self._replicas, losses)
        check_order(self.order_settings, self._saved_order, within=epoch.batches > 0)
        self._compare_ranks()
        self._warnings.of_rates(self.policy)
        # Without a batch size, the loop groups samples as it likes, and may repeat some, as padding
        # and the workers of a stream do.
        once = self._batch and self._num_ranks == 1 and not self.order_settings
        before = self.sampler.before_start() if once else None
        epoch.expect(self.num_samples, not self._batch, before)

    def _new_watch(self, num_classes: int) -> LabelWatch:
        group = self._replicas.group
        watch = LabelWatch(self.num_samples, num_classes, process_group=group)
        watch.of_pruner = True
        return watch

    # -- state -------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Exchange what was recorded so far, so that ``state_dict`` includes all ranks.

        With several ranks, all of them must call this, after the same batch, before a
        ``state_dict()`` in the middle of an epoch and, if logits are recorded, before every
        ``state_dict()``.
        """
        self._compare_ranks()
        self._recorder.reduce(self._open or self._shown)
        if self.watch is not None:
            self.watch.merge()

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resumed run needs; it loads with ``weights_only=True``.

        Raises:
            InputError: With several ranks, ``synchronize()`` was not called; or the policy has a
                state of another kind.
        """
        if self._replicas.size == 1:
            self.synchronize()
        watch, unfinished = self.watch, self._open
        if not (self._recorder.reduced and (watch is None or watch.is_complete)):
            raise InputError(
                f"expected a state with what all ranks recorded, got one of epoch "
                f"{self.position.epoch} without synchronize(): call it on every rank before "
                f"state_dict()"
            )
        packed = {
            "epoch": self.position.epoch,
            "shape": asdict(self.shape),
            "order": dict(self.order_settings),
            "progress": None if unfinished is None else pack_epoch(unfinished, self.num_samples),
            "recorded": self._recorder.state_dict(),
            "learned": self.policy.state_dict(),
            "totals": {"epochs": self._epochs, "samples": self._samples, "steps": self._steps},
            "watch": None if watch is None else watch.state_dict(),
        }
        return {**self._identity(), **plain(packed, "the state")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state. A state that is refused changes nothing.

        The number of ranks and the batch size may have changed. ``steps_done`` then counts as if
        all steps had been as large as they are now, so ``total_steps()`` minus it are left.

        Raises:
            InputError: The state has another version, or comes from a run with another N, seed or
                policy; or this is called inside the loop over the epochs.
        """
        if self._in_progress:
            raise InputError(
                f"expected load_state_dict() before the loop over the epochs, got a call in epoch "
                f"{self._shown.number}: load the state first, and the loop continues where it was "
                f"saved"
            )
        check_state(state, self._identity(), _KEYS)
        state = plain(state, "the state")  # ``map_location`` may have moved tensors from the CPU.
        recorder = Recorder(self.policy, self._replicas, self.num_samples)
        learned, unfinished, watch = self.policy.state_dict(), None, None
        expected = "expected a pruner state of this version, got one that cannot be read"
        with explaining(expected, (KeyError, TypeError), f": {OF_ANOTHER_VERSION}"):
            number, packed = state["epoch"], state["progress"]
            if packed is not None:
                unfinished = unpack_epoch(packed, number, self.num_samples, self.shape)
            epochs, samples, steps = map(state["totals"].__getitem__, _TOTALS)
            before, order = BatchShape(**state["shape"]), dict(state["order"])
            recorder.load_state_dict(state["recorded"])
            if state["watch"] is not None:
                watch = self._new_watch(state["watch"]["num_classes"])
                watch.load_state_dict(state["watch"])
            try:
                self.policy.load_state_dict(state["learned"])
            except Exception:
                self.policy.load_state_dict(learned)
                raise
        self._recorder, self.watch, self._saved_order = recorder, watch, order
        self._epochs, self._samples, self._steps = epochs, samples, steps
        self._open, self._next, self._resumed = unfinished, number, True
        self.sampler.named = False
        self._show(min(number, self.policy.epochs - 1))
        if before != self.shape and None not in (before.batch_size, self.shape.batch_size):
            self._count_anew()

    def _count_anew(self) -> None:
        """Count what a loaded state has trained in batches and steps of the current size."""
        shape, epoch = self.shape, self._open
        steps = self.step_counts.steps_before(self.position.epoch)
        if epoch is not None:
            number = epoch.plan.number
            left = shape.batches_of(max(epoch.planned - epoch.done, 0))
            epoch.batches = shape.batches_of(number) - left
            if steps is not None:
                # It keeps its plan, which was rounded to steps of the size before.
                planned = self.step_counts.plan(epoch.number).number
                steps += shape.steps_of(planned) - shape.steps_of(number)
        if steps is not None:
            self._steps = steps

    def _identity(self) -> dict[str, Any]:
        """Return what a saved state must agree with."""
        return {
            "version": STATE_VERSION,
            "num_samples": self.num_samples,
            "seed": self._seed,
            "settings": plain(self.policy.settings(), "the settings"),
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> "Pruner":
        """Return a copy with the same data set and process group, outside of any loop."""
        memo.update({id(shared): shared for shared in (self.dataset, self._replicas.group)})
        made: Pruner = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        made._in_progress, made._compared = False, True  # One rank may try a copy alone.
        return made

    # -- numbers known in advance ------------------------------------------------------------------

    def total_steps(self) -> int:
        """Return the number of optimizer steps of the whole training, known before it starts.

        Raises:
            InputError: ``batch_size`` was not given, or the number of steps depends on data.
        """
        return self.step_counts.total_steps()

    @property
    def steps_done(self) -> int:
        """The number of optimizer steps so far, with that of the batch that was recorded last."""
        epoch = self._open
        if epoch is None:
            return self._steps
        whole, rest = divmod(epoch.batches, self.shape.accumulation)
        return self._steps + whole + (rest > 0 and epoch.complete)

    @property
    def step_is_due(self) -> bool:
        """Whether the batch recorded last completes ``accumulation`` batches or the epoch."""
        epoch = self._open
        return epoch is not None and (
            epoch.batches % self.shape.accumulation == 0 or epoch.complete
        )

    def batches(self, epoch: int) -> int:
        """Return the exact number of batches per rank of ``epoch``, even before the training.

        Raises:
            InputError: The epoch is not one of the training; ``batch_size`` was not given; or the
                length of the epoch depends on data, and it is not the current epoch.
        """
        return self.shape.batches_of(self.step_counts.length(epoch, self._open, self._shown))

    def steps(self, epoch: int) -> int:
        """Return the exact number of optimizer steps of ``epoch``; see ``batches``."""
        return self.shape.steps_of(self.step_counts.length(epoch, self._open, self._shown))

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.num_samples} samples, policy {self.policy.name!r}, "
            f"{self._epochs} of {self.policy.epochs} epochs done, {self._saved:.1%} skipped)"
        )

    @property
    def _saved(self) -> float:
        """The share of the sample-steps of the epochs that ended that was skipped."""
        full = self._epochs * self.num_samples
        return (full - self._samples) / full if full else 0.0

    # -- the current epoch -------------------------------------------------------------------------

    @uninterrupted()
    def _show(self, number: int) -> None:
        """Let the sampler yield an epoch: what is left of the open one, or one with a new plan."""
        self._read_again = self._shown.reads > 1
        epoch = self._open
        if epoch is None or epoch.number != number:
            epoch = self._planned_epoch(number)
        self.sampler.follow(epoch.plan, min(epoch.done, epoch.planned))
        self._shown = epoch

    def _planned_epoch(self, number: int) -> Epoch:
        plan = self.step_counts.plan(number)
        return Epoch(plan, self.shape.planned(plan.number))

    def _note_read(self) -> None:
        """Note that the loop asks the sampler for indices."""
        self._shown.reads += 1
        if not self.sampler.named:
            self._warnings.of_read(self._shown)

    def _compare_ranks(self) -> None:
        if not self._compared:
            identity, plan = self._identity(), self._shown.plan
            compare_ranks(self._replicas, identity, self.shape, self.order_settings, plan)
            self._compared = True

    def _commit(self, epoch: Epoch) -> None:
        """End an epoch, and let the policy learn from it."""
        if epoch.rescaling is not None:
            epoch.rescaling.check_used()
        self._compare_ranks()
        self._recorder.reduce(epoch)
        with uninterrupted():
            ranking = None
            if self.watch is not None and self.policy.needs_ranking:
                self.watch.merge()
                ranking = self.watch.ranking_so_far()
            losses, marks = self._recorder.per_sample()
            self.policy.learn(epoch.number, losses, marks, ranking)
            self.nonfinite = self._recorder.nonfinite
            self._recorder.clear()
            self._epochs += 1
            self._samples += epoch.trained
            if epoch.batches:
                self._steps += -(-epoch.batches // self.shape.accumulation)
            elif self._batch:  # A loop that records nothing takes the planned steps.
                self._steps += self.shape.steps_of(epoch.trained)
            self._open, self._in_progress, self._next = None, False, epoch.number + 1
            epoch.left = None  # It takes no more batches.
        self._warnings.of_epoch(epoch, self.policy, self.nonfinite, self._batch > 0)
        if self._replicas.rank == 0 and self._log is not None:
            values = {
                "fineprune/epoch": epoch.number,
                "fineprune/skipped": (self.num_samples - epoch.trained) / self.num_samples,
                "fineprune/saved": self._saved,
            }
            self._log(values, self._steps)
