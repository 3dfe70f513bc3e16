"""Pruner: decides which samples each epoch trains on, for a training loop of any kind.

The state of the epoch is in ``EpochCycle``. Mistakes of a loop are found in ``loop_checks`` and
``loop_warnings``.
"""

import copy
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.compiler import is_compiling
from torch.utils.data import DataLoader

from fineprune.errors import InputError, check_whole_number, explaining, warn_user
from fineprune.interrupts import uninterrupted
from fineprune.labels.batch import as_local, as_numbers, check_not_recomputed
from fineprune.labels.dataset_attributes import labels_of
from fineprune.labels.label_watch import LabelWatch
from fineprune.labels.untraced import Untraced
from fineprune.pruning.epoch_cycle import EpochCycle, Phase, Progress
from fineprune.pruning.indexed import Indexed, indexed_and_length
from fineprune.pruning.label_warnings import warn_of_other_digest
from fineprune.pruning.last_batch import LastBatch
from fineprune.pruning.learning_rates import Rates
from fineprune.pruning.loader import PrunedLoaders
from fineprune.pruning.loop_checks import LoopChecks, check_batch
from fineprune.pruning.loop_warnings import LoopWarnings
from fineprune.pruning.loss_buffer import (
    MOST_LOSSES_WAITING,
    MOST_WAITING,
    Batch,
    as_batch,
)
from fineprune.pruning.plan import EpochPlan, check_plan
from fineprune.pruning.plan_options import rescaled
from fineprune.pruning.policies.policy import Policy, check_is_policy
from fineprune.pruning.pruner_state import (
    OF_ANOTHER_VERSION,
    check_state,
    pack_progress,
    plain,
    unpack_progress,
    unsynchronized,
)
from fineprune.pruning.pruner_watch import PrunerWatch
from fineprune.pruning.random_streams import stream
from fineprune.pruning.recorder import Recorder
from fineprune.pruning.replicas import AllGather, Replicas, share_of_rank
from fineprune.pruning.rescaling import Rescaling
from fineprune.pruning.run_report import RunReport, RunTotals
from fineprune.pruning.sampler import PruningSampler
from fineprune.pruning.schedule import check_epoch
from fineprune.pruning.step_counts import BatchShape, StepCounts

STATE_VERSION = 1

_KEYS = (
    "epoch",
    "open",
    "synchronized",
    "shape",
    "nonfinite",
    "progress",
    "learned",
    "totals",
    "watch",
)


@dataclass(frozen=True)
class Position:
    """Where one rank is in its training.

    Attributes:
        epoch: The epoch in progress, counted from 0, or the next one if it has ended. After the
            last epoch, it is the number of epochs.
        batches: Number of batches of this epoch that this rank has recorded.
        samples: Number of samples of this epoch that this rank has recorded.
    """

    epoch: int
    batches: int
    samples: int


class Pruner(Untraced):
    """Decides which samples each epoch trains on, based on the losses of earlier epochs.

    A training loop iterates over ``pruner.epochs()``, reads its batches from ``pruner.loader()`` or
    from a loader over ``pruner.dataset`` with ``sampler=pruner.sampler``, and backpropagates
    ``pruner.record(index, losses)``. Losses are only stored during an epoch; the policy learns from
    them at its end, with ``FinePruning`` as in Li et al., NPC 2018, section 4.

    Args:
        dataset_or_length: The map-style data set; or the number of samples N, for a loop that
            indexes its own arrays with ``sampler.order()``. An index must mean the same sample in
            each epoch, which cannot be checked if only losses are recorded.
        policy: The policy that chooses the samples. The pruner works on a copy of it that has
            learned nothing.
        labels: The class of each sample: integers, shape (N,), as a sequence, an array or a tensor;
            -1 if it is unknown. By default, the data set's attribute ``targets`` or ``labels``, or
            the second of the two tensors of a ``TensorDataset``. If logits are recorded with other
            labels than these, the first batch is an error.
        seed: The seed of the order of the samples, as in ``DistributedSampler``, and of the random
            streams that break ties.
        batch_size: Number of samples per batch and rank. If it is given, an epoch that skips
            samples is rounded up to whole batches on every rank.
        accumulation: Number of batches per optimizer step. A step must also be taken after the last
            batch of an epoch; see ``step_is_due``.
        drop_last: Whether the loader drops an incomplete last batch.
        num_replicas: Number of ranks that share the samples of an epoch. By default, the size of
            the process group.
        rank: The rank of this process among them. By default, its rank in the process group. It is
            required if ``num_replicas`` is neither 1 nor the size of the group.
        process_group: The group whose ranks merge their counts. By default,
            ``torch.distributed.group.WORLD``.
        all_gather: A function that takes an array and returns those of all ranks, such as
            ``hvd.allgather_object``, for frameworks without a torch process group. It requires
            ``num_replicas`` and ``rank``.
        sharded_by_loader: Whether a framework (Accelerate, Hugging Face's Trainer) itself divides
            the batches of one sampler over the ranks of the group. It requires ``batch_size``,
            which is still that of one rank.
        log: The target to which each epoch is reported; see the method ``log``. By default, none.

    Attributes:
        sampler: The ``PruningSampler`` of this rank.
        nonfinite: Number of NaN or infinite losses that all ranks together recorded in the last
            epoch that ended; 0 if the policy needs no losses.

    Raises:
        InputError: A value is out of range; rounding to whole batches leaves nothing to skip; the
            labels do not fit; or this process does not belong to ``process_group``.
        TypeError: The data set is not map-style, or the policy is not a ``Policy`` with a name.
        RuntimeError: ``WORLD_SIZE`` is above 1, but no process group is initialised.
    """

    def __init__(
        self,
        dataset_or_length: Any,
        policy: Policy,
        *,
        labels: Any = None,
        seed: int = 0,
        batch_size: int | None = None,
        accumulation: int = 1,
        drop_last: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
        process_group: Any = None,
        all_gather: AllGather | None = None,
        sharded_by_loader: bool = False,
        log: Any = None,
    ) -> None:
        super().__init__()
        check_is_policy(policy)
        dataset, num_samples = indexed_and_length(dataset_or_length)
        seed = check_whole_number("seed", seed, 0)
        replicas = Replicas(process_group, all_gather, num_replicas, rank)
        of_this_rank = batch_size
        if sharded_by_loader:
            batch_size = _global_batch_size(batch_size, replicas.size, num_replicas, rank)
            num_replicas, rank = 1, 0
        num_replicas, rank = share_of_rank(replicas.size, replicas.rank, num_replicas, rank)
        shape = BatchShape(batch_size, accumulation, num_replicas, drop_last)
        if labels is None and dataset is not None and policy.uses_labels:
            labels = labels_of(dataset.dataset)
        if labels is not None:
            labels = _checked_labels(labels, num_samples)
        cycle = EpochCycle()
        self.sampler = PruningSampler(
            range(num_samples) if dataset is None else dataset,
            num_replicas=num_replicas,
            rank=rank,
            seed=seed,
            drop_last=drop_last,
            cycle=cycle,
            choose_epoch=self.set_epoch,
        )
        self.nonfinite = 0
        self._policy = copy.deepcopy(policy)
        self._counts = StepCounts(self._policy, num_samples, shape)
        self._counts.bind()
        self._counts.check_rounding()
        self._policy.bind_seed(seed)
        self._dataset = dataset
        self._num_samples = num_samples
        self._shape = shape
        self._replicas = replicas
        self._seed = seed
        self._cycle = cycle
        cycle.count = self._count
        self._recorder = Recorder(self._policy, replicas, num_samples)
        self._checks = LoopChecks(self._counts, replicas, cycle)
        self._warnings = LoopWarnings(self._checks, self.sampler, dataset is not None)
        self._last_batch = LastBatch(self._checks, self.sampler)
        self._rescaling: Rescaling | None = None
        self._loaders = PrunedLoaders(self.sampler, num_samples, of_this_rank, drop_last)
        self._report = RunReport(self._counts, dataset)
        self._pruner_watch = PrunerWatch(num_samples, replicas.group_for_logits, self._policy)
        self._total_steps: int | None = None  # None if it is not known, or may have changed.
        self._show(0)
        if labels is not None:
            self._take_labels(labels)
        if log is not None:
            self.log(log)

    # -- the data ----------------------------------------------------------------------------------

    @property
    def dataset(self) -> Indexed:
        """The data set wrapped in ``Indexed``.

        Raises:
            InputError: The pruner was given a length instead of a data set.
        """
        if self._dataset is None:
            raise InputError(
                f"expected a pruner that was given a data set, got one of {self._num_samples} "
                f"samples: give {type(self).__name__} the data set, or index your own arrays with "
                f"plan.kept"
            )
        return self._dataset

    @property
    def num_samples(self) -> int:
        """The number of samples N."""
        return self._num_samples

    @property
    def shape(self) -> BatchShape:
        """How the samples are grouped into batches and optimizer steps."""
        return self._shape

    @property
    def policy(self) -> Policy:
        """This pruner's own copy of the policy."""
        return self._policy

    @property
    def plan(self) -> EpochPlan:
        """The plan of the current epoch."""
        self._cycle.read_plan()  # A loop may train on ``plan.kept`` without the sampler.
        return self._cycle.current.plan

    @property
    def counts(self) -> torch.Tensor | None:
        """DroppingCounts as of the last epoch that ended, shape (N,); None if there are none."""
        return self._policy.counts

    def number_by(self, digest: int) -> None:
        """Declare that something other than a data set numbers the samples, such as a ``KeyIndex``.

        Args:
            digest: A number that is the same for equal numberings. All ranks must give the same.
        """
        self._checks.numbering = digest

    def loader(
        self,
        dataset: Any = None,
        *,
        batch_size: int | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **options: Any,
    ) -> DataLoader[Any]:
        """Return a ``DataLoader`` over this pruner's samples, whose batches are ``(index, batch)``.

        You may call this inside the loop over the epochs. While you keep the loader in a variable,
        its workers persist from epoch to epoch, and a call with the same arguments returns it
        again, unless it is in the middle of an epoch. (Persistent workers do not see changes that
        you make to the data set between epochs: give ``persistent_workers=False`` if you make any.)
        Functions that are given only the loader find this pruner in its attribute ``pruner``.

        Args:
            dataset: Another data set with the same N samples. By default, that of the pruner.
            batch_size: Number of samples per batch and rank. By default, that of the pruner.
            num_workers: Number of worker processes.
            collate_fn: Your collate function. It receives the items without their indices, and must
                keep their order. With ``IndexedCollate(function, key="index")``, the batches are
                dicts that contain the indices.
            options: Further keyword arguments of ``DataLoader``, such as ``pin_memory``.

        Raises:
            InputError: An option would undo the pruning (``shuffle``, ``sampler``,
                ``batch_sampler``, ``in_order=False``, or a ``drop_last`` or batch size that differs
                from the pruner's); there is no batch size or no data set; or the data set has a
                different number of samples.
        """
        loader = self._loaders.get(
            self.dataset if dataset is None else dataset,
            batch_size=batch_size,
            num_workers=num_workers,
            collate_fn=collate_fn,
            **options,
        )
        loader.pruner = self
        return loader

    def set_rates(self, rates: Rates, by: str = "epochs") -> None:
        """Give the policy the learning rates of the training, before anything is recorded.

        This is for schedulers that are made after the pruner because they need its number of steps.
        The scheduler and its optimizer are not changed: a copy is stepped.

        Args:
            rates: One number per epoch or step; a function of the progress in epochs, or of the
                number of steps; or a torch learning-rate scheduler.
            by: What each rate belongs to: "epochs" or "steps".

        Raises:
            InputError: The policy takes no learning rates, the rates do not fit the training, or
                losses have been recorded.
        """
        cycle = self._cycle
        if cycle.unfinished is not None or cycle.next_epoch or cycle.ended_here:
            raise InputError(
                "expected set_rates() before the training, got a call after losses were recorded: "
                "call it before the first epoch and before load_state_dict()"
            )
        self._policy.set_rates(rates, by)
        self._show(cycle.epoch)

    # -- the epochs --------------------------------------------------------------------------------

    @property
    def position(self) -> Position:
        """Where this rank is: the epoch in progress (or the next one), and what it recorded."""
        unfinished = self._cycle.unfinished
        if unfinished is None:
            return Position(self._cycle.next_epoch, 0, 0)
        samples = unfinished.samples // self._checks.num_ranks
        return Position(unfinished.plan.epoch, unfinished.batches, samples)

    def epochs(self, start: int | None = None) -> Iterator[int]:
        """Iterate over the epochs: start each one, yield its number, and end it.

        After a state was loaded, the iteration continues where that state was saved. If this was in
        the middle of an epoch, the sampler yields the rest of the epoch. If it was after the last
        batch, the epoch is ended at once, and the iteration continues with the next one. Leaving
        the loop by ``break`` leaves the epoch open.

        Args:
            start: The first epoch, counted from 0. By default, the epoch that is still open, or
                else the next one. If losses of another epoch have been recorded, that epoch is
                ended first, and ``start`` begins with its first batch. Epochs that are left out
                count as trained as planned. The epoch ``start`` is yielded even if it has no
                batches left, so ``epochs(pruner.position.epoch)`` runs what the loop does after the
                last batch.

        Raises:
            InputError: ``start`` is not an epoch of the training, or no ``start`` is given and this
                process has trained all epochs.
        """
        cycle, epochs = self._cycle, self._policy.epochs
        if start is not None and not 0 <= start < epochs:
            raise InputError(f"expected start in 0..{epochs - 1}, got {start}")
        if start is None:
            self._checks.check_epochs_left()
            cycle.begin_loop()
            if self._is_complete():
                self._commit()
        driver = object()
        for epoch in range(cycle.next_epoch if start is None else start, epochs):
            self.start_epoch(epoch)
            cycle.drive(driver)
            try:
                yield epoch
            except GeneratorExit:  # The loop was left by ``break``.
                cycle.let_go(driver)
                raise
            self.end_epoch()

    def iterate(self, loader: Any) -> Iterator[Any]:
        """Iterate over all remaining batches of the training, for loops that count iterations.

        Epochs are started and ended as in ``epochs``. An epoch is ended when the first batch of the
        next one is requested, so record each batch before you request another. After the last batch
        of the training, ``steps_left`` is 0.

        Args:
            loader: A loader over the samples of this pruner, such as ``pruner.loader()``.

        Yields:
            The batches of the loader, such as ``(index, batch)``.

        Warns:
            RuntimeWarning: Batches were not recorded before the next one was requested.

        Raises:
            InputError: This process has trained all epochs.
        """
        for _ in self.epochs():
            before, read = self._cycle.current.batches, 0
            for batch in loader:
                read += 1
                yield batch
            self._warnings.warn_if_read_ahead(read, self._cycle.current.batches - before)

    def start_epoch(self, epoch: int) -> None:
        """Begin ``epoch`` (counted from 0), or continue it where the losses recorded so far end.

        For the loops of frameworks, this replaces one pass of ``epochs``: call ``end_epoch`` after
        the last batch. Until then, ``set_epoch`` with another epoch is an error. If losses of
        another epoch have been recorded, that epoch is ended first.

        Raises:
            InputError: The epoch is outside the training.
        """
        check_epoch(epoch, self._policy.epochs)
        cycle = self._cycle
        cycle.let_go()
        unfinished = cycle.unfinished
        if unfinished is not None and unfinished.plan.epoch != epoch:
            self._commit()
        self.set_epoch(epoch)
        progress = cycle.unfinished
        if progress is not None:
            progress.samples = self._last_batch.samples_loaded(progress)
            self._last_batch.begin_after(progress.batches)
            self._follow(progress.plan, progress.planned - progress.left)
        cycle.drive()

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` (counted from 0) current, and plan it from the current counts.

        This changes no counts and keeps the plan of an epoch in progress, so it may be called any
        number of times, in any order. If losses of another epoch have been recorded, that epoch is
        ended first.

        Raises:
            InputError: The epoch is not one of the training, or ``epochs`` or ``start_epoch`` has
                another one in progress.
        """
        check_epoch(epoch, self._policy.epochs)
        cycle = self._cycle
        cycle.from_first |= epoch == 0
        self._checks.check_not_driven(epoch)
        if epoch == cycle.epoch and cycle.is_open:
            return
        # Some trainers call set_epoch for each earlier epoch after a state was loaded. An epoch
        # that comes from this state is kept until the trainer goes beyond it.
        if cycle.must_end_before(epoch):
            self._commit()
        self._show(epoch)

    def record(
        self,
        index: Any,
        losses: torch.Tensor,
        logits: torch.Tensor | None = None,
        labels: Any = None,
    ) -> torch.Tensor:
        """Record the losses of a batch, and return the scalar to backpropagate.

        If you also give logits and labels, the training is watched for wrong labels: see
        ``watch.suspects()``. ``Adaptive`` then also skips samples whose labels are confused; other
        policies ignore this.

        On a CPU, losses and logits are kept for some steps without a copy: do not change them in
        place. Everything else is copied, without waiting for the device.

        Args:
            index: The indices of the samples, integers, shape (B,): the first part of each batch.
            losses: One loss per sample, floating point, shape (B,) (``reduction="none"``).
            logits: The output of a classifier for them; floating point, shape (B, C).
            labels: Their labels, required with ``logits``; integers, shape (B,); -100 for a sample
                without a label.

        Returns:
            The mean of the losses, shape (). If the plan has weights, each loss is first multiplied
            by its weight.

        Raises:
            InputError: A shape, a type or an index is wrong; the epoch has ended, or all samples of
                its plan have been recorded; an earlier batch was changed in place; the ranks do not
                exchange the losses from which the policy learns; or this is called in a backward
                pass, by ``torch.utils.checkpoint``.
            RuntimeError: The plan has weights, but the returned scalars were not backpropagated.
        """
        index = as_numbers("indices", index)
        if is_compiling():
            of_batch = None if logits is None else logits.detach()
            self._record_untraced(self, index, losses.detach(), of_batch, labels)
        else:  # Outside a compiled step, the call above takes longer.
            check_not_recomputed()
            self._record(index, losses, logits, labels)
        return losses.mean() if self._rescaling is None else self._rescaling.mean(index, losses)

    def weighted(self, index: Any, losses: torch.Tensor) -> torch.Tensor:
        """Return the losses times the weights of the plan, for a scalar of your own.

        Nothing is recorded or reduced: call ``record`` as well, and ignore its result. If the plan
        has no weights, the losses are returned unchanged.

        Args:
            index: Indices of the samples, integers, shape (B,). They may repeat, as for the tokens
                of packed texts.
            losses: The losses of each sample, floating point, shape (B,) or (B, ...), such as
                (B, tokens).

        Raises:
            InputError: A shape or a type is wrong.
        """
        index = as_numbers("indices", index)
        if not losses.ndim or index.shape != losses.shape[:1]:
            raise InputError(
                f"expected losses of shape (B, ...) for indices of shape (B,), got losses of shape "
                f"{tuple(losses.shape)} and indices of shape {tuple(index.shape)}"
            )
        return losses if self._rescaling is None else self._rescaling.weighted(index, losses)

    @property
    def watch(self) -> LabelWatch | None:
        """The evidence on the labels; None until logits are recorded.

        It is part of ``state_dict``. With several ranks, ``synchronize`` merges it.
        """
        return self._pruner_watch.watch

    def observe(
        self,
        index: Any,
        losses: torch.Tensor,
        logits: torch.Tensor | None = None,
        labels: Any = None,
    ) -> None:
        """Record losses that were backpropagated elsewhere, such as in another process.

        Unlike ``record``, this does not check that a gradient arrives: if the plan has weights,
        apply them where you backpropagate. The arguments are those of ``record``.

        Raises:
            InputError: As for ``record``.
        """
        self._checks.observes = True
        self._record(as_numbers("indices", index), losses, logits, labels)

    def end_epoch(self) -> None:
        """End the current epoch: merge what the ranks recorded, and let the policy learn from it.

        With ``FinePruning``, this is the end of an epoch in Algorithm 1 of Li et al., NPC 2018.

        A second call in the same epoch does nothing. All ranks must call this method.

        Warns:
            RuntimeWarning: Losses were NaN or infinite, or the loop does not follow the plan; see
                ``loop_warnings``.

        Raises:
            InputError: An index is out of range, or the ranks have different plans.
            RuntimeError: The plan has weights, but the returned scalars were not backpropagated.
        """
        cycle = self._cycle
        cycle.let_go()
        if not cycle.is_open:
            return
        if cycle.unfinished not in (None, cycle.current):
            # The epoch with losses comes from a loaded state. The current one precedes it and
            # recorded nothing, so it had ended before the state was taken.
            cycle.close()
            return
        self._commit()

    # -- state -------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Exchange what was recorded so far, so that ``state_dict`` includes all ranks.

        With several ranks, call this before a ``state_dict()`` in the middle of an epoch and, if
        logits are recorded, before every ``state_dict()``. All ranks must call it after the same
        batch.
        """
        self._checks.compare_ranks(self._seed)
        if self.watch is not None:
            self.watch.merge()
        self._recorder.flush(self._in_progress.plan)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resumed run needs, without communication.

        The state consists of tensors, numbers, strings, lists and dicts, so that it loads with
        ``weights_only=True``.

        Raises:
            InputError: There are several ranks, and ``synchronize()`` was not called after the last
                batch (if logits are recorded, it must also be called after each epoch); or the
                policy has a state of another kind.
        """
        if self._replicas.size == 1:
            self.synchronize()
        watch, unfinished = self.watch, self._cycle.unfinished
        epoch = self._in_progress.plan.epoch
        if not (self._recorder.flushed and (watch is None or watch.is_complete)):
            raise InputError(unsynchronized(epoch))
        progress = None
        if unfinished is not None:
            loaded = replace(unfinished, samples=self._last_batch.samples_loaded(unfinished))
            trained = self._last_batch.completes(loaded)
            progress = pack_progress(loaded, self._num_samples, trained)
            if not trained:
                again = self._last_batch.samples_to_repeat(loaded)
                self._warnings.warn_of_another_order(loaded, again)
        self._warnings.warn_before_saving()
        packed = {
            **self._identity(),
            "epoch": epoch,
            "open": self._cycle.is_open or unfinished is not None,
            "synchronized": True,
            "shape": asdict(self._shape),
            "nonfinite": self._recorder.nonfinite,
            "progress": progress,
            "learned": self._policy.state_dict(),
            "totals": asdict(self._report.totals),
            "watch": None if watch is None else watch.state_dict(),
            "labels": self._checks.labels_digest,
        }
        state: dict[str, Any] = plain(packed, "the state")
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state. The number of ranks and the batch size may have changed.

        After such a change, ``steps_done`` counts as if all steps had been as large as they are
        now, so its share of ``total_steps()`` stays the same.

        Warns:
            RuntimeWarning: The labels differ from those of the training that saved the state.
            UserWarning: The number of samples per step differs from that of the state.

        Raises:
            InputError: The state has another version, comes from a run with another N, seed or
                policy, or was saved in the middle of an epoch without ``synchronize()``; or this is
                called inside the loop over the epochs.
        """
        self._checks.check_may_load()
        check_state(state, plain(self._identity(), "the settings"), _KEYS)
        state = plain(state, "the state")  # ``map_location`` may have moved tensors from the CPU.
        epoch, packed = state["epoch"], state["progress"]
        if not state["synchronized"]:
            raise InputError(unsynchronized(epoch))
        # What other versions may have in another form is read before the rest is changed.
        expected = "expected a pruner state of this version, got one that cannot be read"
        with explaining(expected, (KeyError, TypeError), f": {OF_ANOTHER_VERSION}"):
            progress = None if packed is None else unpack_progress(packed, epoch, self._num_samples)
            totals, shape = RunTotals(**state["totals"]), BatchShape(**state["shape"])
            self._policy.load_state_dict(state["learned"])
        self._recorder.clear()
        self._recorder.nonfinite = state["nonfinite"]
        self._report.totals = totals
        self._pruner_watch.restore(state["watch"])
        if progress is not None:
            plan, recorded = progress
            self._restore(plan, Phase.RESTORED, **recorded)
        elif state["open"]:
            self._restore(self._choose(epoch), Phase.PLANNED)
        else:
            # The policy has learned from this epoch since, so that it cannot be planned again.
            self._restore(EpochPlan.full(epoch, self._num_samples), Phase.ENDED)
        # Older states lack it.
        warn_of_other_digest(state.get("labels", 0), self._checks.labels_digest)
        self._count_anew(shape)

    # -- numbers known in advance ------------------------------------------------------------------

    def total_steps(self) -> int:
        """Return the number of optimizer steps of the whole training, known before it starts.

        Raises:
            InputError: ``batch_size`` was not given, or the number of steps depends on data.
        """
        self._warnings.steps_asked = True
        if self._total_steps is None:  # A loop may ask for the steps that are left in each step.
            self._total_steps = self._counts.total_steps() + self._report.totals.extra
        return self._total_steps

    @property
    def steps_done(self) -> int:
        """The number of optimizer steps so far, for schedulers that count steps.

        A step counts as soon as the losses of its last batch are recorded. Incomplete accumulation
        at the end of an epoch counts as a step.
        """
        whole, rest = divmod(self.position.batches, self._shape.accumulation)
        return self._report.totals.steps + whole + (rest > 0 and self._is_complete())

    @property
    def steps_left(self) -> int:
        """The steps of ``total_steps`` that were not taken, including those of omitted epochs.

        It is 0 if epochs are trained again after the last one.

        Raises:
            InputError: As for ``total_steps``.
        """
        return max(self.total_steps() - self.steps_done, 0)

    @property
    def step_is_due(self) -> bool:
        """Whether the batch that was recorded last completes an optimizer step.

        This is true after every ``accumulation`` batches, and after the last batch of an epoch.
        """
        batches = self.position.batches
        if not batches:
            return False
        return batches % self._shape.accumulation == 0 or self._is_complete()

    def num_kept(self, epoch: int) -> int | None:
        """Return how many samples all ranks together train in ``epoch``, without padding.

        If some samples are skipped, the number is rounded up to whole batches. None if it depends
        on data.

        Raises:
            InputError: The epoch is outside the training.
        """
        check_epoch(epoch, self._policy.epochs)
        return self._counts.num_kept(epoch)

    def batches(self, epoch: int) -> int:
        """Return the exact number of batches per rank of ``epoch``, even before the training.

        Raises:
            InputError: The epoch is not one of the training; ``batch_size`` was not given; or the
                length of the epoch depends on data, and it is not the current epoch.
        """
        return self._shape.batches_of(self._length(epoch))

    def steps(self, epoch: int) -> int:
        """Return the exact number of optimizer steps of ``epoch``, even before the training.

        Raises:
            InputError: As for ``batches``.
        """
        return self._shape.steps_of(self._length(epoch))

    # -- reports -----------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """Return what the training has cost so far and what it will save, as JSON values.

        Returns:
            - ``policy``: the name of the policy;
            - ``epochs``, ``epochs_done``: the number of epochs of the training, and of those
              trained so far;
            - ``skipped``: the share of the sample-steps of the trained epochs that was skipped;
            - ``predicted_saving``: the share of the steps that the whole training saves (of the
              sample-steps, without ``batch_size``); None if it depends on data;
            - ``steps``, ``total_steps``: the optimizer steps so far, and of the whole training
              (None if they are not known);
            - ``record_calls``: the number of batches that this rank recorded;
            - ``bookkeeping_seconds``: the time that this process spent on choosing samples and
              ending epochs, without ``record``; it includes waiting for the GPU;
            - ``suspects``: at most ten samples whose labels should be checked first: the first ones
              of ``watch.suspects`` if logits are recorded and the ranks have merged, or else of
              ``Policy.suspects``. Empty if the policy suspects none;
            - ``facts``: what the evidence says of the labels, in sentences; see
              ``LabelWatch.facts``. Empty if no logits are recorded, or the ranks have not merged.
        """
        return self._report.summary(self.position.batches, self.steps_done, self.watch)

    def log(self, target: Any, by: str = "steps") -> None:
        """Report each epoch to ``target`` when it ends, on the first rank of the group only.

        The values are ``fineprune/epoch`` (counted from 0), ``fineprune/skipped`` (the share of the
        samples that the epoch skipped), ``fineprune/saved`` (the share of the sample-steps so far),
        ``fineprune/overhead_seconds`` (see ``summary``) and, if the policy names suspects,
        ``fineprune/suspects`` (their number).

        Args:
            target: A ``callable(dict, step)``, such as ``wandb.log``, ``mlflow.log_metrics`` or
                ``trackio.log``, or TensorBoard's ``SummaryWriter``.
            by: What ``step`` counts: the optimizer "steps" or the "epochs" so far.

        Raises:
            InputError: ``target`` or ``by`` is something else.
        """
        self._report.add_writer(target, by)

    def __repr__(self) -> str:
        report = self._report
        return (
            f"{type(self).__name__}({self._num_samples} samples, policy {self._policy.name!r}, "
            f"{report.totals.epochs} of {self._policy.epochs} epochs done, "
            f"{report.skipped:.1%} skipped)"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes, with losses that no longer wait: a copy has other versions."""
        self._cycle.settle()
        return super().__getstate__()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Pruner":
        """Return a copy at the same position, without the loops and loaders of this pruner."""
        self._cycle.settle()
        made: Pruner = type(self).__new__(type(self))
        memo[id(self)] = made
        memo[id(self._replicas.group)] = self._replicas.group  # Process groups cannot be copied.
        for name, value in vars(self).items():
            setattr(made, name, copy.deepcopy(value, memo))
        made._cycle.let_go()
        made._checks.ranks_compared = True  # One rank may try a copy alone.
        return made

    # -- internals ---------------------------------------------------------------------------------

    def _take_labels(self, labels: npt.NDArray[np.integer]) -> None:
        """Give the policy the label of each sample, and compare them with what it has learned."""
        self._policy.bind_labels(labels)
        numbers = labels.astype(np.int64)  # In one form on all ranks.
        self._checks.labels_digest = zlib.crc32(numbers.data)
        self._pruner_watch.given_labels = torch.from_numpy(numbers)

    @property
    def _in_progress(self) -> Progress:
        """The epoch with losses; without losses, the current one."""
        return self._cycle.unfinished or self._cycle.current

    def _length(self, epoch: int) -> int:
        """Return how many samples all ranks together train in ``epoch``."""
        kept = self.num_kept(epoch)
        for progress in (self._in_progress, self._cycle.current):
            # An epoch that ended before a state was saved has another plan than it was trained by.
            if progress.plan.epoch == epoch and (progress.samples or kept is None):
                return progress.plan.number
        if kept is None:
            raise InputError(
                f"expected an epoch whose length is known in advance, got epoch {epoch} of policy "
                f"{self._policy.name!r}, whose length depends on data: ask when it is the current "
                f"one"
            )
        return kept

    def _is_complete(self) -> bool:
        """Return whether nothing is left to train of the epoch with losses."""
        unfinished = self._cycle.unfinished
        return unfinished is not None and self._last_batch.completes(unfinished)

    @uninterrupted()
    def _show(self, epoch: int) -> None:
        """Make ``epoch`` current: with the plan of a restored epoch if it is this one."""
        self._total_steps = None
        self._last_batch.begin_after(0)
        if self._cycle.take_up(epoch):
            self._follow(self._cycle.current.plan)
            return
        with self._report.bookkeeping():
            plan = self._choose(epoch)
        self._cycle.follow(plan, self._follow(plan))

    def _choose(self, epoch: int) -> EpochPlan:
        num_kept = self.num_kept(epoch)
        if num_kept is not None and num_kept >= self._num_samples:
            return EpochPlan.full(epoch, self._num_samples)
        try:
            plan = self._policy.select(epoch, num_kept, stream(self._seed, epoch, "select"))
            check_plan(plan, epoch, num_kept, self._num_samples)
        except InputError as error:
            raise InputError(f"policy {self._policy.name!r} in epoch {epoch}: {error}") from error
        return rescaled(plan, self._num_samples) if self._policy.plan_options.rescale else plan

    def _follow(self, plan: EpochPlan, start: int = 0) -> int:
        self._rescaling = None
        if plan.weights is not None:
            # A step may be backpropagated only when the next batch is recorded. Without a batch
            # size, this is checked at the end of the epoch.
            batches, size = self._shape.accumulation + 1, self._shape.batch_size or math.inf
            self._rescaling = Rescaling(plan.weights, batches, size)
        self.sampler.follow(plan, start)
        return self.sampler.total_size

    def _record(
        self,
        index: torch.Tensor,
        losses: torch.Tensor,
        logits: torch.Tensor | None,
        labels: Any,
    ) -> None:
        cycle = self._cycle
        losses = as_local("losses", losses)
        check_batch(index, losses)
        cycle.pending.append(as_batch(index, losses))
        if logits is not None or labels is not None:
            try:
                self._pruner_watch.record(index, losses, logits, labels)
            except Exception:  # A batch that is refused must not count: it is recorded again.
                cycle.pending.pop()
                raise
        if len(cycle.pending) >= cycle.limit:
            cycle.settle()

    def _count(self, batches: Sequence[Batch]) -> None:
        """Count batches of the current epoch, and keep losses that the policy learns from."""
        cycle = self._cycle
        if cycle.phase is not Phase.RECORDING:
            self._begin(*batches[0][:2])
        largest = 0
        for index, losses, _ in batches:
            samples = len(losses) * self._checks.num_ranks
            self._checks.check_room(samples)
            cycle.add(samples)
            largest = max(largest, len(losses))
            if self._warnings.watching:
                self._warnings.see(index)
        self._last_batch.note(batches[-1][0])
        if self._policy.needs_losses:
            self._recorder.extend(cycle.current.plan, batches)
        # As many batches may wait as the epoch takes for certain.
        room = int(min(cycle.room() / self._checks.num_ranks, MOST_LOSSES_WAITING)) // largest
        cycle.limit = max(1, min(room, MOST_WAITING))

    def _begin(self, index: torch.Tensor, losses: torch.Tensor) -> None:
        """Begin to record the current epoch with its first batch."""
        cycle = self._cycle
        self._checks.compare_ranks(self._seed)
        self._checks.check_first_batch(index, losses)
        self._warnings.warn_of_missing_rates()
        self._warnings.warn_of_another_epoch()
        if cycle.unfinished not in (None, cycle.current):
            # It comes from a loaded state, and the user went back before it.
            assert cycle.unfinished is not None
            self._end(cycle.unfinished)
        cycle.begin(self._most(cycle.current.planned))

    def _most(self, planned: int) -> float:
        """Return how many samples may be recorded of an epoch, whose last batch may be padded.

        Without a batch size, it is not known how the samples are grouped and which are repeated.
        What is noticed then is only a loop that begins a complete epoch anew.
        """
        padding = self._checks.num_ranks - 1  # Repeated after the number of ranks has changed.
        batch = self._shape.samples_per_batch
        if batch is None:
            alone = self._cycle.current.restored and self._replicas.size == 1
            return planned + padding if alone else math.inf
        return -(-planned // batch) * batch + padding

    def _commit(self) -> None:
        """End the epoch with losses; without losses, the current one."""
        if self._rescaling is not None:
            self._rescaling.check_used()
        self._checks.compare_ranks(self._seed)
        progress = self._in_progress
        with self._report.bookkeeping():
            self._recorder.flush(progress.plan)
        self._end(progress)

    def _end(self, progress: Progress) -> None:
        """End an epoch, which must have been flushed."""
        cycle = self._cycle
        number = trained = progress.plan.number
        if progress.batches and not self._last_batch.completes(progress):
            trained = round(number * progress.samples / progress.planned)
        without_logits = self._pruner_watch.is_loaded and cycle.phase is Phase.RECORDING
        with uninterrupted():
            if progress.batches or cycle.sampler_read or cycle.plan_read:
                self._report.add_epoch(trained, progress.batches)
            with self._report.bookkeeping():
                self._learn(progress.plan)
                planned = None
                if self._shape.batch_size is not None and not progress.restored:
                    planned = self._shape.batches_of(number)
                messages = self._warnings.end_epoch(
                    progress, planned, self._recorder, self._report.totals
                )
                self.nonfinite = self._recorder.nonfinite
                self._recorder.clear()
                cycle.end(progress)
        if self.nonfinite:
            messages.append(
                f"{self.nonfinite} losses of epoch {progress.plan.epoch} were NaN or infinite, "
                f"and {self._policy.of_nonfinite}"
            )
        for message in messages:
            warn_user(message)
        if without_logits:
            self._warnings.warn_of_missing_logits(progress.plan.epoch)
        if self._replicas.rank == 0:
            self._report.write(progress.plan.epoch, trained)

    def _learn(self, plan: EpochPlan) -> None:
        watch = self.watch
        self._checks.check_logits(watch is not None)
        if watch is not None and self._policy.needs_ranking:
            watch.merge()
            ranking = watch.ranking_so_far()
            if ranking is not None:
                self._policy.observe_ranking(plan.epoch, ranking)
        self._policy.end_epoch(plan.epoch)

    def _restore(self, plan: EpochPlan, phase: Phase, **recorded: Any) -> None:
        """Continue with an epoch of a loaded state, of which so much was recorded."""
        self._total_steps = None
        self._warnings.forget()
        self._cycle.restore(Progress(plan, self._follow(plan), restored=True, **recorded), phase)

    def _count_anew(self, before: BatchShape) -> None:
        """Count what a loaded state has trained in batches and steps of the current size."""
        shape, cycle = self._shape, self._cycle
        if before == shape or None in (before.batch_size, shape.batch_size):
            return
        steps = self._counts.steps_before(cycle.next_epoch)
        totals = self._report.totals
        if steps is not None:
            totals.steps, totals.extra = steps, 0
        progress = cycle.unfinished
        if progress is not None:
            plan = progress.plan
            whole = shape.batches_of(plan.number)
            progress.batches = whole - shape.batches_of(progress.left)
            if steps is not None:
                # It keeps its plan, which was rounded to steps of the size before.
                planned = self.num_kept(plan.epoch)
                if planned is None:
                    planned = self._choose(plan.epoch).number
                totals.extra += shape.steps_of(plan.number) - shape.steps_of(planned)
        if before.multiple != shape.multiple and self.steps_done:
            warn_user(
                f"a step has {shape.multiple} samples (batch x ranks x accumulation) now, and had "
                f"{before.multiple} in the loaded state, so the number of steps has changed: make "
                f"new schedulers if they count steps, with pruner.total_steps(), and step them "
                f"pruner.steps_done times",
                UserWarning,
            )

    def _identity(self) -> dict[str, Any]:
        """Return what a saved state must agree with."""
        return {
            "version": STATE_VERSION,
            "num_samples": self._num_samples,
            "seed": self._seed,
            "settings": self._policy.settings(),
            "options": self._policy.plan_options.settings(),
        }


def _checked_labels(labels: Any, num_samples: int) -> npt.NDArray[np.integer]:
    """Return the class of each sample as integers, shape (N,).

    Raises:
        InputError: The labels are no integers, or of another number.
    """
    given = labels.detach().cpu().numpy() if isinstance(labels, torch.Tensor) else labels
    # Numpy refuses lists of different lengths.
    with explaining("expected labels as integers of shape (N,)", ValueError):
        values: npt.NDArray[Any] = np.asarray(given)
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise InputError(
            f"expected labels as integers of shape (N,), got {values.dtype} of shape {values.shape}"
        )
    if len(values) != num_samples:
        raise InputError(
            f"expected one label for each of {num_samples} samples, got {len(values)} labels"
        )
    return values


def _global_batch_size(
    batch_size: int | None, processes: int, num_replicas: int | None, rank: int | None
) -> int:
    """Return the number of samples in the batches of all processes, which a framework divides."""
    if num_replicas is not None or rank is not None:
        raise InputError(
            f"expected sharded_by_loader without num_replicas and rank, since the framework "
            f"divides the batches, got num_replicas={num_replicas} and rank={rank}: leave them "
            f"out, or leave out sharded_by_loader if batch_size is that of all processes together "
            f"(split_batches)"
        )
    if batch_size is None:
        raise InputError("expected batch_size (that of one rank) with sharded_by_loader, got None")
    return check_whole_number("batch_size", batch_size, 1) * processes
