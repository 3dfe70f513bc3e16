"""Pruner: decides which samples each epoch trains on, for a training loop of any kind."""

import copy
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch.compiler import is_compiling
from torch.utils.data import DataLoader

from fineprune.errors import InputError, check_whole_number, explaining, warn_user
from fineprune.interrupts import uninterrupted
from fineprune.labels.batch import as_local, as_numbers, check_not_recomputed
from fineprune.labels.dataset_attributes import labels_of
from fineprune.labels.label_watch import LabelWatch
from fineprune.labels.untraced import Untraced
from fineprune.pruning.epoch import Epoch
from fineprune.pruning.indexed import Indexed, indexed_and_length
from fineprune.pruning.loader import PrunedLoaders
from fineprune.pruning.loop_checks import (
    check_batch,
    check_first_batch,
    check_recorded_labels,
    check_room,
    checked_labels,
    compare_ranks,
)
from fineprune.pruning.loop_warnings import LoopWarnings
from fineprune.pruning.plan import EpochPlan, check_plan
from fineprune.pruning.policies.policy import Policy, check_is_policy
from fineprune.pruning.pruner_state import (
    OF_ANOTHER_VERSION,
    check_state,
    pack_epoch,
    plain,
    unpack_epoch,
    unsynchronized,
)
from fineprune.pruning.random_streams import stream
from fineprune.pruning.rates import Rates
from fineprune.pruning.recorder import Recorder
from fineprune.pruning.replicas import AllGather, Replicas, share_of_rank
from fineprune.pruning.rescaling import Rescaling
from fineprune.pruning.run_report import RunReport, RunTotals
from fineprune.pruning.sampler import PruningSampler, samples_per_rank
from fineprune.pruning.schedule import check_epoch
from fineprune.pruning.seen_samples import SeenSamples
from fineprune.pruning.step_counts import BatchShape, StepCounts

STATE_VERSION = 1

_KEYS = ("labels", "epoch", "shape", "progress", "recorded", "learned", "totals", "watch")


@dataclass(frozen=True)
class Position:
    """Where one rank is in its training.

    Attributes:
        epoch: The epoch in progress, counted from 0, or the next one if it has ended. After the
            last epoch, it is the number of epochs.
        batches: Number of batches of this epoch that this rank has recorded.
        samples: Number of samples of this rank's order that these batches cover.
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
        if labels is None and dataset is not None and policy.needs_ranking:
            labels = labels_of(dataset.dataset)
        if labels is not None:
            labels = checked_labels(labels, num_samples)
        self._policy = copy.deepcopy(policy)
        self._counts = StepCounts(self._policy, num_samples, shape, seed, labels)
        self._counts.check_rounding()
        self.sampler = PruningSampler(
            range(num_samples) if dataset is None else dataset,
            num_replicas=num_replicas,
            rank=rank,
            seed=seed,
            drop_last=drop_last,
            choose_epoch=self.set_epoch,
            note_read=self._note_read,
        )
        self.nonfinite = 0
        self._dataset = dataset
        self._num_samples = num_samples
        self._shape = shape
        self._replicas = replicas
        self._num_ranks = max(num_replicas, replicas.size)
        self._batch = shape.samples_per_batch or 0  # That of all ranks; 0 if it is not known.
        self._seed = seed
        self._numbering = 0
        self._labels_digest = 0 if labels is None else zlib.crc32(labels.astype(np.int64).data)
        # The labels that the first batch with labels is compared with.
        self._given_labels = None if labels is None else torch.from_numpy(labels.astype(np.int64))
        self._recorder = Recorder(self._policy, replicas, num_samples)
        self._warnings = LoopWarnings(self._policy, num_samples, dataset is not None)
        self._loaders = PrunedLoaders(self.sampler, num_samples, of_this_rank, drop_last)
        self._report = RunReport(self._counts, dataset)
        self._watch: LabelWatch | None = None
        self._rescaling: Rescaling | None = None
        self._seen: SeenSamples
        self._epoch: Epoch
        # An unfinished epoch of a loaded state, while an earlier one is current.
        self._aside: Epoch | None = None
        self._next = 0  # The first epoch behind all that have ended.
        self._driver: object | None = None  # The loop that has the current epoch in progress.
        self._compared = replicas.size == 1  # Whether the ranks were compared.
        self._total_steps: int | None = None  # None if it is not known, or may have changed.
        self._sampler_read = self._plan_read = self._read_ahead = self._read_again = False
        self._show(0)
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
        self._plan_read = True  # A loop may train on ``plan.kept`` without the sampler.
        self._read_again |= self._epoch.recording and self._epoch.complete
        return self._epoch.plan

    @property
    def counts(self) -> torch.Tensor | None:
        """DroppingCounts as of the last epoch that ended, shape (N,); None if there are none."""
        return self._policy.counts

    def number_by(self, digest: int) -> None:
        """Declare that something other than a data set numbers the samples, such as a ``KeyIndex``.

        Args:
            digest: A number that is the same for equal numberings. All ranks must give the same.
        """
        self._numbering = digest
        self._look_at_samples()

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
        if self._next or self._unfinished is not None:
            raise InputError(
                "expected set_rates() before the training, got a call after losses were recorded: "
                "call it before the first epoch and before load_state_dict()"
            )
        self._policy.set_rates(rates, by)
        self._show(self._epoch.number)

    # -- the epochs --------------------------------------------------------------------------------

    @property
    def position(self) -> Position:
        """Where this rank is: the epoch in progress (or the next one), and what it recorded."""
        unfinished = self._unfinished
        if unfinished is None:
            return Position(self._next_epoch, 0, 0)
        done = min(unfinished.done, unfinished.planned) // self._num_ranks
        return Position(unfinished.number, unfinished.batches, done)

    def epochs(self, start: int | None = None) -> Iterator[int]:
        """Iterate over the epochs: start each one, yield its number, and end it.

        After a state was loaded, the iteration continues where that state was saved. If this was in
        the middle of an epoch, the sampler yields the rest of the epoch. If it was after the last
        batch, the epoch is ended at once, and the iteration continues with the next one. Leaving
        the loop by ``break`` leaves the epoch open.

        Args:
            start: The first epoch, counted from 0: the one in progress, or a later one. By default,
                the epoch that is still open, or else the next one. An epoch in progress is ended
                before a later one begins. Epochs that are left out count as trained as planned. The
                epoch ``start`` is yielded even if it has no batches left, so
                ``epochs(pruner.position.epoch)`` runs what the loop does after the last batch.

        Raises:
            InputError: ``start`` is not an epoch that is left, or all epochs have been trained; or
                losses were recorded before the loop, without an epoch.
        """
        last = self._policy.epochs
        if start is not None and not 0 <= start < last:
            raise InputError(f"expected start in 0..{last - 1}, got {start}")
        if self._next >= last and not self._epoch.restored:
            raise InputError(
                f"expected a pruner with epochs left to train, got one that has trained all "
                f"{last}: make a new Pruner for another training"
            )
        if self._epoch.recording and not self._epoch.ended and not self.sampler.named:
            raise InputError(
                f"expected no losses before the loop over the epochs, got those of "
                f"{self._epoch.batches} batches of epoch {self._epoch.number}, perhaps from a "
                f"trial: make a new Pruner for the training"
            )
        unfinished = self._unfinished
        if start is None and unfinished is not None and unfinished.complete:
            self._commit(unfinished)
        driver = object()
        for epoch in range(self._next_epoch if start is None else start, last):
            self.start_epoch(epoch)
            self._driver = driver
            try:
                yield epoch
            except GeneratorExit:  # The loop was left by ``break``.
                if self._driver is driver:
                    self._driver = None
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

        Raises:
            InputError: All epochs have been trained.
        """
        for _ in self.epochs():
            yield from loader

    def start_epoch(self, epoch: int) -> None:
        """Begin ``epoch`` (counted from 0), or continue it where the losses recorded so far end.

        For the loops of frameworks, this replaces one pass of ``epochs``: call ``end_epoch`` after
        the last batch. Until then, ``set_epoch`` with another epoch is an error. If losses of an
        earlier epoch have been recorded, that epoch is ended first.

        Raises:
            InputError: The epoch is outside the training, or has ended.
        """
        check_epoch(epoch, self._policy.epochs)
        if epoch < self._next_epoch:
            raise self._backwards(epoch)
        self._driver = None
        unfinished = self._unfinished
        if unfinished is not None and unfinished.number != epoch:
            self._commit(unfinished)
        self.set_epoch(epoch)
        if self._epoch.batches:
            self._follow(self._epoch)
        self._driver = self

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` (counted from 0) current, and plan it from the current counts.

        This changes no counts and keeps the plan of an epoch in progress, so it may be called any
        number of times, in any order. If losses of another epoch have been recorded, that epoch is
        ended first. An epoch that has ended can be looked at, but not be recorded again.

        Raises:
            InputError: The epoch is not one of the training, or ``epochs`` or ``start_epoch`` has
                another one in progress.
        """
        check_epoch(epoch, self._policy.epochs)
        self.sampler.named = True
        current = self._epoch
        if self._driver is not None and epoch != current.number:
            raise InputError(
                f"expected set_epoch({current.number}), since this epoch is in progress, got "
                f"{epoch}: call end_epoch() first, or let the framework count from epoch "
                f"{current.number}"
            )
        if epoch == current.number and not current.ended:
            return
        # Some trainers call set_epoch for each earlier epoch after a state was loaded. An epoch
        # that comes from this state is kept until the trainer goes beyond it.
        unfinished = self._unfinished
        if unfinished is not None and epoch != unfinished.number:
            if unfinished.recording or epoch > unfinished.number:
                self._commit(unfinished)
            else:
                self._aside = unfinished
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

        Everything is copied at once, without waiting for the device. Record each batch in one call:
        with a known batch size, the number of calls says how far the epoch got.

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
            InputError: A shape, a type or an index is wrong; a sample is skipped in this epoch, or
                was recorded before (indices on a GPU are checked when the epoch ends); the epoch
                has ended, or all of it has been recorded; the ranks do not exchange the losses from
                which the policy learns; or this is called in a backward pass, by
                ``torch.utils.checkpoint``.
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
        return self._watch

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
        self._record(as_numbers("indices", index), losses, logits, labels)

    def end_epoch(self) -> None:
        """End the current epoch: merge what the ranks recorded, and let the policy learn from it.

        With ``FinePruning``, this is the end of an epoch in Algorithm 1 of Li et al., NPC 2018.

        A second call in the same epoch does nothing. All ranks must call this method.

        Warns:
            RuntimeWarning: Losses were NaN or infinite, nothing was recorded, or two epochs trained
                fewer samples than planned.

        Raises:
            InputError: An index is wrong, or the ranks have different plans, or record differently.
            RuntimeError: The plan has weights, but the returned scalars were not backpropagated.
        """
        self._driver = None
        if self._epoch.ended:
            return
        if self._epoch.number < self._next_epoch:  # It was only looked at.
            self._epoch.ended = True
            return
        self._commit(self._epoch)

    # -- state -------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Exchange what was recorded so far, so that ``state_dict`` includes all ranks.

        With several ranks, call this before a ``state_dict()`` in the middle of an epoch and, if
        logits are recorded, before every ``state_dict()``. All ranks must call it after the same
        batch.
        """
        self._compare_ranks()
        self._recorder.reduce(self._in_progress.plan, self._seen)
        if self._watch is not None:
            self._watch.merge()

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
        watch, unfinished = self._watch, self._unfinished
        if not (self._recorder.reduced and (watch is None or watch.is_complete)):
            raise InputError(unsynchronized(self._next_epoch))
        packed = {
            **self._identity(),
            "labels": self._labels_digest,
            "epoch": self._next_epoch,
            "shape": asdict(self._shape),
            "progress": None if unfinished is None else pack_epoch(unfinished, self._num_samples),
            "recorded": self._recorder.state_dict(),
            "learned": self._policy.state_dict(),
            "totals": asdict(self._report.totals),
            "watch": None if watch is None else watch.state_dict(),
        }
        state: dict[str, Any] = plain(packed, "the state")
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state. The number of ranks and the batch size may have changed.

        Everything is checked before anything is changed. After such a change, ``steps_done`` counts
        as if all steps had been as large as they are now, so its share of ``total_steps()`` stays
        the same.

        Warns:
            UserWarning: The number of samples per step differs from that of the state.

        Raises:
            InputError: The state has another version, or comes from a run with another N, seed,
                policy or labels; or this is called inside the loop over the epochs.
        """
        if self._driver is not None:
            raise InputError(
                f"expected load_state_dict() before the loop over the epochs, got a call in epoch "
                f"{self._epoch.number}: load the state first, and the loop continues where it was "
                f"saved"
            )
        check_state(state, plain(self._identity(), "the settings"), _KEYS)
        before, now = state["labels"], self._labels_digest
        if before and now and before != now:
            raise InputError(
                "expected the labels of the training that saved the state, got others, so what it "
                "learned may belong to other samples: give the Pruner the same data set in the "
                "same order, or train anew if labels were corrected"
            )
        state = plain(state, "the state")  # ``map_location`` may have moved tensors from the CPU.
        recorder = Recorder(self._policy, self._replicas, self._num_samples)
        learned = self._policy.state_dict()
        expected = "expected a pruner state of this version, got one that cannot be read"
        with explaining(expected, (KeyError, TypeError), f": {OF_ANOTHER_VERSION}"):
            number, packed = state["epoch"], state["progress"]
            restored = None
            if packed is not None:
                restored = unpack_epoch(packed, number, self._num_samples)
            totals, shape = RunTotals(**state["totals"]), BatchShape(**state["shape"])
            recorder.load_state_dict(state["recorded"])
            watch = None
            if state["watch"] is not None:
                watch = self._new_watch(state["watch"]["num_classes"])
                watch.load_state_dict(state["watch"])
            try:
                self._policy.load_state_dict(state["learned"])
            except Exception:
                self._policy.load_state_dict(learned)
                raise
        self._recorder, self._watch, self._report.totals = recorder, watch, totals
        self._aside, self._next = None, number
        self.sampler.named = False
        self._restore(number, restored)
        self._count_anew(shape)

    # -- numbers known in advance ------------------------------------------------------------------

    def total_steps(self) -> int:
        """Return the number of optimizer steps of the whole training, known before it starts.

        Raises:
            InputError: ``batch_size`` was not given, or the number of steps depends on data.
        """
        if self._total_steps is None:  # A loop may ask for the steps that are left in each step.
            self._total_steps = self._counts.total_steps() + self._report.totals.extra
        return self._total_steps

    @property
    def steps_done(self) -> int:
        """The number of optimizer steps so far, for schedulers that count steps.

        A step counts as soon as the losses of its last batch are recorded. Incomplete accumulation
        at the end of an epoch counts as a step.
        """
        unfinished = self._unfinished
        if unfinished is None:
            return self._report.totals.steps
        whole, rest = divmod(unfinished.batches, self._shape.accumulation)
        return self._report.totals.steps + whole + (rest > 0 and unfinished.complete)

    @property
    def steps_left(self) -> int:
        """The steps of ``total_steps`` that were not taken, including those of omitted epochs.

        Raises:
            InputError: As for ``total_steps``.
        """
        return max(self.total_steps() - self.steps_done, 0)

    @property
    def step_is_due(self) -> bool:
        """Whether the batch that was recorded last completes an optimizer step.

        This is true after every ``accumulation`` batches, and after the last batch of an epoch.
        """
        unfinished = self._unfinished
        if unfinished is None:
            return False
        return unfinished.batches % self._shape.accumulation == 0 or unfinished.complete

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
              ``Policy.suspicion``. Empty if the policy suspects none;
            - ``facts``: what the evidence says of the labels, in sentences; see
              ``LabelWatch.facts``. Empty if no logits are recorded, or the ranks have not merged.
        """
        return self._report.summary(self.position.batches, self.steps_done, self._watch)

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

    def __deepcopy__(self, memo: dict[int, Any]) -> "Pruner":
        """Return a copy at the same position, without the loops and loaders of this pruner.

        It has the same data set.
        """
        made: Pruner = type(self).__new__(type(self))
        memo[id(self)] = made
        # Process groups cannot be copied, and data sets need not be.
        for shared in (self._replicas.group, self._dataset):
            memo[id(shared)] = shared
        for name, value in vars(self).items():
            setattr(made, name, copy.deepcopy(value, memo))
        made._driver = None
        made._compared = True  # One rank may try a copy alone.
        return made

    # -- the current epoch -------------------------------------------------------------------------

    @property
    def _unfinished(self) -> Epoch | None:
        """The epoch that has losses and has not ended; None if there is none."""
        return self._epoch if self._epoch.unfinished else self._aside

    @property
    def _next_epoch(self) -> int:
        """The epoch with which the training goes on; the number of epochs if all have ended."""
        if self._unfinished is not None:
            return self._unfinished.number
        return self._next if self._epoch.ended else max(self._next, self._epoch.number)

    @property
    def _in_progress(self) -> Epoch:
        """The epoch with losses; without losses, the current one."""
        return self._unfinished or self._epoch

    def _length(self, epoch: int) -> int:
        """Return how many samples all ranks together train in ``epoch``."""
        kept = self.num_kept(epoch)
        for known in (self._in_progress, self._epoch):
            # An epoch that ended before a state was saved has another plan than it was trained by.
            if known.number == epoch and (known.batches or kept is None):
                return known.plan.number
        if kept is None:
            raise InputError(
                f"expected an epoch whose length is known in advance, got epoch {epoch} of policy "
                f"{self._policy.name!r}, whose length depends on data: ask when it is the current "
                f"one"
            )
        return kept

    @uninterrupted()
    def _show(self, number: int) -> None:
        """Make an epoch current: the one that was set aside, or with a new plan."""
        if self._aside is not None and self._aside.number == number:
            self._epoch, self._aside = self._aside, None
        else:
            with self._report.bookkeeping():
                self._epoch = Epoch(self._choose(number), 0)
        self._follow(self._epoch)

    def _choose(self, epoch: int) -> EpochPlan:
        number = self._counts.num_kept(epoch)
        if number is not None and number >= self._num_samples:
            return EpochPlan.full(epoch, self._num_samples)
        try:
            plan = self._policy.select(epoch, number, stream(self._seed, epoch, "select"))
            check_plan(plan, epoch, number, self._num_samples)
        except InputError as error:
            raise InputError(f"policy {self._policy.name!r} in epoch {epoch}: {error}") from error
        return plan

    def _follow(self, epoch: Epoch) -> None:
        """Let the sampler yield what is left of an epoch."""
        self._total_steps = None
        self._read_ahead = self._sampler_read and self.sampler.was_read_again
        self._sampler_read = self._plan_read = self._read_again = False
        self._warnings.begin_epoch()
        self._rescaling = None if epoch.plan.weights is None else Rescaling(epoch.plan.weights)
        epoch.planned = self._planned(epoch)
        self._start = min(epoch.done, epoch.planned)
        self.sampler.follow(epoch.plan, self._start)
        epoch.recording = False
        self._look_at_samples()

    def _planned(self, epoch: Epoch) -> int:
        """Return the number of samples with which an epoch is complete."""
        shape = self._shape
        if shape.drop_last and self._batch:
            return shape.batches_of(epoch.plan.number) * self._batch
        each = samples_per_rank(epoch.plan.number, shape.num_replicas, shape.drop_last)
        return each * shape.num_replicas

    def _look_at_samples(self) -> None:
        """Check the indices of the current epoch from now on."""
        strict = self._shape.batch_size is not None
        once = strict and self._num_ranks == 1 and not self._numbering
        done = self.sampler.before_start() if once else np.zeros(0, dtype=np.int64)
        self._seen = SeenSamples(
            self._epoch.plan, self._num_samples, strict=strict, once=once, before=done
        )

    def _note_read(self) -> None:
        """Note that the loop asks the sampler for indices."""
        epoch = self._epoch
        if epoch.recording and not (self._sampler_read or self._plan_read):
            raise InputError(
                f"expected losses of the batches of epoch {epoch.number} only, got those of "
                f"{epoch.done} samples before its first batch was loaded: make a new Pruner, "
                f"record no validation or trial batches, and let no framework keep one iterator "
                f"over several epochs (start it anew in each)"
            )
        self._read_again |= epoch.recording and epoch.complete
        self._sampler_read = True
        if not self.sampler.named:
            self._warnings.note_read(epoch)

    # -- recording and learning --------------------------------------------------------------------

    def _record(
        self,
        index: torch.Tensor,
        losses: torch.Tensor,
        logits: torch.Tensor | None,
        labels: Any,
    ) -> None:
        losses = as_local("losses", losses)
        check_batch(index, losses)
        epoch = self._epoch
        if not epoch.recording:
            self._begin(losses)
        samples = len(losses) * self._num_ranks
        if samples > self._batch or epoch.done >= epoch.planned or self._read_again:
            check_room(epoch, self._shape, self._num_ranks, samples, again=self._read_again)
        numbers = index.numpy() if index.is_cpu else None
        if numbers is not None:
            self._seen.check(numbers)
        self._recorder.add(index, losses)
        before = epoch.done, epoch.batches
        epoch.done += max(samples, self._batch)
        epoch.batches += 1
        epoch.recording = True
        if logits is not None or labels is not None:
            try:
                self._record_labels(index, logits, labels)
            except Exception:  # A batch that is refused must not count: it is recorded again.
                self._recorder.undo(index)
                epoch.done, epoch.batches = before
                raise
            self._recorder.with_logits = True
        if numbers is not None:
            self._seen.note(numbers)
        self._recorder.reduce_if_many(epoch.plan, self._seen)

    def _begin(self, losses: torch.Tensor) -> None:
        """Check what can be checked with the first batch of an epoch."""
        epoch = self._epoch
        if epoch.ended or epoch.number < self._next_epoch:
            raise self._backwards(epoch.number)
        if self._read_ahead and not (self._sampler_read or self._plan_read):
            raise InputError(
                f"expected batches that were loaded in epoch {epoch.number}, got some of an "
                f"iterator that began in the epoch before, whose samples it yields: begin the "
                f"loader anew in each epoch, or use pruner.loader()"
            )
        check_first_batch(epoch, self._policy, self._shape, self._replicas, losses)
        self._compare_ranks()
        self._warnings.of_rates()

    def _record_labels(self, index: torch.Tensor, logits: torch.Tensor | None, labels: Any) -> None:
        if logits is None or labels is None:
            raise InputError(
                "expected logits and labels together, got only one of them: give record both, to "
                "watch the labels, or neither"
            )
        logits = as_local("logits", logits)
        watch = self._watch
        if watch is None:
            if logits.ndim != 2 or logits.shape[1] < 2:
                raise InputError(
                    f"expected logits of shape (B, C) for at least two classes, got "
                    f"{tuple(logits.shape)}: give record one row of logits per sample, or no "
                    f"logits and labels if this is not a classifier"
                )
            watch = self._new_watch(logits.shape[1])
        watch.record_for_pruner(index, logits, labels)
        if self._given_labels is not None:
            check_recorded_labels(self._given_labels, index, as_numbers("labels", labels))
            self._given_labels = None
        self._watch = watch

    def _new_watch(self, num_classes: int) -> LabelWatch:
        group = self._replicas.group_for_logits()
        watch = LabelWatch(self._num_samples, num_classes, process_group=group)
        watch.of_pruner = True
        return watch

    def _backwards(self, epoch: int) -> InputError:
        return InputError(
            f"expected no more losses of epoch {epoch}, which has ended, got some: loop over "
            f"pruner.epochs(), which continues with epoch {self._next_epoch}, and record only "
            f"training batches"
        )

    def _compare_ranks(self) -> None:
        if self._compared:
            return
        compare_ranks(
            self._replicas,
            self._epoch,
            self._policy,
            self._shape,
            num_samples=self._num_samples,
            seed=self._seed,
            numbering=self._numbering,
            labels=self._labels_digest,
        )
        self._compared = True

    def _commit(self, epoch: Epoch) -> None:
        """End an epoch: the current one, or the one that was set aside."""
        if self._rescaling is not None:
            self._rescaling.check_used()
        self._compare_ranks()
        used = self._sampler_read or self._plan_read
        with self._report.bookkeeping():
            self._recorder.reduce(epoch.plan, self._seen)
        with uninterrupted():
            with self._report.bookkeeping():
                self._learn(epoch.number)
                self.nonfinite = self._recorder.nonfinite
                self._recorder.clear()
            if epoch.batches or used:
                self._report.add_epoch(epoch.trained, epoch.batches)
            epoch.ended, epoch.recording = True, False
            self._aside, self._driver = None, None
            self._next = epoch.number + 1
        counted = self._shape.batch_size is not None
        self._warnings.of_epoch(
            epoch,
            self._seen,
            self.nonfinite,
            read=self._sampler_read,
            all_read=counted and self._sampler_read and self.sampler.all_yielded,
            used=used,
            expected=(epoch.planned - self._start) // self._num_ranks if counted else 0,
        )
        if self._replicas.rank == 0:
            self._report.write(epoch.number, epoch.trained)

    def _learn(self, epoch: int) -> None:
        watch, ranking = self._watch, None
        if watch is not None and self._policy.needs_ranking:
            watch.merge()
            ranking = watch.ranking_so_far()
        losses, marks = self._recorder.per_sample()
        self._policy.learn(epoch, losses, marks, ranking)

    # -- a loaded state ----------------------------------------------------------------------------

    def _restore(self, number: int, unfinished: Epoch | None) -> None:
        """Continue with an epoch of a loaded state."""
        if number >= self._policy.epochs:
            # The policy has learned from the last epoch since, so that it cannot be planned again.
            self._epoch = Epoch(EpochPlan.full(number - 1, self._num_samples), 0, ended=True)
            self._epoch.restored = True
        elif unfinished is None:
            self._epoch = Epoch(self._choose(number), 0, restored=True)
        else:
            self._epoch = unfinished
        if self._epoch.unfinished and self._epoch.complete:
            self._epoch.done = max(self._epoch.done, self._planned(self._epoch))
        self._follow(self._epoch)

    def _count_anew(self, before: BatchShape) -> None:
        """Count what a loaded state has trained in batches and steps of the current size."""
        shape = self._shape
        if before == shape or None in (before.batch_size, shape.batch_size):
            return
        steps = self._counts.steps_before(self._next_epoch)
        totals, epoch = self._report.totals, self._unfinished
        if steps is not None:
            totals.steps, totals.extra = steps, 0
        if epoch is not None:
            number = epoch.plan.number
            left = max(epoch.planned - epoch.done, 0)
            epoch.batches = shape.batches_of(number) - shape.batches_of(left)
            if steps is not None:
                # It keeps its plan, which was rounded to steps of the size before.
                planned = self.num_kept(epoch.number)
                if planned is None:
                    planned = self._choose(epoch.number).number
                totals.extra += shape.steps_of(number) - shape.steps_of(planned)
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
        }


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
