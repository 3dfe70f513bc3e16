"""The loss of a sample that has a loss for each token or pixel.

Each function returns one loss per sample, shape (B,), with its gradient, as ``Pruner.record`` takes
it. A policy compares samples by these losses, so a long text must not have a larger loss only
because it is long.
"""

import torch

from fineprune.errors import InputError


def reduce_tokens(losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of the tokens of each sample, without padding.

    A short text counts as much as a long one. To backpropagate the mean over all tokens of the
    batch, use ``Pruner.weighted``.

    Args:
        losses: One loss per token, floating point, shape (B, tokens), any value for padding.
        mask: Which tokens count, bool, shape (B, tokens), such as ``labels != -100`` (the shifted
            labels of a causal language model) or ``attention_mask.bool()``.

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


def reduce_pixels(losses: torch.Tensor, target: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Return the mean loss of the pixels of each sample, without ignored ones (segmentation).

    The loss of an ignored pixel is 0, so the plain mean would be smaller the more are ignored.

    Args:
        losses: One loss per pixel, floating point, shape (B, height, width) or (B, ...).
        target: The class of each pixel, integers, the shape of ``losses``.
        ignore_index: The class whose pixels the loss left out, in ``F.cross_entropy`` -100 by
            default.

    Returns:
        float32 (float64 if the losses are), shape (B,). A sample in which all pixels are ignored
        has the loss 0, and no gradient.

    Raises:
        InputError: The shapes differ, or have less than two dimensions.
    """
    if losses.ndim < 2 or losses.shape != target.shape:
        raise InputError(
            f"expected losses and target of shape (B, height, width), got {tuple(losses.shape)} "
            f"and {tuple(target.shape)}: use reduction='none'"
        )
    return reduce_tokens(losses, target.long() != ignore_index)  # -100 as a byte is a class.
