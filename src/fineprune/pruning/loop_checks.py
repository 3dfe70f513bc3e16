"""Errors about a training loop that does not do what the plan of the epoch says.

They are raised as soon as the loop does something that cannot be right.
"""

from collections.abc import Mapping
from typing import Any

import torch

from fineprune.errors import InputError
from fineprune.labels.batch import NO_LABEL, as_local, as_numbers, check_copied
from fineprune.labels.dataset_attributes import labels_of
from fineprune.pruning.epoch import Epoch
from fineprune.pruning.plan import EpochPlan
from fineprune.pruning.policies.policy import Policy
from fineprune.pruning.replicas import Replicas
from fineprune.pruning.step_counts import BatchShape


def check_batch(index: torch.Tensor, losses: torch.Tensor) -> None:
    """Raise InputError unless these are B integer indices and B floating-point losses."""
    if not isinstance(losses, torch.Tensor):
        raise InputError(
            f"expected losses as a torch.Tensor, got {type(losses).__name__}: give one loss per "
            f"sample, such as torch.as_tensor(losses)"
        )
    if losses.ndim != 1 or index.shape != losses.shape or not len(losses):
        raise InputError(
            f"expected one loss for each index, both of shape (B,), got losses of shape "
            f"{tuple(losses.shape)} and indices of shape {tuple(index.shape)}: "
            f"{_remedy(index, losses)}"
        )
    if not losses.is_floating_point() or index.is_floating_point() or index.dtype == torch.bool:
        raise InputError(
            f"expected integer indices and floating-point losses, got {index.dtype} and "
            f"{losses.dtype}: give the indices as int64"
        )


def _remedy(index: torch.Tensor, losses: torch.Tensor) -> str:
    if losses.ndim == 0:
        return 'compute the losses with reduction="none", and do not squeeze a batch of one sample'
    if index.shape == losses.shape:
        return "leave out empty batches"
    if losses.ndim == 1 or losses.shape[:1] != index.shape:
        return "give record one loss and one index per sample"
    if losses.ndim == 2:
        return (
            "give record the losses and not the logits; if each sample has several losses, use "
            "losses.mean(1), or fp.reduce_tokens if some of them do not count"
        )
    return "use fp.reduce_pixels, or losses.flatten(1).mean(1) if every loss counts"


def check_logits(logits: torch.Tensor | None, labels: Any) -> torch.Tensor:
    """Return the logits of a batch with labels, shape (B, C), for at least two classes."""
    if logits is None or labels is None:
        raise InputError(
            "expected logits and labels together, got only one of them: give record both, to "
            "watch the labels, or neither"
        )
    logits = as_local("logits", logits)
    if logits.ndim != 2 or logits.shape[1] < 2:
        raise InputError(
            f"expected logits of shape (B, C) for at least two classes, got "
            f"{tuple(logits.shape)}: give record one row of logits per sample, or no logits and "
            f"labels if this is not a classifier"
        )
    return logits


def check_first_batch(
    policy: Policy, shape: BatchShape, replicas: Replicas, losses: torch.Tensor
) -> None:
    """Raise InputError if the first batch of an epoch shows that the loop cannot work."""
    check_copied(losses)
    if policy.learns_from_losses and len(losses) > 1 and losses.stride() == (0,):
        raise InputError(
            f"expected one loss for each of {len(losses)} samples, got one number that was "
            f'expanded: use reduction="none"'
        )
    if policy.learns_from_losses and replicas.size < shape.num_replicas:
        raise InputError(
            f"expected {shape.num_replicas} ranks that exchange their losses, since policy "
            f"{policy.name!r} learns from them, got a group of {replicas.size}: initialise "
            f"torch.distributed before making the Pruner"
        )
    world = replicas.late_world()
    if world is not None:
        raise InputError(
            f"expected a pruner made after the process group of {world} ranks, got one made before "
            f"it, so that every rank would train all samples and learn alone: make it after "
            f"init_process_group()"
        )


def check_room(epoch: Epoch, shape: BatchShape, num_ranks: int, samples: int) -> None:
    """Raise InputError if an epoch takes no further batch of so many samples of all ranks.

    The batch size must be known. Otherwise, it is not known which samples are repeated.
    """
    batch = shape.samples_per_batch or 0
    if epoch.complete:
        advice = (
            "loop over pruner.epochs(), give the loader sampler=pruner.sampler, give the Pruner "
            "the loader's batch size, and record every training batch once and as a whole, and no "
            "other batches; if a framework reads len(loader) once, start it anew in each epoch"
        )
        if num_ranks > shape.num_replicas:
            advice += (
                ", leave out num_replicas and sharded_by_loader if no framework shards the "
                "batches, and record equally many samples on every rank"
            )
        raise InputError(
            f"expected at most {epoch.planned} samples in epoch {epoch.number}, all that its plan "
            f"keeps, got more: {advice}"
        )
    if samples > batch and (epoch.done or samples < epoch.planned):
        raise InputError(
            f"expected batches of at most {batch // num_ranks} samples on each rank, as Pruner's "
            f"batch_size says, with which it counts steps, got {samples // num_ranks}: give Pruner "
            f"the batch size of the loader"
        )


def check_not_ended(epoch: int, first_left: int) -> None:
    """Raise InputError if an epoch is one of those before the first that is left."""
    if epoch < first_left:
        raise InputError(
            f"expected no more losses of epoch {epoch}, which has ended, got some: loop over "
            f"pruner.epochs(), which continues with epoch {first_left}, and record only training "
            f"batches"
        )


def compare_ranks(
    replicas: Replicas,
    identity: Mapping[str, Any],
    shape: BatchShape,
    order: Mapping[str, int],
    plan: EpochPlan,
) -> None:
    """Raise InputError if the ranks differ in what must be the same. All of them must call it.

    They are compared once, with the first batch of the training, because ranks that differ might
    later wait for each other elsewhere, for example when they exchange gradients.
    """
    whole = "make the Pruner for the whole data set on every rank, not for a part of it"
    size = "batch_size is the number of samples that each rank takes per batch"
    index = "let one rank make and save it, and load it on all ranks, since it numbers the samples"
    other = "seed anything else by the rank, such as augmentation or dropout"
    replicas.check_equal(
        {
            "number of samples": (identity["num_samples"], whole),
            "batch_size, accumulation, num_replicas and drop_last": (shape, size),
            "KeyIndex": (order.get("KeyIndex"), index),
            "seed": (identity["seed"], other),
            "policy": (identity["settings"], "give it the same settings on all ranks"),
            "epoch": (plan.epoch, "loop over pruner.epochs(), and load the state on all ranks"),
            "plan": (plan.fingerprint, "let select() draw from its argument rng only"),
        }
    )


def check_order(order: Mapping[str, int], saved: Mapping[str, int], *, within: bool) -> None:
    """Raise InputError if a stream cannot go on with its numbers and order of the samples.

    ``within`` says whether the state was saved within an epoch, on whose order more depends.
    """
    for name, value in saved.items():
        if order.get(name) != value and (within or name == "KeyIndex"):
            raise InputError(
                f"expected {name}={value}, with which the state was saved, since the numbers of "
                f"the samples or their order within the epoch depend on it, got {order.get(name)}: "
                f"load the index that was saved then, and change all else between epochs only"
            )


def check_recorded_labels(dataset: Any, index: torch.Tensor, labels: Any) -> None:
    """Raise InputError if the samples of a batch have other labels than their data set says.

    This waits for the device, so it is called once.
    """
    of_dataset = labels_of(dataset)
    if of_dataset is None:
        return
    before = torch.from_numpy(of_dataset)[index.cpu().long()]
    labels = as_numbers("labels", labels).cpu().long()
    others = ((before >= 0) & (labels != NO_LABEL) & (before != labels)).nonzero()[:, 0].tolist()
    if others:
        first = others[0]
        raise InputError(
            f"expected the labels that the attributes of the data set (targets, labels) give, got "
            f"others for {len(others)} of {len(labels)} samples of the first batch, such as "
            f"{int(labels[first])} instead of {int(before[first])} for sample {int(index[first])}: "
            f"correct the attribute or the indices, or make the Pruner with the length of the "
            f"data set, if you train other labels"
        )
