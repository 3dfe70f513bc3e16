"""Freezing: parts of a network that keep their weights while the others are trained."""

from collections.abc import Sequence

from torch import nn

# All batch normalisations, which have no public base class.
from torch.nn.modules.batchnorm import _BatchNorm

from fineprune.distributed.parameter_servers.flat_layout import trained_parameters
from fineprune.errors import InputError
from fineprune.training.prefixes import check_prefixes, covers


def freeze(network: nn.Module, prefixes: Sequence[str]) -> None:
    """Let the parameters that the prefixes cover have no gradients."""
    named = list(network.named_parameters())
    check_prefixes("network.freeze", prefixes, [name for name, _ in named])
    for name, parameter in named:
        if any(covers(prefix, name) for prefix in prefixes):
            parameter.requires_grad_(False)
    if prefixes and not trained_parameters(network):
        raise InputError(
            f"expected network.freeze to leave parameters to train, got {list(prefixes)}, which "
            f"cover all {len(named)} of them"
        )


def training_mode(network: nn.Module, prefixes: Sequence[str]) -> None:
    """Put a network into training mode, except for its frozen batch normalisations.

    A batch normalisation that a prefix covers stays in evaluation mode: it normalises by its
    running statistics, which do not change.
    """
    network.train()
    for name, module in network.named_modules():
        if isinstance(module, _BatchNorm) and any(covers(prefix, name) for prefix in prefixes):
            module.eval()
