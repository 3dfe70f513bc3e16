"""What ``record`` is given: one row of logits, one index and one label for each sample."""

from typing import Any

import torch
from torch import Tensor

from fineprune.errors import InputError, first_line, shown

# The label of a sample without one, which torch's losses ignore unless told otherwise.
NO_LABEL = -100


def as_numbers(name: str, values: Any) -> Tensor:
    """Return the indices or the labels of a batch as a tensor.

    Arrays are copied, since nothing tells whether they change later.
    """
    if isinstance(values, Tensor):
        return as_local(name, values)
    try:
        return torch.tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"expected {name} as whole numbers, one for each sample, got {shown(str(values))}: "
            f"fp.Indexed and pruner.loader() yield the indices of samples, and classes are "
            f"numbered from 0"
        ) from error


def as_local(name: str, values: Tensor) -> Tensor:
    """Return a DTensor that every rank has as a whole as a plain tensor, and others as they are."""
    if type(values) is Tensor or not hasattr(values, "to_local"):
        return values
    whole: Any = values
    if not all(placement.is_replicate() for placement in whole.placements):
        raise InputError(
            f"expected {name} that are whole on each rank, got a DTensor with the placements "
            f"{whole.placements}: give record {name}.full_tensor(), or {name}.to_local() if each "
            f"rank records the samples of its own part"
        )
    local: Tensor = whole.to_local()
    return local


def copy_of(values: Tensor) -> Tensor:
    """Return a copy of a tensor of a batch, which no later change of the batch reaches."""
    check_copied(values)
    return values.clone()


def check_copied(values: Tensor) -> None:
    """Raise InputError if a tensor of a batch has no memory that can be copied."""
    if values.layout != torch.strided:
        raise InputError(
            f"expected a dense tensor in each batch, got one with the layout {values.layout}: give "
            f"record values.to_dense()"
        )
    try:
        values.untyped_storage()
    except NotImplementedError as error:
        raise InputError(
            f"expected a batch outside the transforms of torch.func, got a tensor without memory "
            f"({first_line(error)}): return it from the function, for example by "
            f"torch.func.grad(..., has_aux=True), and record it afterwards"
        ) from None


def check_not_recomputed() -> None:
    """Raise InputError within a backward pass, which repeats the forward pass of a checkpoint."""
    if torch._C._current_graph_task_id() != -1:  # It takes 0.04 microseconds.
        raise InputError(
            "expected record() once for each batch, got a call in the backward pass, such as "
            "torch.utils.checkpoint makes when it repeats the forward pass: call record() before "
            "loss.backward(), outside of checkpointed functions, or after it"
        )


def check_classified(index: Tensor, logits: Tensor, labels: Tensor, num_classes: int) -> None:
    """Raise InputError unless this is a batch of samples with one class each."""
    shape = (len(labels), num_classes) if labels.ndim == 1 else None
    if tuple(logits.shape) != shape or index.shape != labels.shape:
        places = {"first": index, "last": labels}
        swapped = [place for place, of in places.items() if of.ndim == 2 and of.is_floating_point()]
        if swapped and not logits.is_floating_point():
            raise InputError(
                f"expected record(index, logits, labels), got the logits as the {swapped[0]} "
                f"argument: give record the indices first and the labels last"
            )
        raise InputError(
            f"expected logits of shape (B, {num_classes}), and indices and labels of shape (B,), "
            f"got {tuple(logits.shape)}, {tuple(index.shape)} and {tuple(labels.shape)}: "
            f"{_remedy(index, logits, labels, num_classes)}"
        )
    if index.is_floating_point() or index.dtype == torch.bool or labels.is_floating_point():
        raise InputError(
            f"expected whole numbers as indices and labels, got {index.dtype} and "
            f"{labels.dtype}: give record the index of each sample and the number of its class"
        )
    if not logits.is_floating_point():
        raise InputError(
            f"expected floating-point logits, got {logits.dtype}: give record the output of the "
            f"network"
        )


def _remedy(index: Tensor, logits: Tensor, labels: Tensor, num_classes: int) -> str:
    if num_classes == 2 and logits.numel() == index.numel():
        return (
            "if z is the only logit of each sample, give record "
            "torch.stack([torch.zeros_like(z), z], 1) of the flat z, and the labels 0 and 1"
        )
    if labels.ndim > 1 and logits.ndim > 2:
        return "only networks that give one class to a whole sample can be watched"
    if labels.ndim == 2 and labels.shape[1] == 1:
        return "give record one label per sample, labels.squeeze(1)"
    if labels.ndim > 1:
        return (
            "give record one label per sample, labels.argmax(1) if each row is one-hot; samples "
            "with several classes cannot be watched"
        )
    if index.ndim == logits.ndim - 1 == labels.ndim == 0:
        return "give record a batch of one sample: index[None], logits[None] and labels[None]"
    if index.ndim == 0:
        return "give record the indices that fp.Indexed yields, not the number of the batch"
    if logits.ndim == 2 and logits.shape[1] != num_classes:
        return (
            f"give LabelWatch num_classes={logits.shape[1]}, as many as the network has; a pruner "
            f"has the number from its first batch, after which it must not change"
        )
    return "give record one row of logits per sample"
