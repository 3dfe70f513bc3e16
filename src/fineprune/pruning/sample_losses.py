"""The loss of a sample that has a loss for each token, pixel or task.

Each function returns one loss per sample, shape (B,), with its gradient, as ``Pruner.record`` takes
it. A policy compares samples by these losses, so a long text must not have a larger loss only
because it is long.
"""

from collections.abc import Mapping

import torch

from fineprune.errors import InputError


def reduce_tokens(losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of the tokens of each sample, without padding.

    The mean of the result weighs a short text as much as a long one, so it is not the mean over all
    tokens of the batch. To backpropagate the latter, use ``Pruner.weighted``.

    Args:
        losses: One loss per token, floating point, shape (B, tokens). Padding may have any value,
            even NaN.
        mask: Which tokens count, bool, shape (B, tokens), such as ``labels != -100`` or
            ``attention_mask.bool()``. For a causal language model, these are the shifted labels.

    Returns:
        float32 (float64 if the losses are), shape (B,). A sample in which no token counts has the
        loss 0, and no gradient.

    Raises:
        InputError: The shapes differ or have less than two dimensions, or the mask is not bool.
    """
    if losses.ndim < 2 or losses.shape != mask.shape:
        raise InputError(
            f"expected losses and mask of shape (B, tokens), got {tuple(losses.shape)} and "
            f"{tuple(mask.shape)}: give flat losses as losses.view_as(mask)"
        )
    if mask.dtype != torch.bool:
        raise InputError(
            f"expected mask as bool, got {mask.dtype}: use labels != -100 or attention_mask.bool()"
        )
    wide = torch.promote_types(losses.dtype, torch.float32)
    counted = losses.to(wide).masked_fill(~mask, 0.0).flatten(1)
    return counted.sum(1) / mask.flatten(1).sum(1).clamp(min=1)


def reduce_pixels(
    losses: torch.Tensor, target: torch.Tensor, ignore_index: int = -100
) -> torch.Tensor:
    """Return the mean loss of the pixels of each sample, without ignored ones (segmentation).

    ``F.cross_entropy(..., ignore_index=255, reduction="none")`` sets the losses of ignored pixels
    to 0, so the plain mean would be smaller the more pixels are ignored.

    Args:
        losses: One loss per pixel, floating point, shape (B, height, width) or (B, ...).
        target: The class of each pixel, integers, the shape of ``losses``.
        ignore_index: The class whose pixels are left out, as in ``F.cross_entropy``.

    Returns:
        float32 (float64 if the losses are), shape (B,). A sample in which all pixels are ignored
        has the loss 0, and no gradient.

    Raises:
        InputError: The shapes differ, or have less than two dimensions; or all pixels of the label
            255 or of negative labels have the loss 0, because the loss ignored them.
    """
    if losses.ndim < 2 or losses.shape != target.shape:
        raise InputError(
            f"expected losses and target of shape (B, height, width), got {tuple(losses.shape)} "
            f"and {tuple(target.shape)}: use reduction='none'"
        )
    target = target.long()  # As integers of 8 bits, -100 would be a class.
    if target.is_cpu and not torch.compiler.is_compiling():  # On a GPU, it would wait.
        _check_ignored(losses.detach(), target, ignore_index)
    return reduce_tokens(losses, target != ignore_index)


def _check_ignored(losses: torch.Tensor, target: torch.Tensor, ignore_index: int) -> None:
    """Raise InputError if the pixels of a label that is no class would count with the loss 0."""
    other = ((target < 0) | (target == 255)) & (target != ignore_index)
    if bool(other.any()) and not bool(losses[other].any()):
        label = int(target[other][0])
        raise InputError(
            f"expected the ignore_index of the loss, got {ignore_index}, although the pixels of "
            f"the label {label} have the loss 0: give reduce_pixels ignore_index={label}"
        )


def reduce_tasks(
    losses: Mapping[str, torch.Tensor], weights: Mapping[str, float] | None = None
) -> torch.Tensor:
    """Return the sum of the losses of several tasks for each sample.

    Unlike ``+``, this does not broadcast: a scalar (the mean of a batch) or a column among losses
    of shape (B,) is an error.

    Args:
        losses: The losses of each task, floating point, shape (B,) each.
        weights: The factor of each task. By default, 1 for every task.

    Returns:
        Shape (B,).

    Raises:
        InputError: There are no tasks, a shape is wrong, or the weights are not for the same tasks.
    """
    if not losses:
        raise InputError("expected the losses of at least one task, got none")
    if weights is not None and set(weights) != set(losses):
        raise InputError(
            f"expected one weight for each of the tasks {', '.join(sorted(losses))}, got weights "
            f"for {', '.join(sorted(weights)) or 'none'}"
        )
    shapes = {task: tuple(values.shape) for task, values in losses.items()}
    if len(set(shapes.values())) > 1 or len(next(iter(shapes.values()))) != 1:
        given = ", ".join(f"{task} {shape}" for task, shape in shapes.items())
        raise InputError(
            f"expected the losses of every task in shape (B,), got {given}: use reduction='none', "
            f"and one loss per sample"
        )
    total: torch.Tensor = sum(  # type: ignore[assignment]
        values if weights is None else values * weights[task] for task, values in losses.items()
    )
    return total
