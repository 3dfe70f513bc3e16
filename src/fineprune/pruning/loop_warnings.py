"""Warnings about a training loop that does not do what the plan of the epoch says.

They are given at the end of an epoch for what may be intended: the indices of the first batches of
each epoch are kept and compared with the plan. This is cheap, needs no synchronisation within the
epoch, and also works for policies that need no losses. What cannot be right is an error; see
``loop_checks``.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from fineprune.errors import warn_user

if TYPE_CHECKING:
    from fineprune.pruning.epoch_cycle import Progress
    from fineprune.pruning.loop_checks import LoopChecks
    from fineprune.pruning.recorder import Recorder
    from fineprune.pruning.run_report import RunTotals

# Number of epochs in a row that recorded nothing before a warning is given. In a loop that has not
# recorded anything before, one epoch that read the sampler is enough.
_SILENT_EPOCHS = 3

# The first batches of each epoch are compared with the plan: at least so many batches and indices.
_WATCHED_BATCHES = 8
_WATCHED_INDICES = 1024

# Number of pruning epochs in a row that trained skipped samples before a warning is given.
_IGNORED_EPOCHS = 3

# Number of epochs that ended after as many batches as the first one, although they had more, before
# a warning is given.
_CUT_EPOCHS = 2

# A training may take a few steps less than planned, such as for batches without a finite loss. The
# warnings of these kinds say already that an epoch has other steps.
_ENOUGH_STEPS = 0.98
_OTHER_STEPS = {"batches", "cut", "dropped", "gaps"}

# An epoch recorded far fewer samples than the plan keeps if it recorded at most this share of them.
_FEW = 0.8

# Consecutive batches follow each other in the epoch's order at a distance of one batch. If a
# framework shards them once more, it is two batches or more; if every third or fourth one is not
# recorded, it is four thirds or more. If many samples were left out of their batches, it is more
# than so many samples for each recorded one.
_FAR = 1.2
_FAR_PER_SAMPLE = 1.5

# With fewer batches, a framework may have given a rank all kept samples in order to fill a batch.
_ENOUGH_BATCHES = 4

# The part of an epoch's order in which its first batches are looked for, as a multiple of them.
_SEARCHED = 8


class LoopWarnings:
    """Compares what one rank trains with the plans of the epochs. Each kind is warned of once.

    Args:
        checks, sampler: Those of the ``Pruner``.
        has_dataset: Whether the pruner was made of a data set. A loop over arrays in memory may
            leave out epochs without a sign.

    Attributes:
        watching: Whether ``see`` needs the next batch of the epoch.
        steps_asked: Whether the loop has asked for the number of steps of the training.
    """

    def __init__(self, checks: "LoopChecks", sampler: Any, has_dataset: bool) -> None:
        self._checks = checks
        self._policy = checks.policy
        self._cycle = checks.cycle
        self._sampler = sampler
        self.steps_asked = self._has_recorded = False
        self._silent_in_a_row = self._unused_in_a_row = self._ignored_in_a_row = 0
        self._first_batches = -1  # 0 if the loop broke off the first epoch.
        self._cut = 0
        self._warned: set[str] = set()
        if not self._policy.needs_losses:
            self._warned.add("silent")
        if not has_dataset:
            self._warned.add("unused")
        self.forget()

    def see(self, index: torch.Tensor) -> None:
        """Keep the indices of a batch, shape (B,), one of the first of its epoch."""
        self._batches.append(index)
        self._watched += len(index)
        enough = self._watched >= _WATCHED_INDICES
        self.watching = not enough or len(self._batches) < _WATCHED_BATCHES

    def warn_of_missing_rates(self) -> None:
        """Warn if the policy needs learning rates and has none."""
        self._warn_once("rates", self._policy.without_rates, UserWarning)

    def warn_of_another_epoch(self) -> None:
        """Warn if an epoch begins that is probably not the one that the user wants."""
        cycle = self._cycle
        if cycle.in_loop and cycle.ended_here:  # The user goes back with ``epochs(start)``.
            return
        if cycle.epoch < cycle.behind:
            self._warn_once(
                "again",
                f"epoch {cycle.epoch} is trained again, although the training has reached epoch "
                f"{cycle.behind}: begin with pruner.position.epoch, or loop over pruner.epochs()",
            )
        elif cycle.epoch and not (cycle.behind or cycle.from_first or cycle.in_loop):
            if cycle.epoch > 1 and not self._policy.needs_losses:
                return  # It trains what it would have trained after a resume.
            count = "count epochs from 0, or " if cycle.epoch == 1 else ""
            self._warn_once(
                "first",
                f"the training begins with epoch {cycle.epoch}, so those before it count as "
                f"trained, but nothing was learned from their losses: {count}load the pruner's "
                f"state of the training that has trained them",
            )

    def warn_of_missing_logits(self, epoch: int) -> None:
        """Warn that an epoch recorded no logits, as those of the loaded state did."""
        self._warn_once(
            "logits",
            f"epoch {epoch} recorded no logits, unlike those of the loaded state, so the suspects "
            f"stay as they were: call pruner.record(index, losses, logits, labels), give "
            f"watch_labels=True to PruningTrainer, or set run.history=true in a recipe",
        )

    def warn_if_read_ahead(self, read: int, recorded: int) -> None:
        """Warn if the last batches of an epoch, of which so many were recorded, may follow it."""
        if 0 < recorded < read:
            self._warn_once(
                "ahead",
                f"{read - recorded} of {read} batches of epoch {self._cycle.epoch} were not "
                f"recorded when iterate() was asked for the next epoch. If they are recorded "
                f"later, they count for that epoch: record each batch before you read the next "
                f"one, and prefetch only within `for epoch in pruner.epochs()`. If they were left "
                f"out or recorded together, ignore this",
            )

    def forget(self) -> None:
        """Forget the batches of the epoch in progress."""
        self._batches: list[torch.Tensor] = []
        self._watched = 0
        self.watching = True

    def warn_of_another_order(self, progress: "Progress", again: int) -> None:
        """Warn if samples of the last batch come later in the order than those that count."""
        if not again:
            return
        self._warn_once(
            "order",
            f"{again} samples of the last batch of epoch {progress.plan.epoch} are not among the "
            f"first {progress.samples} of its order, so a training that resumes from this state "
            f"trains samples twice: keep the order of the sampler (in_order=True, and a "
            f"batch_sampler and a collate_fn that do not sort or leave out samples), or save "
            f"between epochs",
        )

    def warn_before_saving(self) -> None:
        """Warn if a state does not tell that its epoch was trained."""
        cycle = self._cycle
        trained = cycle.unfinished is None and cycle.is_open and self._all_yielded()
        if trained and not self._has_recorded:
            self._warn_once(
                "saved",
                f"all samples of epoch {cycle.epoch} were loaded and none was recorded, so a "
                f"training that resumes from this state trains the epoch again: call record() in "
                f"each step, or end_epoch() before state_dict()",
            )

    def end_epoch(
        self,
        progress: "Progress",
        planned_batches: int | None,
        recorder: "Recorder",
        totals: "RunTotals",
    ) -> list[str]:
        """Return the warnings that an epoch gives rise to.

        Args:
            progress: The epoch and what was recorded of it.
            planned_batches: The number of batches of this rank; None if it is not known.
            recorder: What was noted when the losses of the epoch were flushed.
            totals: The sums over the epochs so far, with this one.
        """
        watched = [index.cpu().numpy() for index in self._batches]  # This waits for the device.
        self.forget()
        if not progress.batches:
            return self._of_silence(progress)
        self._has_recorded = True
        all_yielded = progress is self._cycle.current and self._all_yielded()
        self._silent_in_a_row = self._unused_in_a_row = 0
        found = {
            "repeats": self._of_repeats(progress),
            # A rank of a stream that has too few samples repeats them.
            "same": None
            if self._checks.numbering
            else self._of_same_indices(progress.plan.epoch, watched),
            "unplanned": self._of_unplanned(progress, watched),
            "gaps": self._of_gaps(progress, watched),
            "batches": self._of_batches(progress, planned_batches),
            "dropped": _of_dropped(progress, planned_batches) if all_yielded else None,
            "cut": self._of_cut(progress, planned_batches),
            "flat": _of_flat_losses(progress) if recorder.flat else None,
            "uneven": None
            if self._checks.sharded or planned_batches is None
            else _of_uneven_ranks(progress, recorder.uneven),
        }
        new = self._once(found)
        if not self._warned & _OTHER_STEPS:
            short = self._of_missing_steps(progress.plan.epoch, totals)
            new += self._once({"short": short})
        return new

    def _all_yielded(self) -> bool:
        """Return whether the loop has read all samples of this rank in the current epoch."""
        yielded: int = self._sampler.state_dict()["yielded"]
        return self._cycle.sampler_read and yielded == len(self._sampler)

    def _warn_once(
        self, kind: str, message: str | None, category: type[Warning] = RuntimeWarning
    ) -> None:
        for new in self._once({kind: message}):
            warn_user(new, category)

    def _once(self, found: dict[str, str | None]) -> list[str]:
        new = {kind: text for kind, text in found.items() if text and kind not in self._warned}
        self._warned.update(new)
        return list(new.values())

    def _of_silence(self, progress: "Progress") -> list[str]:
        cycle, epoch = self._cycle, progress.plan.epoch
        used = cycle.sampler_read or cycle.plan_read
        self._silent_in_a_row += used
        self._unused_in_a_row = 0 if used else self._unused_in_a_row + 1
        never = cycle.sampler_read and not self._has_recorded
        silent = never or self._silent_in_a_row == _SILENT_EPOCHS
        unused = self._unused_in_a_row == _SILENT_EPOCHS
        return self._once(
            {
                "silent": f"epoch {epoch} recorded no losses, so policy {self._policy.name!r} "
                f"learns nothing: pass the losses of each batch to pruner.record(index, losses)"
                if silent
                else None,
                "unused": f"{_SILENT_EPOCHS} epochs up to epoch {epoch} used neither the sampler "
                f"nor the plan of the pruner, so nothing was skipped: train with pruner.loader(), "
                f"or give your loader sampler=pruner.sampler"
                if unused
                else None,
            }
        )

    def _of_repeats(self, progress: "Progress") -> str | None:
        epoch, planned, ranks = progress.plan.epoch, progress.planned, self._checks.num_ranks
        world = self._checks.replicas.late_world()
        if world is not None:
            return (
                f"this pruner was made before the process group of {world} ranks, so every rank "
                f"trains all samples and learns alone: make it after init_process_group()"
            )
        all_of_them = progress.samples >= ranks * planned
        if self._checks.sharded and all_of_them and progress.batches >= _ENOUGH_BATCHES:
            return (
                f"epoch {epoch} keeps {planned} samples, and each of {ranks} ranks "
                f"trained all of them: leave out num_replicas and sharded_by_loader, which are for "
                f"frameworks that shard the batches"
            )
        return None

    def _of_unplanned(
        self, progress: "Progress", watched: list[npt.NDArray[np.int64]]
    ) -> str | None:
        """Warn if skipped samples were trained in so many epochs that this is no exception."""
        plan = progress.plan
        skipped_share = 1 - plan.number / self._checks.num_samples
        if not watched or not skipped_share:
            return None
        index = np.concatenate(watched)
        unplanned = np.count_nonzero(~plan.includes(index)) / len(index)
        # A loader without the sampler trains skipped samples as often as all others.
        ignored = unplanned >= skipped_share / 2
        self._ignored_in_a_row = self._ignored_in_a_row + 1 if ignored else 0
        if self._ignored_in_a_row < _IGNORED_EPOCHS:
            return None
        return (
            f"in {_IGNORED_EPOCHS} pruning epochs up to epoch {plan.epoch}, the samples to skip "
            f"were trained anyway: give the loader sampler=pruner.sampler, and give record the "
            f"indices that the loader yields, not numbers within the batch"
        )

    def _of_same_indices(self, epoch: int, watched: list[npt.NDArray[np.int64]]) -> str | None:
        """Warn if all batches have the same indices, since an epoch trains each sample once."""
        same = all(np.array_equal(index, watched[0][: len(index)]) for index in watched[1:])
        if not same or len(watched) < _ENOUGH_BATCHES:
            return None
        return (
            f"the batches of epoch {epoch} were recorded with the same indices, so losses are "
            f"attributed to the wrong samples: give record the indices that the loader yields, not "
            f"numbers within the batch"
        )

    def _of_gaps(self, progress: "Progress", watched: list[npt.NDArray[np.int64]]) -> str | None:
        """Warn if far too few samples were recorded, and there are gaps between them."""
        if not watched or progress.samples > _FEW * progress.planned or "gaps" in self._warned:
            return None
        if progress is not self._cycle.current or not self._cycle.sampler_read:
            return None  # The loop has an order of its own.
        checks = self._checks
        # If a framework shards the batches, this rank trains every so manieth of the order.
        sizes = np.array([len(index) for index in watched])
        sizes = sizes * checks.num_ranks / checks.shape.num_replicas
        whole = max(sizes.max(), checks.shape.batch_size or 0)
        order = self._sampler.leading(round(_SEARCHED * sizes.sum()))
        per_batch, per_sample = distances(watched, sizes, order)
        if per_sample <= _FAR or (per_batch <= _FAR * whole and per_sample <= _FAR_PER_SAMPLE):
            return None
        # One process has nothing to shard.
        shards = (
            "if a framework shards the batches itself, make the Pruner with sharded_by_loader=True "
            "(or num_replicas=1 and the batch size of all ranks together); otherwise, "
            if checks.num_ranks > 1
            else ""
        )
        return (
            f"epoch {progress.plan.epoch} recorded {progress.samples} samples, but its plan keeps "
            f"{progress.planned}, and there are gaps between the recorded ones: {shards}record "
            f"every batch, even one without a step (its losses may be NaN), and give the Pruner "
            f"only samples that can be trained, such as those with a label"
        )

    def _of_batches(self, progress: "Progress", planned: int | None) -> str | None:
        """Warn if a whole epoch was recorded in another number of batches than was planned."""
        batches = progress.batches
        if planned is None or progress.samples < progress.planned or batches in (1, planned):
            return None
        loader = "one process" if self._checks.sharded else "the loader"
        return (
            f"epoch {progress.plan.epoch} was recorded in {batches} batches instead of {planned}, "
            f"so total_steps() is not the number of optimizer steps that are taken: give Pruner "
            f"the batch size of {loader}"
        )

    def _of_cut(self, progress: "Progress", planned: int | None) -> str | None:
        """Warn if epochs end where the first one ended; a loop may break off where it likes."""
        batches = progress.batches
        if planned is None:
            return None
        if self._first_batches < 0:
            self._first_batches = batches if batches == planned else 0
        self._cut += batches == self._first_batches < planned
        if self._cut < _CUT_EPOCHS:
            return None
        return (
            f"{_CUT_EPOCHS} epochs up to epoch {progress.plan.epoch} ended after {batches} "
            f"batches, as the first one did, but had more ({planned} in this one), so fewer steps "
            f"are taken than total_steps() says: let your framework read len(loader) in each epoch"
        )

    def _of_missing_steps(self, epoch: int, totals: "RunTotals") -> str | None:
        """Warn if a training that left out no epoch ends with fewer steps than were planned.

        A loop that did not ask for them may break off each epoch, unless the policy saves an exact
        number of steps, and one may record each epoch as one batch.
        """
        exact = self._policy.total_steps is not None and not self._checks.observes
        if not (self.steps_asked or exact):
            return None
        if not epoch + 1 == totals.epochs == self._policy.epochs < totals.batches:
            return None
        known = self._checks.counts.known_steps()
        steps = 0 if known is None else known + totals.extra
        if totals.steps >= _ENOUGH_STEPS * steps:
            return None
        return (
            f"the training took {totals.steps} of the {steps} steps that total_steps() says, since "
            f"epochs ended before their last batch, or batches were not recorded or larger than "
            f"batch_size, so a rate made for all steps has not fallen to its end: train all "
            f"batches, or make the scheduler for fewer steps"
        )


def _of_dropped(progress: "Progress", planned: int | None) -> str | None:
    """Warn if only an incomplete last batch was not recorded, although it was loaded."""
    missing, batches = progress.planned - progress.samples, progress.batches
    if planned is None or batches != planned - 1 or not 0 < missing < progress.samples / batches:
        return None
    return (
        f"the last batch of epoch {progress.plan.epoch}, of {missing} samples, was loaded but not "
        f"recorded, so total_steps() counts a step that is not taken: give Pruner drop_last=True "
        f"if your loader has it, or record every batch"
    )


def _of_flat_losses(progress: "Progress") -> str:
    return (
        f"all samples of each batch of epoch {progress.plan.epoch} had the same loss, so no sample "
        f'differs from another: record one loss per sample, with reduction="none"'
    )


def _of_uneven_ranks(progress: "Progress", uneven: tuple[int, int] | None) -> str | None:
    """Warn if ranks recorded other numbers of batches, although they trained equally many."""
    if uneven is None:
        return None
    return (
        f"some ranks recorded {uneven[0]} batches of epoch {progress.plan.epoch} and others "
        f"{uneven[1]}, so losses may have been compared with those of batches that were not "
        f"trained together: record every batch on every rank, even one without a step (its losses "
        f"may be NaN)"
    )


def distances(
    batches: list[npt.NDArray[np.int64]],
    sizes: npt.NDArray[np.float64],
    order: npt.NDArray[np.int64],
) -> tuple[float, float]:
    """Return the distances in the order at which the batches follow the first one.

    They are medians, so that a few missing batches do not matter: per batch, and per sample of the
    batches in between. Both are 0 for fewer than three batches, and if the first one is not in the
    order. A batch that is not in it is infinitely far.

    Args:
        batches: The indices of some batches, shape (B,) each.
        sizes: The number of samples in each batch of all ranks; shape (number of batches,).
        order: Samples in their order, shape (n,).
    """
    places = {sample: place for place, sample in reversed(list(enumerate(order.tolist())))}
    starts = [min(places.get(sample, np.inf) for sample in batch.tolist()) for batch in batches]
    if len(batches) < 3 or starts[0] == np.inf:
        return 0.0, 0.0
    steps = np.array(starts[1:]) - starts[0]
    per_batch = np.median(steps / np.arange(1, len(batches)))
    return float(per_batch), float(np.median(steps / sizes.cumsum()[:-1]))
