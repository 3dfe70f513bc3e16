"""Build a network by its name: ours, timm's, torchvision's, or a module of the user's own."""

import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

from fineprune.errors import InputError
from fineprune.importing import import_attribute
from fineprune.networks.lenet import LeNet
from fineprune.networks.resnet import resnet18, resnet34, resnet50
from fineprune.networks.vgg import vgg13, vgg16, vgg19
from fineprune.networks.wide_resnet import wrn10, wrn16, wrn22

NETWORKS: dict[str, Callable[[int, int], nn.Module]] = {
    "lenet": LeNet,
    "vgg13": vgg13,
    "vgg16": vgg16,
    "vgg19": vgg19,
    "resnet18": resnet18,
    "resnet34": resnet34,
    "resnet50": resnet50,
    "wrn10": wrn10,
    "wrn16": wrn16,
    "wrn22": wrn22,
}


def build_network(name: str, classes: int, channels: int) -> nn.Module:
    """Build a network with freshly drawn weights, from torch's current random state.

    Args:
        name: one of ``NETWORKS``; ``timm:NAME`` or ``torchvision:NAME``, a model of that library,
            which must be installed; or ``module:attribute``, a class or function of your own that
            is called with the keywords ``classes`` and ``channels``.
        classes: number of classes.
        channels: channels of the images. torchvision's models take 3.

    Raises:
        InputError: the name is not known, its library is not installed, or it does not make a
            network of so many classes and channels.
    """
    library, colon, model = name.partition(":")
    if not colon:
        if name not in NETWORKS:
            raise InputError(
                f"expected network.name to be one of {', '.join(NETWORKS)}, got {name!r}"
            )
        return NETWORKS[name](classes, channels)
    if library == "timm":
        return _built(name, _library(name), model, num_classes=classes, in_chans=channels)
    if library == "torchvision":
        if channels != 3:
            raise InputError(f"expected images of 3 channels for {name}, got {channels}")
        return _built(name, _library(name), model, num_classes=classes)
    return _built(name, import_attribute(name), classes=classes, channels=channels)


def _library(name: str) -> Callable[..., Any]:
    library = name.partition(":")[0]
    try:
        if library == "timm":
            create: Callable[..., Any] = importlib.import_module("timm").create_model
        else:
            create = importlib.import_module("torchvision.models").get_model
    except Exception as error:  # a build for another torch fails with other errors than ImportError
        reason = str(error).splitlines()[0]
        raise InputError(
            f"expected {library} to be installed for network.name {name!r}: {reason}"
        ) from error
    return create


def _built(name: str, make: Callable[..., Any], *args: Any, **values: Any) -> nn.Module:
    try:
        network = make(*args, **values)
    except (TypeError, ValueError, RuntimeError) as error:  # timm raises RuntimeError for a name
        given = ", ".join(f"{key}={value}" for key, value in values.items())
        raise InputError(
            f"expected {name!r} to make a network when called with {given}: {error}"
        ) from error
    if not isinstance(network, nn.Module):
        raise InputError(
            f"expected {name!r} to make a torch.nn.Module, got {type(network).__name__}"
        )
    return network
