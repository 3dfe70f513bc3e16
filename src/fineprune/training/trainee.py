"""What a worker of a parameter server trains: a recipe's network on the batches it is told."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fineprune.networks.registry import build_network
from fineprune.training.data import load_data
from fineprune.training.random_state import reseed
from fineprune.training.recipe import Recipe


class RecipeTrainee:
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
        self.model = build_network(recipe.network.name, data.classes, data.channels)
        self.model.to(recipe.run.device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.model.train()
        if rank:
            reseed(recipe.run.seed, rank, recipe.run.device)

    def load(self, key: tuple[int, int], indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the samples of ``indices`` as the key's epoch augments them."""
        return self._fetch(indices, key[0])

    def step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Add the gradient of the mean loss, and return the losses, shape (B,)."""
        x, y = batch
        run = self._recipe.run
        with torch.autocast(
            run.device.partition(":")[0], torch.bfloat16, enabled=run.precision == "bfloat16"
        ):
            logits = self.model(x)
        smoothing = self._recipe.training.label_smoothing
        losses = F.cross_entropy(logits.float(), y, reduction="none", label_smoothing=smoothing)
        losses.mean().backward()  # type: ignore[no-untyped-call]
        return losses.detach()
