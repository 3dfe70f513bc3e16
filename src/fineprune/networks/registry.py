"""Build a network by its name: built in, from timm or torchvision, or the user's own."""

import importlib
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from fineprune.errors import InputError, check_one_of, explaining
from fineprune.importing import call_attribute, imported
from fineprune.networks.lenet import LeNet
from fineprune.networks.resnet import BasicBlock, Bottleneck, ImageNetResNet, ResNet
from fineprune.networks.resnet9 import ResNet9
from fineprune.networks.vgg import VGG
from fineprune.networks.wide_resnet import WideResNet

# Each is called with the number of classes and of channels.
NETWORKS: dict[str, Callable[[int, int], nn.Module]] = {
    "lenet": LeNet,
    "resnet9": ResNet9,
    "resnet9-wide": partial(ResNet9, width=64),
    "vgg13": partial(VGG, 13),
    "vgg16": partial(VGG, 16),
    "vgg19": partial(VGG, 19),
    "resnet18": partial(ResNet, BasicBlock, (2, 2, 2)),
    "resnet34": partial(ResNet, BasicBlock, (3, 4, 6)),
    "resnet50": partial(ResNet, Bottleneck, (3, 4, 6)),
    "wrn10": partial(WideResNet, 10),
    "wrn16": partial(WideResNet, 16),
    "wrn22": partial(WideResNet, 22),
    "imagenet-resnet18": partial(ImageNetResNet, BasicBlock, (2, 2, 2, 2)),
    "imagenet-resnet34": partial(ImageNetResNet, BasicBlock, (3, 4, 6, 3)),
    "imagenet-resnet50": partial(ImageNetResNet, Bottleneck, (3, 4, 6, 3)),
    "imagenet-resnet101": partial(ImageNetResNet, Bottleneck, (3, 4, 23, 3)),
}

_LIBRARIES = {"timm": ("timm", "create_model"), "torchvision": ("torchvision.models", "get_model")}


def build_network(name: str, classes: int, channels: int) -> nn.Module:
    """Build a network with initial weights drawn from torch's current random state.

    Args:
        name: One of ``NETWORKS``; ``timm:NAME`` or ``torchvision:NAME``, a model of that library,
            which must be installed; or ``module:attribute``, a class or function of the user's own
            that is called with the keyword arguments ``classes`` and ``channels``. An exception in
            the user's own code is passed on unchanged.
        classes: The number of classes.
        channels: The number of channels of the images. Models of torchvision accept 3 only.
    """
    library, colon, _ = name.partition(":")
    if not colon:
        check_one_of("network.name", name, tuple(NETWORKS))
        return NETWORKS[name](classes, channels)
    if library == "timm":
        return _built_by_library(name, num_classes=classes, in_chans=channels)
    if library == "torchvision":
        if channels != 3:
            raise InputError(f"expected images of 3 channels for {name}, got {channels}")
        return _built_by_library(name, num_classes=classes)
    if isinstance(imported(name), nn.Module):
        raise InputError(
            f"expected {name!r} to be a class or a function that makes a network, got a network: "
            f"return it from a function"
        )
    own = call_attribute(name, "a network", classes=classes, channels=channels)
    return _checked(name, own)


def _built_by_library(name: str, **values: Any) -> nn.Module:
    library, _, model = name.partition(":")
    module, function = _LIBRARIES[library]
    # A library built for another torch raises more than ImportError.
    with explaining(f"expected {library} to be installed for network.name {name!r}", Exception):
        create: Callable[..., Any] = getattr(importlib.import_module(module), function)
    called = ", ".join(f"{key}={value}" for key, value in values.items())
    expected = f"expected {name!r} to make a network when called with {called}"
    # For unknown names, timm raises RuntimeError.
    with explaining(expected, (TypeError, ValueError, RuntimeError)):
        return _checked(name, create(model, **values))


def _checked(name: str, network: Any) -> nn.Module:
    if not isinstance(network, nn.Module):
        raise InputError(
            f"expected {name!r} to make a torch.nn.Module, got {type(network).__name__}"
        )
    if any(map(is_lazy, itertools.chain(network.parameters(), network.buffers()))):
        raise InputError(
            f"expected {name!r} to make a network whose layers have sizes, got lazy layers: call "
            f"it once before it is returned"
        )
    return network
