"""The network of a recipe, its precision and its losses, which are the same in every process."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fineprune.networks.registry import build_network
from fineprune.training.data import Data
from fineprune.training.recipe import Recipe
from fineprune.training.settings import RunSettings, TrainingSettings


def recipe_network(recipe: Recipe, data: Data) -> nn.Module:
    """Build a recipe's network for its data on its device, from torch's current random state."""
    model = build_network(recipe.network.name, data.classes, data.channels)
    return model.to(recipe.run.device).to(memory_format=torch.channels_last)  # type: ignore[no-any-return, call-overload]


def precision(run: RunSettings) -> torch.autocast:
    """Return the autocast context in which a run calls its network."""
    return torch.autocast(
        run.device.partition(":")[0],
        dtype=torch.bfloat16,
        enabled=run.precision == "bfloat16",
    )


def training_losses(logits: Tensor, y: Tensor, training: TrainingSettings) -> Tensor:
    """Return the cross-entropy of each sample in nats; float32, shape (B,).

    Args:
        logits: The output of the network; floating point, shape (B, classes).
        y: The labels; int64, shape (B,).
        training: The training section of the recipe, which sets the label smoothing.
    """
    return F.cross_entropy(
        logits.float(), y, reduction="none", label_smoothing=training.label_smoothing
    )
