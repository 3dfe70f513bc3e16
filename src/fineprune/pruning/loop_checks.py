"""Errors about a training loop that does not do what the plan of the epoch says.

They are raised as soon as the loop does something that cannot be right. If an epoch records more
samples than planned, for example, the loop does not iterate over ``pruner.epochs()``, records
validation losses, makes two passes per epoch, or has a loader without the sampler. What may be
intended is in ``loop_warnings``.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from fineprune.errors import InputError
from fineprune.pruning.plan import fingerprint
from fineprune.pruning.replicas import Replicas

if TYPE_CHECKING:  # It raises the errors of this file.
    from fineprune.pruning.epoch_cycle import EpochCycle
    from fineprune.pruning.step_counts import StepCounts


def check_batch(index: torch.Tensor, losses: torch.Tensor) -> None:
    """Raise InputError unless these are B integer indices and B floating-point losses."""
    if not isinstance(losses, torch.Tensor):
        raise InputError(
            f"expected losses as a torch.Tensor, got {type(losses).__name__}: give one loss per "
            f"sample, such as torch.as_tensor(losses)"
        )
    if losses.ndim != 1 or index.shape != losses.shape:
        raise InputError(
            f"expected one loss for each index, both of shape (B,), got losses of shape "
            f"{tuple(losses.shape)} and indices of shape {tuple(index.shape)}: "
            f"{_remedy(index, losses)}"
        )
    if not len(losses):
        raise InputError("expected at least one loss in a batch, got none: leave out empty batches")
    if not losses.is_floating_point():
        raise InputError(f"expected floating-point losses, got {losses.dtype}")
    if index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
        raise InputError(
            f"expected integer indices, got {index.dtype}: give them as int64, since a float is "
            f"not exact for a large index"
        )


def _remedy(index: torch.Tensor, losses: torch.Tensor) -> str:
    if losses.ndim == 0:
        return 'compute the losses with reduction="none", and do not squeeze a batch of one sample'
    if index.ndim == 0 and len(losses) == 1:
        return "give record the index of the sample as index[None]"
    if losses.ndim == 1:
        return "give record the indices of the samples whose losses these are, and no others"
    if losses.shape[:1] != index.shape:
        return "give record one loss and one index per sample"
    if losses.ndim == 2:
        return (
            "give record the losses and not the logits; if each sample has several losses, use "
            "losses.mean(1), or fp.reduce_tokens or fp.reduce_tasks if some of them do not count"
        )
    return "use fp.reduce_pixels, or losses.flatten(1).mean(1) if every loss counts"


def check_range(lowest: int, highest: int, num_samples: int) -> None:
    """Raise InputError if the indices from ``lowest`` to ``highest`` are not all in 0..N-1."""
    if lowest < 0 or highest >= num_samples:
        raise InputError(f"expected indices in 0..{num_samples - 1}, got {lowest}..{highest}")


def check_length(dataset: Any, num_samples: int) -> None:
    """Raise InputError if the number of samples in a data set has changed."""
    if len(dataset) != num_samples:
        raise InputError(
            f"expected a data set of {num_samples} samples, as when the Pruner was made, got "
            f"{len(dataset)} samples: make a new Pruner if the data set has changed"
        )


def _text_of(settings: object) -> str:
    """Return a text that is the same in every process, whatever an own policy has as settings."""
    if isinstance(settings, Mapping):
        return str([(_text_of(key), _text_of(value)) for key, value in settings.items()])
    if isinstance(settings, list | tuple):
        return str([_text_of(value) for value in settings])
    if settings is None or isinstance(settings, bool | int | float | str | bytes):
        return repr(settings)
    return type(settings).__name__  # Its text may contain an address.


class LoopChecks:
    """Raises the errors of what one rank does.

    Args:
        counts, replicas, cycle: Those of the ``Pruner``.

    Attributes:
        counts, policy, num_samples, shape, replicas, cycle: Those of the ``Pruner``.
        num_ranks: Number of ranks, each of which records a loss when this one does.
        sharded: Whether a framework is to divide the batches of the sampler over the ranks.
        numbering: A number that says which sample each index stands for; 0 if the data set does.
        labels_digest: A number that is the same for equal labels; 0 if none are known.
        observes: Whether batches are trained elsewhere: in any order, and perhaps not all of them.
        ranks_compared: Whether ``compare_ranks`` has nothing to do any more.
    """

    def __init__(self, counts: "StepCounts", replicas: Replicas, cycle: "EpochCycle") -> None:
        self.counts = counts
        self.policy = counts.policy
        self.num_samples = counts.num_samples
        self.shape = counts.shape
        self.num_ranks = max(counts.shape.num_replicas, replicas.size)
        self.sharded = counts.shape.num_replicas < self.num_ranks
        self.replicas = replicas
        self.cycle = cycle
        self.numbering = self.labels_digest = 0
        self.observes = False
        self.ranks_compared = replicas.size == 1

    def check_epochs_left(self) -> None:
        """Raise InputError if a loop begins although this process has trained all epochs."""
        cycle, epochs = self.cycle, self.policy.epochs
        if cycle.ended_here and cycle.next_epoch >= epochs:
            raise InputError(
                f"expected a pruner with epochs left to train, got one that has trained all "
                f"{epochs}: make a new Pruner for another training, or go back with epochs(start)"
            )

    def check_not_driven(self, wanted: int) -> None:
        """Raise InputError if an epoch is in progress and another one is wanted."""
        epoch = self.cycle.epoch
        if self.cycle.driven and wanted != epoch:
            raise InputError(
                f"expected set_epoch({epoch}), since this epoch is in progress, got {wanted}: call "
                f"end_epoch() first, or let the framework count from epoch {epoch}"
            )

    def check_may_load(self) -> None:
        """Raise InputError if a state is loaded although an epoch is in progress."""
        if self.cycle.driven:
            raise InputError(
                f"expected load_state_dict() before the loop over the epochs, got a call in epoch "
                f"{self.cycle.epoch}: load the state first, and the loop continues where it was "
                f"saved"
            )

    def compare_ranks(self, seed: int) -> None:
        """Raise InputError if the ranks differ in what must be the same. All of them must call it.

        They are compared once, with the first batch of the training, because ranks that differ
        might later wait for each other elsewhere, for example when they exchange gradients. A rank
        that has recorded no batch compares before its first exchange.

        Args:
            seed: The seed of the pruner.
        """
        if self.ranks_compared:
            return
        plan, policy = self.cycle.current.plan, self.policy
        self.replicas.check_equal(
            {
                "number of samples": (
                    self.num_samples,
                    "make the Pruner for the whole data set on every rank, not for a part of it",
                ),
                "batch_size, accumulation, num_replicas and drop_last": (
                    self.shape,
                    "batch_size is the number of samples that each rank takes per batch",
                ),
                "KeyIndex": (
                    self.numbering,
                    "different ones number the samples differently, so let one rank make and save "
                    "it, and load it on all ranks",
                ),
                "label of each sample": (
                    self.labels_digest,
                    "give all ranks data sets with the same labels, or the Pruner labels=...",
                ),
                "seed": (seed, "seed anything else by the rank, such as augmentation or dropout"),
                "policy": (
                    _text_of([policy.settings(), policy.plan_options.settings()]),
                    "give it the same settings on all ranks",
                ),
                "epoch": (plan.epoch, "loop over pruner.epochs(), and load the state on all ranks"),
                "plan": (fingerprint(plan), "let select() draw from its argument rng only"),
            }
        )
        self.ranks_compared = True

    def check_first_batch(self, index: torch.Tensor, losses: torch.Tensor) -> None:
        """Check what can be checked when an epoch records its first batch, of shape (B,).

        Raises:
            InputError: The epoch has ended, the losses are one number that was expanded, an index
                is out of range, or ranks share the samples, but not what is learned from losses.
        """
        policy = self.policy
        if not self.cycle.is_open:
            raise InputError(
                f"expected no more losses of epoch {self.cycle.epoch}, which has ended, got some: "
                f"loop over pruner.epochs(), and record only training batches"
            )
        if policy.needs_losses and len(losses) > 1 and losses.stride() == (0,):
            raise InputError(
                f"expected one loss for each of {len(losses)} samples, got one number that was "
                f'expanded: use reduction="none"'
            )
        if index.is_cpu:
            index = index.long()  # Not all types have a minimum.
            check_range(int(index.min()), int(index.max()), self.num_samples)
        if policy.needs_losses and self.replicas.size < self.shape.num_replicas:
            raise InputError(
                f"expected {self.shape.num_replicas} ranks that exchange their losses, since "
                f"policy {policy.name!r} learns from them, got a group of {self.replicas.size}: "
                f"initialise torch.distributed before making the Pruner, or give it all_gather, "
                f"such as hvd.allgather_object"
            )

    def check_logits(self, recorded: bool) -> None:
        """Raise InputError if the policy needs logits, and an epoch recorded none."""
        if self.policy.needs_logits and not recorded:
            raise InputError(
                f"expected logits, since the settings of policy {self.policy.name!r} need them, "
                f"got none in a whole epoch: call pruner.record(index, losses, logits, labels), or "
                f"give PruningTrainer watch_labels=True"
            )

    def check_room(self, samples: int) -> None:
        """Raise InputError if the current epoch takes fewer samples than its next batch has."""
        cycle = self.cycle
        if samples <= cycle.room():
            return
        advice = (
            "loop over pruner.epochs() or pruner.iterate(loader), give the loader "
            "sampler=pruner.sampler, and record every training batch once, each sample with one "
            "loss (the mean of two views), and no other batches; if a framework reads len(loader) "
            "only once, start it anew in each epoch"
        )
        if self.sharded:
            advice += (
                ", leave out num_replicas and sharded_by_loader if no framework shards the "
                "batches, and record equally many samples on every rank"
            )
        raise InputError(
            f"expected at most {cycle.current.planned} samples in epoch {cycle.epoch}, all that "
            f"its plan keeps, got more: {advice}"
        )
