"""The layout of a model's parameters in one flat tensor, and the part that each server holds.

Frozen parameters, those with ``requires_grad=False``, are not in the flat tensor. Servers do not
hold them, and they are handled like buffers.
"""

import itertools
import math
from dataclasses import dataclass

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

    The trained parameters follow one another in the order of ``model.parameters()``, each in its
    memory format (channels last or contiguous). A parameter may be divided between servers. The
    type is float32 or float64.
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

    def part(self, server: int) -> slice:
        """Return the range of elements that a server holds."""
        return slice(self._cut(server), self._cut(server + 1))

    def _cut(self, server: int) -> int:
        """Return where the part of a server begins."""
        place = server * self.elements // self.servers
        aligned = _ALIGNED if self.elements >= 2 * _ALIGNED * self.servers else 1
        start = max(offset for offset in self.offsets if offset <= place)
        return place - (place - start) % aligned

    def pieces(self, server: int) -> list[tuple[str, int]]:
        """Return the pieces of a server's part: the name of each parameter in it, and the size.

        One large tensor would not give the same bits in the optimizer as the model's parameters.
        """
        part = self.part(server)
        bounds = zip(self.names, itertools.pairwise(self.offsets), strict=True)
        sizes = [
            (name, min(end, part.stop) - max(start, part.start)) for name, (start, end) in bounds
        ]
        return [(name, size) for name, size in sizes if size > 0]

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the parameters as views into a flat tensor of all elements."""
        places = zip(self.shapes, self.strides, self.offsets[:-1], strict=True)
        return [torch.as_strided(flat, *place) for place in places]

    def flat(self, model: nn.Module) -> Tensor:
        """Return a flat copy of a model's parameters, shape (elements,), on the same device."""
        parameters = trained_parameters(model)
        flat = torch.empty(self.elements, dtype=self.dtype, device=parameters[0].device)
        for view, parameter in zip(self.views(flat), parameters, strict=True):
            view.copy_(parameter.detach())
        return flat

    def load(self, model: nn.Module, flat: Tensor) -> None:
        """Copy a flat tensor of all elements into a model's parameters."""
        for view, parameter in zip(self.views(flat), trained_parameters(model), strict=True):
            parameter.data.copy_(view)

    def bind(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        """Move a model's parameters and gradients, which become zero, into two flat tensors.

        The model's own tensors become views into these, which have the shape (elements,).
        """
        values = self.flat(model)
        gradients = torch.zeros_like(values)
        views = zip(self.views(values), self.views(gradients), strict=True)
        for parameter, view in zip(trained_parameters(model), views, strict=True):
            parameter.data, parameter.grad = view
        return values, gradients


def flat_layout(model: nn.Module, servers: int = 1) -> FlatLayout:
    """Return the layout of a model's trained parameters on a number of servers.

    Raises:
        InputError: The model has no parameters to train, fewer than servers, or of other types.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
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


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are not frozen."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _stride(parameter: Tensor) -> tuple[int, ...]:
    channels_last = parameter.ndim == 4 and parameter.is_contiguous(
        memory_format=torch.channels_last
    )
    if channels_last or parameter.is_contiguous():
        return parameter.stride()
    return torch.empty(parameter.shape, device="meta").stride()
