"""The network of a recipe, its precision and its losses, which are the same in every process."""

import difflib
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# All batch normalisations, which have no public base class.
from torch.nn.modules.batchnorm import _BatchNorm

from fineprune.errors import InputError, first_line
from fineprune.networks.registry import build_network
from fineprune.training.data import Data
from fineprune.training.random_state import random_state, set_random_state
from fineprune.training.recipe import Recipe
from fineprune.training.settings import RunSettings, TrainingSettings


def recipe_network(recipe: Recipe, data: Data) -> nn.Module:
    """Build the network of a recipe on its device, from torch's current random state."""
    model = build_network(recipe.network.name, data.classes, data.blank.shape[1])
    model.to(recipe.run.device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    _check_fit(model, recipe, data)
    freeze(model, recipe.network.freeze)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError(
            f"expected network.name {recipe.network.name!r} to have parameters to train, got none "
            f"with network.freeze = {list(recipe.network.freeze)}: leave some of them unfrozen"
        )
    return model


def freeze(network: nn.Module, prefixes: Sequence[str]) -> None:
    """Let the parameters that the prefixes cover have no gradients.

    A prefix consists of whole parts of a name: ``layer1`` covers ``layer1.0.conv1.weight``, but not
    ``layer10.weight``.

    Raises:
        InputError: A prefix covers no parameter.
    """
    named = dict(network.named_parameters())
    for prefix in prefixes:
        covered = [parameter for name, parameter in named.items() if _covers(prefix, name)]
        if not covered:
            parts = [name.split(".") for name in named]
            starts = [".".join(part[:n]) for part in parts for n in range(1, len(part) + 1)]
            near = difflib.get_close_matches(prefix, starts, n=1, cutoff=0.0)[0]
            raise InputError(
                f"expected network.freeze to name parameters of the network by their first parts, "
                f"got {prefix!r}: did you mean {near!r}?"
            )
        for parameter in covered:
            parameter.requires_grad_(False)


def training_mode(network: nn.Module, prefixes: Sequence[str]) -> None:
    """Put a network into training mode, except for its frozen batch normalisations.

    One that a prefix covers normalises by its running statistics, which do not change.
    """
    network.train()
    for name, module in network.named_modules():
        if isinstance(module, _BatchNorm) and any(_covers(prefix, name) for prefix in prefixes):
            module.eval()


def _covers(prefix: str, name: str) -> bool:
    return f"{name}.".startswith(f"{prefix}.")


def _check_fit(model: nn.Module, recipe: Recipe, data: Data) -> None:
    """Call a network once, without changing its state, to check that it fits the data."""
    name, shape = recipe.network.name, tuple(data.blank.shape[1:])
    before = random_state(recipe.run.device)
    model.eval()
    try:
        with torch.no_grad():
            logits = model(data.blank.to(recipe.run.device))
    except (RuntimeError, ValueError) as error:
        if recipe.network.own or isinstance(error, torch.OutOfMemoryError):
            # The traceback shows the user the place in the code. A full GPU is not a wrong input.
            raise
        reason = first_line(error) or type(error).__name__
        other = " or data.image_size" if recipe.data.name in ("images", "synthetic") else ""
        if data.blank.dtype != torch.float32:
            other = f", or convert the samples, which are {data.blank.dtype}, to float32"
        raise InputError(
            f"expected a network for samples of shape {shape}, got network.name {name!r}, which "
            f"fails on them: {reason}: set another network.name{other}"
        ) from error
    finally:
        model.train()
        set_random_state(before, recipe.run.device)
    given = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    if not isinstance(given, tuple) or len(given) != 2 or given[1] < data.classes:
        raise InputError(
            f"expected logits of shape (1, {data.classes}) from network.name {name!r} for one "
            f"sample of shape {shape}, got {given}"
        )


def precision(run: RunSettings) -> torch.autocast:
    """Return the autocast context in which a run calls its network."""
    bfloat16 = run.precision == "bfloat16"
    return torch.autocast(run.device.partition(":")[0], dtype=torch.bfloat16, enabled=bfloat16)


def training_losses(logits: Tensor, y: Tensor, training: TrainingSettings) -> Tensor:
    """Return the cross-entropy of each sample in nats, with the recipe's label smoothing.

    It is float32 of shape (B,), of logits of shape (B, classes) and labels of shape (B,).
    """
    return F.cross_entropy(
        logits.float(), y, reduction="none", label_smoothing=training.label_smoothing
    )
