"""Prefixes of parameter names, with which a recipe names parts of a network, and freezes them.

A prefix consists of whole parts of a name: ``layer1`` covers ``layer1.0.conv1.weight``, but not
``layer10.weight``.
"""

import difflib
from collections.abc import Iterable, Sequence

from torch import nn

# All batch normalisations, which have no public base class.
from torch.nn.modules.batchnorm import _BatchNorm

from fineprune.errors import InputError


def covers(prefix: str, name: str) -> bool:
    """Return whether a prefix covers the name of a parameter or a module."""
    return f"{name}.".startswith(f"{prefix}.")


def check_prefixes(setting: str, prefixes: Iterable[str], names: Sequence[str]) -> None:
    """Check that each prefix covers a parameter."""
    for prefix in prefixes:
        if not any(covers(prefix, name) for name in names):
            parts = [name.split(".") for name in names]
            starts = [".".join(part[:n]) for part in parts for n in range(1, len(part) + 1)]
            near = difflib.get_close_matches(prefix, starts, n=1, cutoff=0.0)[0]
            raise InputError(
                f"expected {setting} to name parameters of the network by their first parts, got "
                f"{prefix!r}: did you mean {near!r}?"
            )


def freeze(network: nn.Module, prefixes: Sequence[str]) -> None:
    """Let the parameters that the prefixes cover have no gradients."""
    named = list(network.named_parameters())
    check_prefixes("network.freeze", prefixes, [name for name, _ in named])
    for name, parameter in named:
        if any(covers(prefix, name) for prefix in prefixes):
            parameter.requires_grad_(False)


def training_mode(network: nn.Module, prefixes: Sequence[str]) -> None:
    """Put a network into training mode, except for its frozen batch normalisations.

    A batch normalisation that a prefix covers stays in evaluation mode: it normalises by its
    running statistics, which do not change.
    """
    network.train()
    for name, module in network.named_modules():
        if isinstance(module, _BatchNorm) and any(covers(prefix, name) for prefix in prefixes):
            module.eval()
