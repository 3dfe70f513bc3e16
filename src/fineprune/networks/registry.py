"""Build a network by its name."""

from collections.abc import Callable

from torch import nn

from fineprune.networks.lenet import LeNet

NETWORKS: dict[str, Callable[[int, int], nn.Module]] = {"lenet": LeNet}


def build_network(name: str, classes: int, channels: int) -> nn.Module:
    """Build a network with freshly drawn weights, from torch's current random state.

    Args:
        name: one of ``NETWORKS``.
        classes: number of classes.
        channels: channels of the images.

    Raises:
        ValueError: the name is not known.
    """
    if name not in NETWORKS:
        raise ValueError(f"expected network.name to be one of {', '.join(NETWORKS)}, got {name!r}")
    return NETWORKS[name](classes, channels)
