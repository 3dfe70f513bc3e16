"""Pruner: the life cycle of one epoch (plan, record, end) in one object."""

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from fineprune.errors import InputError, check_whole_number
from fineprune.pruning.applied_options import AppliedOptions
from fineprune.pruning.indexed import Indexed, indexed_and_length
from fineprune.pruning.loader import PrunedLoaders
from fineprune.pruning.loss_recorder import LossRecorder, check_batch
from fineprune.pruning.plan import EpochPlan, check_plan
from fineprune.pruning.policies.policy import Policy
from fineprune.pruning.position import Position
from fineprune.pruning.pruner_state import (
    PrunerState,
    from_bytes,
    pack_state,
    to_bytes,
    unpack_state,
)
from fineprune.pruning.random_streams import stream
from fineprune.pruning.replicas import Replicas, share_of_rank
from fineprune.pruning.rescaling import Rescaling
from fineprune.pruning.run_report import RunReport, RunTotals, as_html
from fineprune.pruning.sampler import PruningSampler
from fineprune.pruning.step_counts import (
    BatchShape,
    batches_of,
    bind,
    check_epoch,
    check_rounding,
    num_kept,
    steps_of,
    total_steps,
)


class Pruner:
    """Decides which samples each epoch trains on, based on the losses of earlier epochs.

    A training loop needs the loop ``for epoch in pruner.epochs()``, a loader, which is
    ``pruner.loader()`` or one over ``pruner.dataset`` with ``sampler=pruner.sampler``, and the loss
    ``pruner.record(index, losses)``. While an epoch runs, its losses are only copied; the counts
    change at its end ([P] section 4, in the order select, train, clear, add).

    Args:
        dataset_or_length: The data set (map-style), or the number of samples N for a loop that
            indexes its own arrays with ``plan.kept``.
        policy: Chooses the samples. The pruner works on a copy of it.
        labels: The class of each sample, for a policy with the option ``keep_per_class``: integers,
            shape (N,), as a sequence, an array or a tensor.
        seed: Seeds the order of the samples, as in ``DistributedSampler``, and the random streams
            that break ties.
        batch_size: Number of samples per batch and rank. If it is given, an epoch that skips
            samples keeps a whole number of batches on every rank, rounded up.
        accumulation: Number of batches per optimizer step.
        drop_last: Whether the loader drops an incomplete last batch.
        num_replicas: Number of ranks that share the samples of an epoch. The default is the size of
            the process group.
        rank: Number of this rank among them. The default is its number in the process group. If
            ``num_replicas`` is neither 1 nor the size of the group, it must be given.
        process_group: The group whose ranks merge their counts. The default is the initialised
            world.
        sharded_by_loader: Whether a framework (Accelerate, Hugging Face's Trainer) divides the
            batches of one sampler over the ranks of the group itself. ``batch_size`` is then still
            that of one rank, and must be given.
        log: Where to report each epoch; see the method ``log``. The default is nowhere.

    Attributes:
        sampler: The ``PruningSampler`` of this rank.
        nonfinite: Number of losses that all ranks together recorded in the last epoch that ended
            and that were NaN or infinite. It is 0 if the policy needs no losses.

    Raises:
        InputError: A value is out of range, rounding to whole batches would skip nothing, the
            labels are missing or do not fit, or this process does not belong to ``process_group``.
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
        sharded_by_loader: bool = False,
        log: Any = None,
    ) -> None:
        if not isinstance(policy, Policy):
            raise TypeError(
                f"expected a policy such as FinePruning(schedule, 0.3), got {type(policy).__name__}"
            )
        if not isinstance(getattr(policy, "name", None), str):
            raise TypeError(
                f"expected a policy with a name, got {type(policy).__name__}: set its class "
                f"attribute name to a string"
            )
        self._dataset, self._num_samples = indexed_and_length(dataset_or_length)
        check_whole_number("seed", seed, 0)
        self._replicas = Replicas(process_group)
        of_this_rank = batch_size
        if sharded_by_loader:
            batch_size = _global_batch_size(batch_size, self._replicas.size, num_replicas, rank)
            num_replicas, rank = 1, 0
        num_replicas, rank = share_of_rank(
            self._replicas.size, self._replicas.rank, num_replicas, rank
        )
        self._shape = BatchShape(batch_size, accumulation, num_replicas, drop_last)
        self._seed = seed
        self._policy = copy.deepcopy(policy)
        bind(self._policy, self._num_samples, self._shape)
        check_rounding(self._policy, self._num_samples, self._shape)
        self._policy.bind_seed(seed)
        self._options = AppliedOptions(self._policy.plan_options, self._num_samples, labels)
        self._options.check_room(map(self.num_kept, range(self._policy.epochs)))
        self.sampler = PruningSampler(
            range(self._num_samples) if self._dataset is None else self._dataset,
            num_replicas=num_replicas,
            rank=rank,
            seed=seed,
            drop_last=drop_last,
            choose_epoch=self.set_epoch,
        )
        self._loaders = PrunedLoaders(self.sampler, self._num_samples, of_this_rank, drop_last)
        self.nonfinite = 0
        self._recorder = LossRecorder(
            self._policy, self._replicas, self._num_samples, self._shape, seed
        )
        # A compiled training step must not trace the bookkeeping.
        self._record_untraced: Callable[[torch.Tensor, torch.Tensor], None] = (
            torch.compiler.disable(self._record_batch)
        )
        self._ended: int | None = None
        self._open = True
        self._plan_was_read = False
        self._rescaling: Rescaling | None = None
        self._started: int | None = None  # The epoch that ``start_epoch`` or ``epochs`` began.
        self._report = RunReport(self._policy, self._num_samples, self._shape)
        if log is not None:
            self.log(log)
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
                f"Pruner the data set, or index your own arrays with plan.kept"
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

        It may stand in the loop over the epochs. If you keep it in a variable, its workers persist
        from epoch to epoch (and see no change of the data set between epochs, unless you give
        ``persistent_workers=False``); as long as you keep it, a call with the same arguments
        returns it again. Its attribute ``pruner`` is this pruner, so that a function that is given
        the loader can record losses.

        Args:
            dataset: Another data set with the same N samples. The default is that of the pruner.
            batch_size: Number of samples per batch and rank. The default is that of the pruner.
            num_workers: Number of worker processes.
            collate_fn: Your collate function, which receives the items without their indices. With
                ``IndexedCollate(function, key="index")``, the batches are dicts that contain the
                indices.
            options: Further keyword arguments of ``DataLoader``, such as ``pin_memory``.

        Raises:
            InputError: An option would undo the pruning (``shuffle``, ``sampler``,
                ``batch_sampler``, ``in_order=False``, another ``drop_last`` or another batch size
                than the pruner's); there is no batch size or no data set; or the data set has
                another number of samples.
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

    # -- the epoch ----------------------------------------------------------------------------

    @property
    def plan(self) -> EpochPlan:
        """The plan of the current epoch."""
        self._plan_was_read = True  # A loop may train on ``plan.kept`` without the sampler.
        return self._plan

    @property
    def policy(self) -> Policy:
        """This pruner's own copy of the policy."""
        return self._policy

    @property
    def counts(self) -> torch.Tensor | None:
        """DroppingCounts as of the last epoch that ended, shape (N,); None if there are none."""
        return self._policy.counts

    @property
    def position(self) -> Position:
        """Where this rank is: the epoch in progress (or the next one), and what it recorded."""
        progress = self._recorder.progress
        if progress is not None:
            samples = progress.samples // self._recorder.num_ranks
            return Position(progress.plan.epoch, progress.batches, samples)
        epoch = self._plan.epoch
        return Position(epoch if self._open else epoch + 1, 0, 0)

    def epochs(self, start: int | None = None) -> Iterator[int]:
        """Iterate over the epochs: start each one, yield its number, and end it.

        After a state was loaded, the iteration continues where that state was taken. If that was in
        the middle of an epoch, the sampler yields the rest of this epoch. If it was after the last
        batch of an epoch, that epoch is ended at once, and the iteration continues with the next
        one, unless the policy rescores skipped samples. Leaving the loop by ``break`` leaves the
        epoch open.

        Args:
            start: The first epoch, counted from 0. The default is the epoch that is still open, or
                else the next one. If losses of another epoch have been recorded, that epoch is
                ended first, and ``start`` begins with its first batch. An epoch that is named here
                is yielded even if it has no batches left: ``epochs(pruner.position.epoch)`` runs
                the end of the loop's body for it.

        Raises:
            InputError: ``start`` is outside the training.
        """
        if start is not None and not 0 <= start < self._policy.epochs:
            raise InputError(f"expected start in 0..{self._policy.epochs - 1}, got {start}")
        if start is None and self._is_complete():
            self._commit()
        first = self.position.epoch if start is None else start
        for epoch in range(first, self._policy.epochs):
            self.start_epoch(epoch)
            try:
                yield epoch
            except GeneratorExit:  # The loop was left by ``break``.
                if self._started == epoch:
                    self._started = None
                raise
            self.end_epoch()

    def start_epoch(self, epoch: int) -> None:
        """Begin ``epoch`` (counted from 0), or continue it where the losses recorded so far end.

        This is one pass of ``epochs``, for loops of frameworks: call ``end_epoch`` after the last
        batch. Until then, ``set_epoch`` to another epoch is an error. If losses of another epoch
        have been recorded, that epoch is ended first.

        Raises:
            InputError: The epoch is outside the training.
        """
        self._check_epoch(epoch)
        progress = self._recorder.progress
        if progress is not None and progress.plan.epoch != epoch:
            self._commit()
        self._started = None
        self.set_epoch(epoch)
        self.sampler.epoch_was_set = True
        progress = self._recorder.progress
        if progress is not None:
            self.sampler.follow(self._plan, progress.samples)
        self._started = epoch

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` (counted from 0) current, and plan it from the counts as they are.

        This changes no count and keeps the plan of an epoch in progress, so it may be called any
        number of times and in any order. If losses of another epoch have been recorded, that epoch
        is ended first.

        Raises:
            InputError: The epoch is outside the training, or ``epochs`` or ``start_epoch`` has
                another one in progress.
        """
        self._check_epoch(epoch)
        if self._started not in (None, epoch):
            raise InputError(
                f"expected set_epoch({self._started}), since this epoch is in progress, got "
                f"{epoch}: call end_epoch() first, or let the framework count from epoch "
                f"{self._started} on"
            )
        if epoch == self._plan.epoch and self._open:
            return
        progress = self._recorder.progress
        # Some trainers call set_epoch for each earlier epoch after a state was loaded. An epoch in
        # progress that comes from this state is kept until the trainer goes beyond it.
        if progress is not None and (progress.recorded_here or epoch > progress.plan.epoch):
            self._commit()
        self._show(epoch)

    def record(self, index: Any, losses: torch.Tensor) -> torch.Tensor:
        """Record the losses of a batch, and return the scalar to backpropagate.

        Both arguments are copied into a buffer on the device of the losses. This needs no
        synchronisation and no communication.

        Args:
            index: Indices of the samples, integers, shape (B,): the first part of each batch.
            losses: One loss per sample, floating point, shape (B,) (``reduction="none"``).

        Returns:
            The mean of the losses, shape (). If the plan has weights, each loss is multiplied by
            its weight first.

        Raises:
            InputError: A shape, a type or an index is wrong, or the epoch has ended.
            RuntimeError: The plan has weights, but the returned scalars were not backpropagated.
        """
        if not isinstance(index, torch.Tensor):
            index = torch.as_tensor(index)
        if torch.compiler.is_compiling():
            self._record_untraced(index, losses.detach())
        else:  # Outside a compiled step, the call above takes longer.
            self._record_batch(index, losses.detach())
        return losses.mean() if self._rescaling is None else self._rescaling.mean(index, losses)

    def weighted(self, index: Any, losses: torch.Tensor) -> torch.Tensor:
        """Return the losses times the weights of the plan, for a scalar of your own.

        Nothing is recorded and nothing is reduced: call ``record`` too, and ignore its result. If
        the plan has no weights, the losses are returned as they are.

        Args:
            index: Indices of the samples, integers, shape (B,).
            losses: The losses of each sample, floating point, shape (B,) or (B, ...), such as
                (B, tokens).

        Raises:
            InputError: A shape or a type is wrong.
        """
        if not isinstance(index, torch.Tensor):
            index = torch.as_tensor(index)
        if not losses.ndim or index.shape != losses.shape[:1]:
            raise InputError(
                f"expected losses of shape (B, ...) for indices of shape (B,), got losses of shape "
                f"{tuple(losses.shape)} and indices of shape {tuple(index.shape)}"
            )
        return losses if self._rescaling is None else self._rescaling.weighted(index, losses)

    def to_rescore(self) -> torch.Tensor | None:
        """Return the samples to evaluate between the last batch of the epoch and its end.

        Some policies need the losses of samples that the epoch did not train. For them, call
        ``rescore`` with the losses of these samples, without gradients and with the model in
        evaluation mode. A loop that does not do so makes the policy use the last known losses.

        Returns:
            Indices, int64, on the CPU: this rank's part of them. None if the policy needs none, or
            if no later epoch depends on them.
        """
        plan = self._plan_in_progress
        following = plan.epoch + 1
        if not self._policy.rescores or following >= self._policy.epochs:
            return None
        if self._policy.anneals(following):
            return None
        skipped = torch.ones(self._num_samples, dtype=torch.bool)
        skipped[plan.kept] = False
        wanted = self._policy.to_rescore(plan, skipped.nonzero().flatten())
        if not len(wanted):
            return None
        # Every rank gets equally many, at least one; a few may be repeated.
        each = -(-len(wanted) // self._replicas.size)
        position = self._replicas.rank + self._replicas.size * torch.arange(each)
        return wanted[position % len(wanted)]

    def rescore(self, index: Any, losses: torch.Tensor) -> None:
        """Record the losses of samples that the current epoch did not train.

        Nothing is backpropagated. The samples may be given in batches of any size. If a state was
        saved in between, rescore all of them again.

        Args:
            index: Indices of the samples, integers, shape (B,): a part of ``to_rescore()``.
            losses: One loss per sample, floating point, shape (B,).

        Raises:
            InputError: A shape or a type is wrong, the policy needs no such losses, or the epoch
                has ended.
        """
        if not isinstance(index, torch.Tensor):
            index = torch.as_tensor(index)
        check_batch(index, losses)
        if not self._policy.rescores:
            raise InputError(
                f"expected losses of trained samples only, since policy {self._policy.name!r} "
                f"needs no others: rescore what to_rescore() returns, if it is not None"
            )
        if not self._open:
            raise InputError(
                f"expected an epoch in progress, but epoch {self._plan.epoch} has ended: "
                f"call rescore() before end_epoch()"
            )
        self._recorder.append_rescored(self._plan_in_progress, index, losses.detach())

    def end_epoch(self) -> None:
        """End the current epoch: batch means, marks, one exchange, clear, add (Algorithm 1).

        A second call in the same epoch does nothing. If there are several ranks, all of them must
        call this method.

        Warns:
            RuntimeWarning: Losses were NaN or infinite; no losses were recorded, although the
                policy needs them; the batches that were trained do not fit the plan; or every rank
                trained all samples.

        Raises:
            InputError: An index is out of range, or the ranks have different plans.
            RuntimeError: The plan has weights, but the returned scalars were not backpropagated.
        """
        self._started = None
        if not self._open:
            return
        progress = self._recorder.progress
        if progress is not None and progress.plan.epoch != self._plan.epoch:
            # The epoch in progress comes from a loaded state. The current epoch precedes it and
            # recorded nothing, so it had ended before the state was taken.
            self._open = False
            return
        self._commit()

    def open_window(self) -> None:
        """Clear the counts at the end of the current epoch and begin a new window.

        This is for learning rates that fall while training: call it on every rank in the epoch in
        which the plateau scheduler reduced the rate.

        Raises:
            InputError: The epoch has ended, or the policy has no windows.
        """
        if not self._open:
            raise InputError(
                f"expected an epoch in progress, but epoch {self._plan.epoch} has ended: "
                f"call open_window() before end_epoch()"
            )
        self._policy.open_window(self._plan.epoch)

    # -- state --------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Exchange what was recorded so far, so that ``state_dict`` includes all ranks.

        If there is more than one rank, this must precede a ``state_dict()`` in the middle of an
        epoch. All ranks must call it after the same batch.
        """
        self._flush()

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resumed run needs, without communication.

        The state consists of tensors, numbers, strings, lists and dicts, so that it loads with
        ``weights_only=True``.

        Raises:
            InputError: There are several ranks, and ``synchronize()`` was not called after the last
                batch.
        """
        if self._replicas.size == 1:
            self._flush()
        progress = self._recorder.progress
        state = PrunerState(
            epoch=self._plan_in_progress.epoch,
            open=self._open or progress is not None,
            progress=progress,
            synchronized=self._recorder.flushed,
            nonfinite_so_far=self._recorder.nonfinite_so_far,
            learned=self._policy.state_dict(),
            skips=self._options.skips(),
            totals=self._report.totals.state_dict(),
        )
        return pack_state(state, self._identity())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state. The number of ranks and the batch size may have changed.

        Raises:
            InputError: The state has another version, comes from a run with another N, seed or
                policy, or was taken in the middle of an epoch without ``synchronize()``.
        """
        loaded = unpack_state(state, self._identity())
        self._policy.load_state_dict(loaded.learned)
        self._options.load_skips(loaded.skips)
        self._recorder.load(loaded.progress, loaded.nonfinite_so_far)
        self._report.totals = RunTotals(**(loaded.totals or {}))
        self._ended = None if loaded.open else loaded.epoch
        self._started = None
        if loaded.open:
            self._show(loaded.epoch)
        else:
            # The policy has learned from this epoch since, so that it cannot be planned again.
            self._follow(EpochPlan(loaded.epoch, torch.arange(self._num_samples)))
            self._open = False

    def state_bytes(self) -> bytes:
        """Return ``state_dict()`` as bytes, for formats that need a state of constant structure.

        An example is ``torch.distributed.checkpoint``, which loads only the keys and shapes that
        the new pruner's own state has.

        Raises:
            InputError: As for ``state_dict``.
        """
        return to_bytes(self.state_dict())

    def load_state_bytes(self, data: bytes) -> None:
        """Continue from the result of ``state_bytes``, as ``load_state_dict`` does.

        Raises:
            InputError: These are not such bytes, or ``load_state_dict`` refuses the state.
        """
        self.load_state_dict(from_bytes(data))

    # -- numbers known in advance --------------------------------------------------------------

    def total_steps(self) -> int:
        """Return the number of optimizer steps of the whole training, known before it starts.

        Raises:
            InputError: ``batch_size`` was not given, or the numbers of the policy depend on data.
        """
        return total_steps(self._policy, self._num_samples, self._shape)

    def num_kept(self, epoch: int) -> int | None:
        """Return how many samples all ranks together train in ``epoch``, without padding.

        The number is rounded up to whole batches if some samples are skipped. It is None if it
        depends on data.
        """
        return num_kept(self._policy, self._num_samples, epoch, self._shape)

    def batches(self, epoch: int) -> int:
        """Return the number of batches per rank of ``epoch``, exact, also before the training.

        Raises:
            InputError: The epoch is outside the training, ``batch_size`` was not given, or the
                length of the epoch depends on data and it is not the current one.
        """
        return batches_of(self._length(epoch), self._shape)

    def steps(self, epoch: int) -> int:
        """Return the number of optimizer steps of ``epoch``, exact, also before the training.

        Raises:
            InputError: As for ``batches``.
        """
        return steps_of(self._length(epoch), self._shape)

    # -- reports ------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """Return what the training has cost so far and what it will save: JSON values only.

        Returns:
            - ``policy``: its name;
            - ``epochs``, ``epochs_done``: the epochs of the training, and those that were trained;
            - ``skipped``: the share of the sample-steps of these epochs that was skipped;
            - ``predicted_saving``: the share of the steps that the whole training saves (of the
              sample-steps, without ``batch_size``); None if it depends on data;
            - ``steps``, ``total_steps``: the optimizer steps so far, and of the whole training
              (None if they are not known);
            - ``record_calls``: the number of batches that this rank recorded;
            - ``bookkeeping_seconds``: the time that this process spent on choosing samples and on
              ending epochs, without ``record``; with a GPU, it includes waiting for it;
            - ``suspects``: the samples whose labels should be checked first, at most ten; see
              ``Policy.suspects``. Empty if the policy suspects none.
        """
        progress = self._recorder.progress
        return self._report.summary(0 if progress is None else progress.batches)

    def log(self, target: Any, by: str = "steps") -> None:
        """Report each epoch to ``target`` when it ends, on the first rank of the group only.

        The values are ``fineprune/epoch`` (counted from 0), ``fineprune/skipped`` (the share of the
        samples that the epoch skipped), ``fineprune/saved`` (the share of the sample-steps so far),
        ``fineprune/overhead_seconds`` (see ``summary``) and, if the policy names suspects,
        ``fineprune/suspects`` (their number).

        Args:
            target: Any ``callable(dict, step)``, such as ``wandb.log``, ``mlflow.log_metrics`` or
                ``trackio.log``, or TensorBoard's ``SummaryWriter``.
            by: What ``step`` counts: "steps" for the optimizer steps so far, or "epochs" for the
                epochs so far.

        Raises:
            InputError: ``target`` or ``by`` is neither of these.
        """
        self._report.add_writer(target, by)

    def __repr__(self) -> str:
        return (
            f"Pruner({self._num_samples} samples, policy {self._policy.name!r}, "
            f"{self._report.totals.epochs} of {self._policy.epochs} epochs done, "
            f"{self._report.skipped:.1%} skipped)"
        )

    def _repr_html_(self) -> str:
        return as_html(f"Pruner of {self._num_samples} samples", self.summary())

    # -- internals ----------------------------------------------------------------------------

    @property
    def _plan_in_progress(self) -> EpochPlan:
        """The plan of the epoch that has recorded losses; the current one if there is none."""
        progress = self._recorder.progress
        return self._plan if progress is None else progress.plan

    def _length(self, epoch: int) -> int:
        """Return how many samples all ranks together train in ``epoch``."""
        self._check_epoch(epoch)
        for plan in (self._plan_in_progress, self._plan):
            if plan.epoch == epoch:
                return len(plan.kept)
        kept = self.num_kept(epoch)
        if kept is None:
            raise InputError(
                f"expected an epoch whose length is known in advance, got epoch {epoch} of policy "
                f"{self._policy.name!r}, which depends on data: ask when it is the current one"
            )
        return kept

    def _is_complete(self) -> bool:
        """Return whether nothing is left to train or to rescore of the epoch in progress."""
        progress = self._recorder.progress
        if progress is None or self._policy.rescores:
            return False
        return self.sampler.is_complete(progress.plan, progress.samples, self._shape.batch_size)

    def _show(self, epoch: int) -> None:
        """Make ``epoch`` current, with the plan in progress if there is one for it."""
        progress = self._recorder.progress
        if progress is not None and progress.plan.epoch == epoch:
            self._follow(progress.plan)
        else:
            with self._report.bookkeeping():
                plan = self._make_plan(epoch)
            self._follow(plan)

    def _follow(self, plan: EpochPlan) -> None:
        self._plan = plan
        self._open = True
        self._plan_was_read = False
        rescales = self._plan.weights is not None
        self._rescaling = Rescaling(self._plan, self._shape.accumulation + 1) if rescales else None
        self.sampler.follow(self._plan)

    def _make_plan(self, epoch: int) -> EpochPlan:
        num_kept = self.num_kept(epoch)
        if num_kept is not None and num_kept >= self._num_samples:
            return EpochPlan(epoch, torch.arange(self._num_samples))
        try:
            plan = self._policy.select(epoch, num_kept, stream(self._seed, epoch, "select"))
            check_plan(plan, epoch, num_kept, self._num_samples)
        except InputError as error:
            raise InputError(f"policy {self._policy.name!r} in epoch {epoch}: {error}") from error
        return self._options.apply(plan, stream(self._seed, epoch, "options"))

    def _record_batch(self, index: torch.Tensor, losses: torch.Tensor) -> None:
        check_batch(index, losses)
        progress = self._recorder.progress
        if progress is None or progress.plan.epoch != self._plan.epoch:
            self._begin_recording(index)
        self._recorder.append(index, losses)

    def _begin_recording(self, index: torch.Tensor) -> None:
        progress = self._recorder.progress
        if progress is not None:  # It comes from a loaded state, and the user went back before it.
            self._end(progress.plan)
        if self._plan.epoch == self._ended:
            raise InputError(
                f"expected losses of another epoch, since epoch {self._ended} has ended: "
                f"loop over pruner.epochs(), or call set_epoch({self._ended + 1})"
            )
        self._recorder.begin(self._plan, index)
        self._open = True

    def _commit(self) -> None:
        if self._rescaling is not None:
            self._rescaling.check_used()
        with self._report.bookkeeping():
            self._flush()
        self._end(self._plan_in_progress)

    def _flush(self) -> None:
        self._recorder.flush(self._plan_in_progress)

    def _end(self, plan: EpochPlan) -> None:
        progress = self._recorder.progress
        if progress is not None or self.sampler.was_read or self._plan_was_read:
            self._report.add_epoch(len(plan.kept), 0 if progress is None else progress.batches)
        with self._report.bookkeeping():
            self._policy.end_epoch(plan.epoch)
            self._options.end_epoch(plan)
            self._open = False
            self._started = None
            self._ended = plan.epoch
            self.nonfinite, messages = self._recorder.end_epoch(
                plan, self.sampler, plan_was_read=self._plan_was_read
            )
        for message in messages:
            warnings.warn(message, RuntimeWarning, stacklevel=4)
        if self._replicas.rank == 0:
            self._report.write(plan.epoch, len(plan.kept))

    def _identity(self) -> dict[str, Any]:
        """Return what a saved state must agree with."""
        return {
            "num_samples": self._num_samples,
            "seed": self._seed,
            "settings": self._policy.settings(),
            "options": self._policy.plan_options.settings(),
        }

    def _check_epoch(self, epoch: int) -> None:
        check_epoch(epoch, self._policy.epochs)


def _global_batch_size(
    batch_size: int | None, processes: int, num_replicas: int | None, rank: int | None
) -> int:
    """Return the number of samples in the batches of all processes, which a framework divides.

    Raises:
        InputError: There is no batch size, or the shares of the ranks are given too.
    """
    if num_replicas is not None or rank is not None:
        raise InputError(
            f"expected sharded_by_loader without num_replicas and rank, since the framework "
            f"divides the batches, got num_replicas={num_replicas} and rank={rank}: leave them out"
        )
    if batch_size is None:
        raise InputError("expected batch_size, that of one rank, with sharded_by_loader, got None")
    check_whole_number("batch_size", batch_size, 1)
    return batch_size * processes
