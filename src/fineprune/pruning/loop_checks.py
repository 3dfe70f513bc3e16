"""Errors about a training loop that does not do what the plan of the epoch says.

They are raised as soon as the loop does something that cannot be right. If an epoch records more
samples than planned, for example, the loop does not iterate over ``pruner.epochs()``, records
validation losses, makes two passes per epoch, or has a loader without the sampler.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fineprune.errors import InputError, explaining
from fineprune.labels.batch import NO_LABEL, check_copied
from fineprune.pruning.epoch import Epoch
from fineprune.pruning.plan import fingerprint
from fineprune.pruning.policies.policy import Policy
from fineprune.pruning.replicas import Replicas
from fineprune.pruning.step_counts import BatchShape

_INTEGERS = {
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
}


def check_batch(index: torch.Tensor, losses: torch.Tensor) -> None:
    """Raise InputError unless these are B integer indices and B floating-point losses."""
    if (
        isinstance(losses, torch.Tensor)
        and losses.ndim == 1
        and index.shape == losses.shape
        and index.dtype in _INTEGERS
        and losses.is_floating_point()
        and len(losses)
    ):
        return
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
    raise InputError(
        f"expected integer indices, got {index.dtype}: give them as int64, since a float is not "
        f"exact for a large index"
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


def text_of(settings: object) -> str:
    """Return a text that is the same in every process, whatever an own policy has as settings."""
    if isinstance(settings, Mapping):
        return str([(text_of(key), text_of(value)) for key, value in settings.items()])
    if isinstance(settings, list | tuple):
        return str([text_of(value) for value in settings])
    if settings is None or isinstance(settings, bool | int | float | str | bytes):
        return repr(settings)
    return type(settings).__name__  # Its text may contain an address.


def check_first_batch(
    epoch: Epoch, policy: Policy, shape: BatchShape, replicas: Replicas, losses: torch.Tensor
) -> None:
    """Raise InputError if the first batch of an epoch shows that the loop cannot work.

    The losses have no memory that can be copied, as within torch.func; they are one number that was
    expanded; ranks share the samples, but not what is learned from losses; or the pruner was made
    before the ranks knew each other.
    """
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
            f"torch.distributed before making the Pruner, or give it all_gather, such as "
            f"hvd.allgather_object"
        )
    world = replicas.late_world()
    if world is not None:
        raise InputError(
            f"expected a pruner made after the process group of {world} ranks, got one made before "
            f"it, so that every rank would train all samples and learn alone: make it after "
            f"init_process_group()"
        )


def check_room(
    epoch: Epoch, shape: BatchShape, num_ranks: int, samples: int, *, again: bool
) -> None:
    """Raise InputError if an epoch takes no further batch of so many samples of all ranks.

    Without a batch size, it is not known how the samples are grouped and which are repeated. What
    is noticed then is only a loop that begins a complete epoch ``again``.
    """
    batch = shape.samples_per_batch
    if again:
        raise _too_many(epoch, num_ranks > shape.num_replicas)
    if batch is None:
        return
    # Samples are repeated after the number of ranks has changed.
    most = -(-epoch.planned // batch) * batch + num_ranks - 1
    if epoch.complete or epoch.done + samples > most:
        raise _too_many(epoch, num_ranks > shape.num_replicas)
    if batch < samples < epoch.planned:
        raise InputError(
            f"expected batches of at most {batch // num_ranks} samples on each rank, as Pruner's "
            f"batch_size says, with which it counts steps, got {samples // num_ranks}: give Pruner "
            f"the batch size of the loader"
        )


def _too_many(epoch: Epoch, sharded: bool) -> InputError:
    """Return the error of a batch for which an epoch has no room."""
    advice = (
        "loop over pruner.epochs() or pruner.iterate(loader), give the loader "
        "sampler=pruner.sampler, give the Pruner the loader's batch size, and record every "
        "training batch once and as a whole, and no other batches; if a framework reads "
        "len(loader) only once, start it anew in each epoch"
    )
    if sharded:
        advice += (
            ", leave out num_replicas and sharded_by_loader if no framework shards the batches, "
            "and record equally many samples on every rank"
        )
    return InputError(
        f"expected at most {epoch.planned} samples in epoch {epoch.number}, all that its plan "
        f"keeps, got more: {advice}"
    )


def compare_ranks(
    replicas: Replicas,
    epoch: Epoch,
    policy: Policy,
    shape: BatchShape,
    *,
    num_samples: int,
    seed: int,
    numbering: int,
    labels: int,
) -> None:
    """Raise InputError if the ranks differ in what must be the same. All of them must call it.

    They are compared once, with the first batch of the training, because ranks that differ might
    later wait for each other elsewhere, for example when they exchange gradients.
    """
    replicas.check_equal(
        {
            "number of samples": (
                num_samples,
                "make the Pruner for the whole data set on every rank, not for a part of it",
            ),
            "batch_size, accumulation, num_replicas and drop_last": (
                shape,
                "batch_size is the number of samples that each rank takes per batch",
            ),
            "KeyIndex": (
                numbering,
                "different ones number the samples differently, so let one rank make and save it, "
                "and load it on all ranks",
            ),
            "label of each sample": (
                labels,
                "give all ranks data sets with the same labels, or the Pruner labels=...",
            ),
            "seed": (seed, "seed anything else by the rank, such as augmentation or dropout"),
            "policy": (text_of(policy.settings()), "give it the same settings on all ranks"),
            "epoch": (epoch.number, "loop over pruner.epochs(), and load the state on all ranks"),
            "plan": (fingerprint(epoch.plan), "let select() draw from its argument rng only"),
        }
    )


def checked_labels(labels: Any, num_samples: int) -> npt.NDArray[np.integer]:
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


def check_recorded_labels(given: torch.Tensor, index: torch.Tensor, labels: torch.Tensor) -> None:
    """Raise InputError if samples of a batch have other labels than the pruner was given.

    This waits for the device, so it is called once. The indices and the labels have shape (B,), and
    the given labels are those of all samples, int64, shape (N,), negative where they are not known.
    """
    before, labels = given[index.cpu().long()], labels.cpu().long()
    others = ((before >= 0) & (labels != NO_LABEL) & (before != labels)).nonzero()[:, 0].tolist()
    if others:
        first = others[0]
        raise InputError(
            f"expected the labels that the data set (targets, labels) or the Pruner's labels=... "
            f"gives, got others for {len(others)} of {len(labels)} samples of the first batch, "
            f"such as {int(labels[first])} instead of {int(before[first])} for sample "
            f"{int(index[first])}: correct the attribute or the indices, or give the Pruner the "
            f"labels that you train as labels=..."
        )
