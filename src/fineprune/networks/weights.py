"""Pretrained weights, read from a file into a network that is already built."""

import hashlib
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fineprune.errors import InputError, check_installed, explaining

SUFFIXES = (".pth", ".pt", ".safetensors")

# The keys under which checkpoints hold the state dict of a network. ``fineprune`` uses "model".
_WRAPPED = ("state_dict", "model", "model_state_dict")

# The prefix that ``DataParallel`` and ``DistributedDataParallel`` give to every name.
_REPLICATED = "module."

# The number of wrong keys that an error names.
_NAMED = 3


class LoadedWeights(NamedTuple):
    """What was read from a file of weights.

    Attributes:
        digest: The SHA-256 digest of the file, in hexadecimal.
        new_head: The name of the last linear layer if it was left as initialised, because the file
            has another number of classes; None if all weights were loaded.
        classes: The number of classes of the file's last layer; None if all weights were loaded.
    """

    digest: str
    new_head: str | None
    classes: int | None


def weights_digest(path: Path) -> str:
    """Return the SHA-256 digest of a file of weights, in hexadecimal."""
    with explaining(f"expected weights in {path}, cannot read them"), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_weights(network: nn.Module, path: Path, classes: int) -> LoadedWeights:
    """Load the weights of a file into a network.

    The file holds a state dict, or a checkpoint that contains one under ``state_dict``, ``model``
    or ``model_state_dict``, such as one of ``fineprune train``, whose moving average is not used.
    The names must be those of the network, with or without a leading ``module.``; the counters of
    batch normalisations (``num_batches_tracked``) may be missing. If the last linear layer has
    another number of classes, the network's own is left as it is.

    Args:
        network: The network, which is changed in place. Its types and devices stay the same.
        path: A file of ``torch.save`` (.pth or .pt), which is read with ``weights_only=True``, or a
            .safetensors file, which needs the package of this name.
        classes: The number of classes of the network, by which its last linear layer is found.
    """
    # For damaged files, torch raises many types of exceptions.
    cannot_read = explaining(f"expected weights in {path}, cannot read them", Exception)
    with cannot_read, path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(0)
        if path.suffix == ".safetensors":
            needed = f"the package safetensors to read {path}"
            check_installed("safetensors", needed, "safetensors")
            content = importlib.import_module("safetensors.torch").load(file.read())
        else:
            content = torch.load(file, map_location="cpu", weights_only=True)
    given = _state_dict(content, path)
    own = network.state_dict()
    heads = [
        name
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) and module.out_features == classes
    ]
    new_head = None
    if heads and _other_classes(given.get(f"{heads[-1]}.weight"), own[f"{heads[-1]}.weight"]):
        new_head = heads[-1]
        found = len(given[f"{new_head}.weight"])
        for name in (f"{new_head}.weight", f"{new_head}.bias"):
            if name in own and _other_classes(given.get(name), own[name]):
                given[name] = own[name]
    _check_same(own, given, path)
    network.load_state_dict({**own, **given})
    return LoadedWeights(digest, new_head, None if new_head is None else found)


def _state_dict(content: Any, path: Path) -> dict[str, Tensor]:
    """Return the state dict that a file holds, without the prefix of replicated networks."""
    if isinstance(content, Mapping):
        wrapped = (content[key] for key in _WRAPPED if isinstance(content.get(key), Mapping))
        content = next(wrapped, content)
    if not isinstance(content, Mapping) or not content:
        given = "an empty one" if isinstance(content, Mapping) else type(content).__name__
        raise InputError(
            f"expected a state dict, which maps names to tensors, in {path}, got {given}"
        )
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise InputError(
                f"expected a state dict, which maps names to tensors, in {path}, got {name!r} with "
                f"a value of type {type(value).__name__}"
            )
    if all(name.startswith(_REPLICATED) for name in content):
        return {name.removeprefix(_REPLICATED): value for name, value in content.items()}
    return dict(content)


def _other_classes(given: Tensor | None, own: Tensor) -> bool:
    """Return whether two tensors differ in their first dimension only."""
    return (
        given is not None
        and given.ndim == own.ndim > 0
        and given.shape[1:] == own.shape[1:]
        and len(given) != len(own)
    )


def _check_same(own: Mapping[str, Tensor], given: Mapping[str, Tensor], path: Path) -> None:
    """Raise InputError unless the names and shapes of a file are those of the network."""
    wrong = [
        f"no {name}"
        for name in own
        if name not in given and not name.endswith(".num_batches_tracked")
    ]
    wrong += [f"unknown {name}" for name in given if name not in own]
    wrong += [
        f"{name} of shape {tuple(value.shape)} instead of {tuple(own[name].shape)}"
        for name, value in given.items()
        if name in own and value.shape != own[name].shape
    ]
    if wrong:
        more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        raise InputError(
            f"expected the weights of this network in {path}, got {', '.join(wrong[:_NAMED])}"
            f"{more}: set network.name to the network that they were trained with"
        )
