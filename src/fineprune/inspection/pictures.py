"""The pictures and class names of a run, and what its trained network makes of the pictures."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from fineprune.errors import InputError
from fineprune.runs.files import CHECKPOINT
from fineprune.runs.run import Run
from fineprune.runs.training_set import read_training_set
from fineprune.training.checkpoint import load_checkpoint
from fineprune.training.data import Data, load_data
from fineprune.training.data.source import EvaluationBatches
from fineprune.training.evaluate import evaluated_logits
from fineprune.training.network import precision, recipe_network
from fineprune.training.recipe import make_recipe

# Nearest neighbours are searched for this many pictures at once, which limits the memory.
_CHUNK = 256


@dataclass(frozen=True, eq=False)
class Outputs:
    """What the trained network computes for the training pictures, without augmentation.

    Attributes:
        predictions: The predicted class of each picture; int64, shape (N,).
        confidences: The probability of this class; float32, shape (N,).
        features: The input of the last linear layer, of unit length; float32, shape (N, features).
            None if the network has no linear layer.
    """

    predictions: npt.NDArray[np.int64]
    confidences: npt.NDArray[np.float32]
    features: npt.NDArray[np.float32] | None


def pictures_of(run: Run) -> Data:
    """Load the training pictures of a run."""
    recipe = make_recipe(run.recipe)
    if recipe.data.name == "images":
        raise InputError("expected data in memory to pass through the network, got image files")
    if recipe.data.own:
        raise InputError(
            f"expected built-in data to pass through the network, got {recipe.data.name!r}"
        )
    # Reading a run fetches nothing, and needs no other run to know what it left out.
    device = "cuda" if torch.cuda.is_available() else "cpu"
    recipe = recipe.replaced("run", device=device)
    loaded = load_data(recipe.replaced("data", download=False, without=None))
    if recipe.data.without is None:
        return loaded
    trained = read_training_set(run.path, run.summary.train_samples).index
    kept = np.flatnonzero(np.isin(loaded.weak.index, trained))
    if len(kept) != len(trained):
        raise InputError("the data or their labels have changed since the training")
    return loaded.only(kept)


def image_of(picture: npt.NDArray[np.uint8]) -> Image.Image:
    """Return a picture of shape (1 or 3, height, width) as an image of Pillow."""
    pixels = picture[0] if len(picture) == 1 else picture.transpose(1, 2, 0)
    return Image.fromarray(np.ascontiguousarray(pixels))


def outputs_of(run: Run, loaded: Data, *, own_code: bool = False) -> Outputs:
    """Pass the training pictures of a run through its trained network.

    Args:
        run: The run.
        loaded: Its pictures.
        own_code: Whether the code of a user-defined network may be run.
    """
    path = run.path / CHECKPOINT
    if not path.exists():
        raise InputError(f"expected the trained network in {path}, found no file")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    recipe = make_recipe(run.recipe).replaced("run", device=device, compile="off")
    if recipe.network.own and not own_code:
        raise InputError(
            f"expected --own-data to pass samples through {recipe.network.name!r}, which runs its "
            f"code, got none"
        )
    # Building the network draws random weights, which must not change the caller's random numbers.
    with torch.random.fork_rng(devices=[]):
        model = recipe_network(recipe, loaded)
    state = load_checkpoint(path)
    average = state.get("average")  # If there is one, it was evaluated.
    try:
        model.load_state_dict(state["model"] if average is None else average["network"])
    except (KeyError, RuntimeError) as error:
        raise InputError(
            f"expected the weights of {recipe.network.name!r} in {path}, got others: inspect the "
            f"run as it was trained, or pass --no-network"
        ) from error
    plain = loaded.train.plain(loaded.train)
    batches = EvaluationBatches(plain, plain.open())
    features: list[torch.Tensor] = []
    for layer in [module for module in model.modules() if isinstance(module, nn.Linear)][-1:]:
        layer.register_forward_pre_hook(
            lambda _, inputs: features.append(F.normalize(inputs[0].float(), dim=1).cpu())
        )
    predictions, confidences = [], []
    for logits, _ in evaluated_logits(model, batches, device, precision(recipe.run)):
        confidence, prediction = logits.softmax(1).max(1)
        predictions.append(prediction.cpu())
        confidences.append(confidence.cpu())
    return Outputs(
        torch.cat(predictions).numpy(),
        torch.cat(confidences).numpy(),
        torch.cat(features).numpy() if features else None,
    )


def neighbours(
    features: npt.NDArray[np.float32], index: npt.NDArray[np.int64], number: int = 5
) -> npt.NDArray[np.int64]:
    """Return the nearest other samples in the network's last features.

    Args:
        features: Features of unit length; float32, shape (N, features).
        index: The samples whose neighbours are wanted; int64, shape (n,).
        number: How many neighbours to return.

    Returns:
        The indices of the neighbours, the nearest first; int64, shape (n, min(number, N - 1)).
    """
    everything = torch.from_numpy(features)
    number = min(number, len(features) - 1)
    found = []
    for part in torch.from_numpy(index).split(_CHUNK):
        closeness = everything[part] @ everything.T
        closeness[torch.arange(len(part)), part] = -torch.inf
        found.append(closeness.topk(number, dim=1).indices)
    return torch.cat(found).numpy() if found else np.empty((0, number), np.int64)
