"""The replica of a recipe's network that a worker of parameter servers trains."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from fineprune.labels.evidence import KEEP_ALL
from fineprune.training.data import load_data
from fineprune.training.network import (
    precision,
    recipe_network,
    training_losses,
    training_mode,
)
from fineprune.training.own_code import check_code
from fineprune.training.random_state import reseed
from fineprune.training.recipe import Recipe


class RecipeReplica:
    """A ``Replica`` of a recipe's network, with the data to train it on.

    All workers start with the same weights, but draw different random numbers while they train.

    Args:
        recipe: The recipe.
        rank: The number of the worker, from 0.
        digests, folder: Those for ``load_data``.
        records_logits: Whether ``step`` returns logits.
    """

    def __init__(
        self,
        recipe: Recipe,
        rank: int,
        digests: Mapping[str, str | None] | None = None,
        folder: Path | None = None,
        *,
        records_logits: bool = True,
    ) -> None:
        if recipe.run.code is not None:  # It may have changed since the run began.
            check_code(recipe, recipe.run.code)
        data = load_data(recipe, digests, folder)
        # The worker has a process of its own, so seeding the global generator affects nothing else.
        torch.manual_seed(recipe.run.seed)
        self._recipe = recipe
        self._records_logits = records_logits
        self._fetch = data.train.open().batch
        self.overlaps = data.train.overlaps
        self.model = recipe_network(recipe, data)
        training_mode(self.model, recipe.network.freeze)
        self._precision = precision(recipe.run)
        if rank:
            reseed(recipe.run.seed, rank, recipe.run.device)

    def load(self, key: tuple[int, int], indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the batch ``(x, y)`` of these samples, augmented for the epoch of the key."""
        return self._fetch(indices, key[0])

    def step(
        self, batch: tuple[Tensor, Tensor], weights: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Add the gradient of the mean loss to the parameters' gradients.

        Returns:
            The losses, float32, shape (B,). If the run records logits and there are at most
            ``KEEP_ALL`` classes, also the logits, float32, shape (B, C), and the labels, int64,
            shape (B,).
        """
        x, y = batch
        with self._precision:
            logits = self.model(x)
        losses = training_losses(logits, y, self._recipe.training)
        weighted = losses if weights is None else losses * weights.to(losses.device)
        weighted.mean().backward()
        watched = {}
        # User-defined data may have probabilities in place of labels.
        if self._records_logits and y.ndim == 1 and logits.shape[1] <= KEEP_ALL:
            watched = {"logits": logits.detach().float(), "labels": y}
        return losses.detach(), watched
