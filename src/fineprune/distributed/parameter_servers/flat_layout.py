"""The layout of a model's parameters in one flat tensor, and the part that each server holds.

Frozen parameters, those with ``requires_grad=False``, are not in the flat tensor. Servers do not
hold them, and they are handled like buffers.
"""

import hashlib
import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fineprune.errors import InputError

# A parameter is divided at a multiple of so many elements. Optimizer kernels process the last few
# elements of a tensor, fewer than a register holds, separately and may round them differently, so
# that other pieces would not give the same bits as the parameters of the model.
_ALIGNED = 64


@dataclass(frozen=True)
class FlatLayout:
    """The position of each parameter in the flat tensor, and the part that each server holds.

    The trained parameters follow one another in the order of ``model.parameters()``. Each keeps its
    memory format (channels last or contiguous). Server s holds the elements from about
    ``s * elements // servers`` on. A parameter may be divided between servers.

    Attributes:
        names, shapes, strides: The name, shape and strides of each trained parameter.
        dtype: The type of these parameters, float32 or float64.
        servers: The number of servers.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    strides: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    servers: int

    @property
    def offsets(self) -> tuple[int, ...]:
        """The position of the first element of each parameter, followed by ``elements``."""
        return tuple(itertools.accumulate(map(math.prod, self.shapes), initial=0))

    @property
    def elements(self) -> int:
        """The number of elements of all parameters together."""
        return self.offsets[-1]

    @property
    def contents(self) -> str:
        """The SHA-256 of the attributes, in hexadecimal, which identifies the layout."""
        return hashlib.sha256(repr(self).encode()).hexdigest()

    def part(self, server: int) -> slice:
        """Return the range of elements that a server holds."""
        if not 0 <= server < self.servers:
            raise InputError(f"expected a server in 0..{self.servers - 1}, got {server}")
        return slice(self._cut(server), self._cut(server + 1))

    def _cut(self, server: int) -> int:
        """Return where the part of a server begins."""
        place = server * self.elements // self.servers
        aligned = _ALIGNED if self.elements >= 2 * _ALIGNED * self.servers else 1
        start = max(offset for offset in self.offsets if offset <= place)
        return place - (place - start) % aligned

    def pieces(self, server: int) -> list[tuple[str, int]]:
        """Return the pieces of a server's part: the name of each parameter in it, and the size.

        The optimizer gets one tensor per piece, because one large tensor would not give the same
        bits as the parameters of the model.
        """
        part = self.part(server)
        sizes = [
            (name, min(stop, part.stop) - max(start, part.start))
            for name, (start, stop) in zip(
                self.names, itertools.pairwise(self.offsets), strict=True
            )
        ]
        return [(name, size) for name, size in sizes if size > 0]

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the parameters as views into a flat tensor of all elements."""
        return [
            torch.as_strided(flat, shape, stride, offset)
            for shape, stride, offset in zip(
                self.shapes, self.strides, self.offsets[:-1], strict=True
            )
        ]

    def flat(self, model: nn.Module) -> Tensor:
        """Return a flat copy of a model's parameters, shape (elements,), on the same device."""
        parameters = [parameter for _, parameter in trained_parameters(model)]
        flat = torch.empty(self.elements, dtype=self.dtype, device=parameters[0].device)
        for view, parameter in zip(self.views(flat), parameters, strict=True):
            view.copy_(parameter.detach())
        return flat

    def load(self, model: nn.Module, flat: Tensor) -> None:
        """Copy a flat tensor of all elements into a model's parameters."""
        for view, (_, parameter) in zip(self.views(flat), trained_parameters(model), strict=True):
            parameter.data.copy_(view)

    def bind(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        """Move a model's parameters and gradients into two flat tensors, shape (elements,) each.

        Returns:
            The parameters, with their values, and the gradients, which are zero. The model's own
            tensors are views into these two. Clear the gradients with ``gradients.zero_()``.
        """
        values = self.flat(model)
        gradients = torch.zeros_like(values)
        views = zip(
            trained_parameters(model), self.views(values), self.views(gradients), strict=True
        )
        for (_, parameter), value, gradient in views:
            parameter.data = value
            parameter.grad = gradient
        return values, gradients


def flat_layout(model: nn.Module, servers: int = 1) -> FlatLayout:
    """Return the layout of a model's trained parameters on a number of servers."""
    named = trained_parameters(model)
    if not named:
        raise InputError("expected a model with parameters to train, got one without")
    types = {p.dtype for _, p in named}
    if len(types) > 1 or not types <= {torch.float32, torch.float64}:
        given = ", ".join(sorted(str(t).removeprefix("torch.") for t in types))
        raise InputError(
            f"expected parameters of one type, float32 or float64, got {given}: convert the model"
        )
    elements = sum(p.numel() for _, p in named)
    if not 1 <= servers <= elements:
        raise InputError(
            f"expected 1 to {elements} servers for {elements} parameters, got {servers}"
        )
    return FlatLayout(
        names=tuple(name for name, _ in named),
        shapes=tuple(tuple(p.shape) for _, p in named),
        strides=tuple(_stride(p) for _, p in named),
        dtype=named[0][1].dtype,
        servers=servers,
    )


def not_served(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that servers do not hold: a model's buffers and frozen parameters."""
    frozen = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    return {**dict(model.named_buffers()), **frozen}


def trained_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that are not frozen, each with its name."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def _stride(parameter: Any) -> tuple[int, ...]:
    channels_last = parameter.ndim == 4 and parameter.is_contiguous(
        memory_format=torch.channels_last
    )
    if channels_last or parameter.is_contiguous():
        return tuple(parameter.stride())
    return tuple(torch.empty(parameter.shape, device="meta").stride())
