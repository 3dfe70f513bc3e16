"""What a worker of a parameter server trains: a recipe's network on the batches it is told."""

import torch
from torch import Tensor

from fineprune.training.data import load_data
from fineprune.training.network import precision, recipe_network, training_losses
from fineprune.training.random_state import reseed
from fineprune.training.recipe import Recipe


class RecipeReplica:
    """A replica of a recipe's network, with the data to train it on.

    Args:
        recipe: as run, nothing "auto" left in it.
        rank: of the worker. All have the same weights; what is drawn while training differs.
    """

    def __init__(self, recipe: Recipe, rank: int) -> None:
        # The process is the worker's own, and with it torch's random state.
        torch.manual_seed(recipe.run.seed)
        data = load_data(recipe)
        self._recipe = recipe
        self._fetch = data.make_fetch()
        self.model = recipe_network(recipe, data)
        self.model.train()
        self._precision = precision(recipe.run)
        if rank:
            reseed(recipe.run.seed, rank, recipe.run.device)

    def load(self, key: tuple[int, int], indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the samples of ``indices`` as the key's epoch augments them."""
        return self._fetch(indices, key[0])

    def step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Add the gradient of the mean loss, and return the losses, shape (B,)."""
        x, y = batch
        with self._precision:
            logits = self.model(x)
        losses = training_losses(logits, y, self._recipe.training)
        losses.mean().backward()  # type: ignore[no-untyped-call]
        return losses.detach()
