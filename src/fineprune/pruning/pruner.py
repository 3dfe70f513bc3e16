"""Pruner: decides which samples each epoch trains on, for a training loop of any kind."""

import math
import zlib
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fineprune.errors import InputError, check_whole_number, explaining, warn_user
from fineprune.labels.batch import as_numbers
from fineprune.labels.dataset_attributes import labels_of
from fineprune.pruning.epoch_cycle import EpochCycle, Phase
from fineprune.pruning.epoch_loop import EpochLoop
from fineprune.pruning.indexed import indexed_and_length
from fineprune.pruning.label_warnings import warn_of_other_digest, warn_of_other_labels
from fineprune.pruning.learning_rates import Rates
from fineprune.pruning.loop_checks import check_batch
from fineprune.pruning.plan import EpochPlan, check_plan
from fineprune.pruning.plan_options import AppliedOptions, checked_labels
from fineprune.pruning.policies.policy import Policy, check_is_policy
from fineprune.pruning.pruner_state import (
    OF_ANOTHER_VERSION,
    check_state,
    pack_progress,
    plain,
    unpack_progress,
    unsynchronized,
)
from fineprune.pruning.random_streams import stream
from fineprune.pruning.replicas import AllGather, Replicas, share_of_rank
from fineprune.pruning.rescaling import Rescaling
from fineprune.pruning.run_report import RunTotals
from fineprune.pruning.sampler import PruningSampler
from fineprune.pruning.step_counts import BatchShape

STATE_VERSION = 1

_KEYS = (
    "epoch",
    "open",
    "synchronized",
    "shape",
    "nonfinite",
    "asked_to_rescore",
    "progress",
    "learned",
    "skips",
    "totals",
    "watch",
)


class Pruner(EpochLoop[EpochPlan]):
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
            the second of the two tensors of a ``TensorDataset``. ``keep_per_class`` requires
            labels. If no logits are recorded, ``Adaptive`` uses them to spare classes that are not
            learned; if they are, labels other than those in the first batch are an error.
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
            labels are missing or do not fit; or this process does not belong to ``process_group``.
        TypeError: The data set is not map-style, or the policy is not a ``Policy`` with a name.
        RuntimeError: ``WORLD_SIZE`` is above 1, but no process group is initialised.
    """

    sampler: PruningSampler

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
            labels = checked_labels(labels, num_samples)
        self._options = AppliedOptions(policy.plan_options, num_samples, labels)
        self._asked_to_rescore = False
        cycle: EpochCycle[EpochPlan] = EpochCycle()
        super().__init__(
            policy,
            dataset,
            num_samples,
            shape,
            replicas,
            seed,
            cycle=cycle,
            sampler=PruningSampler(
                range(num_samples) if dataset is None else dataset,
                num_replicas=num_replicas,
                rank=rank,
                seed=seed,
                drop_last=drop_last,
                cycle=cycle,
                choose_epoch=self.set_epoch,
            ),
            batch_size=of_this_rank,
        )
        self._options.check_room(map(self.num_kept, range(policy.epochs)))
        if labels is not None:
            self._take_labels(labels)
        if log is not None:
            self.log(log)

    def _take_labels(self, labels: npt.NDArray[np.integer]) -> None:
        """Give the policy the label of each sample, and compare them with what it has learned."""
        self._policy.bind_labels(labels)
        numbers = labels.astype(np.int64)  # In one form on all ranks.
        self._checks.labels_digest = zlib.crc32(numbers.data)
        self._pruner_watch.given_labels = torch.from_numpy(numbers)
        if self._policy.known_labels is not None:
            every = torch.arange(self._num_samples)
            warn_of_other_labels(self._policy.known_labels, every, torch.from_numpy(numbers))
            self._policy.known_labels = None  # It is said once.

    @property
    def plan(self) -> EpochPlan:
        """The plan of the current epoch."""
        self._cycle.read_plan()  # A loop may train on ``plan.kept`` without the sampler.
        return self._cycle.current.plan

    @property
    def counts(self) -> torch.Tensor | None:
        """DroppingCounts as of the last epoch that ended, shape (N,); None if there are none."""
        return self._policy.counts

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

    # -- rescoring ----------------------------------------------------------------------------

    def to_rescore(self) -> torch.Tensor | None:
        """Return the samples to evaluate between the last batch of the epoch and its end.

        Some policies need the losses of samples that the epoch skipped. Compute these losses
        without gradients and with the model in evaluation mode, and pass them to ``rescore``.
        Otherwise, the policy uses the last known losses.

        Returns:
            The indices of this rank's part of the samples, int64, on the CPU. None if the policy
            needs none, or if no later epoch depends on them.
        """
        self._asked_to_rescore = True
        wanted = self._to_rescore()
        if not len(wanted):
            return None
        # Every rank gets equally many, at least one; a few may be repeated.
        each = -(-len(wanted) // self._replicas.size)
        position = self._replicas.rank + self._replicas.size * np.arange(each)
        return wanted[torch.from_numpy(position % len(wanted))]

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
        index = as_numbers("indices", index)
        check_batch(index, losses)
        if not self._policy.rescores:
            raise InputError(
                f"expected no call of rescore(), since policy {self._policy.name!r} needs losses "
                f"of trained samples only: call it only if to_rescore() is not None"
            )
        self._checks.check_in_progress("rescore")
        progress = self._in_progress
        progress.rescored += len(index) * self._replicas.size
        batch = index.clone(), losses.detach().clone(), None
        self._recorder.extend_rescored(progress.plan, batch)

    def _to_rescore(self) -> torch.Tensor:
        """Return the samples that all ranks together should rescore, int64, on the CPU."""
        plan = self._in_progress.plan
        # After the last epoch, this is so, too.
        next_trains_all = self._policy.anneals(plan.epoch + 1)
        if next_trains_all or not self._policy.rescores:
            return torch.from_numpy(np.arange(0))
        skipped = np.delete(np.arange(self._num_samples), plan.kept.numpy())
        return self._policy.to_rescore(plan, torch.from_numpy(skipped))

    def _is_complete(self) -> bool:
        if not super()._is_complete():
            return False
        if not (self._policy.rescores and self._asked_to_rescore):
            return True
        return self._in_progress.rescored >= len(self._to_rescore())

    # -- state --------------------------------------------------------------------------------

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
            "asked_to_rescore": self._asked_to_rescore,
            "progress": progress,
            "learned": self._policy.state_dict(),
            "skips": self._options.skips(),
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
        self._options.load_skips(state["skips"])
        self._recorder.clear()
        self._recorder.nonfinite = state["nonfinite"]
        self._report.totals = totals
        self._asked_to_rescore = state["asked_to_rescore"]
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

    # -- internals ----------------------------------------------------------------------------

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

    def _choose(self, epoch: int) -> EpochPlan:
        num_kept = self.num_kept(epoch)
        if num_kept is not None and num_kept >= self._num_samples:
            return EpochPlan.full(epoch, self._num_samples)
        try:
            plan = self._policy.select(epoch, num_kept, stream(self._seed, epoch, "select"))
            check_plan(plan, epoch, num_kept, self._num_samples)
        except InputError as error:
            raise InputError(f"policy {self._policy.name!r} in epoch {epoch}: {error}") from error
        return self._options.apply(plan, stream(self._seed, epoch, "options"))

    def _follow(self, plan: EpochPlan, start: int = 0) -> int:
        self._rescaling = None
        if plan.weights is not None:
            # A step may be backpropagated only when the next batch is recorded. Without a batch
            # size, this is checked at the end of the epoch.
            batches, size = self._shape.accumulation + 1, self._shape.batch_size or math.inf
            self._rescaling = Rescaling(plan.weights, batches, size)
        self.sampler.follow(plan, start)
        return self.sampler.total_size

    def _learn(self, plan: EpochPlan) -> None:
        watch = self.watch
        self._checks.check_logits(watch is not None)
        if watch is not None and self._policy.needs_ranking:
            watch.merge()
            ranking = watch.ranking_so_far()
            if ranking is not None:
                self._policy.observe_ranking(plan.epoch, ranking)
        self._policy.end_epoch(plan.epoch)
        self._options.end_epoch(plan)

    def _number(self, plan: EpochPlan) -> int:
        return plan.number

    def _identity(self) -> dict[str, Any]:
        """Return what a saved state must agree with."""
        return {
            "version": STATE_VERSION,
            "num_samples": self._num_samples,
            "seed": self._seed,
            "settings": self._policy.settings(),
            "options": self._policy.plan_options.settings(),
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
