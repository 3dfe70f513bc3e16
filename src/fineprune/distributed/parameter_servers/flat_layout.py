"""All parameters of a model as one flat tensor, and which part of it each server holds."""

import hashlib
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fineprune.errors import InputError


@dataclass(frozen=True)
class FlatLayout:
    """Where each parameter lies in the flat tensor, and which part each server holds.

    The parameters follow one another in the order of ``model.parameters()``. Each keeps its memory
    format (channels last or contiguous). Server s holds the elements from
    ``s * elements // servers`` on, so that all servers hold equally many elements, plus or minus
    one. A parameter may be cut in two.

    Attributes:
        names, shapes, strides: Those of each parameter.
        dtype: The type of all parameters, float32 or float64.
        servers: The number of servers.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    strides: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    servers: int

    @property
    def offsets(self) -> tuple[int, ...]:
        """The first element of each parameter, and at the end the number of all elements."""
        offsets = [0]
        for shape in self.shapes:
            offsets.append(offsets[-1] + torch.Size(shape).numel())
        return tuple(offsets)

    @property
    def elements(self) -> int:
        """The number of all elements."""
        return self.offsets[-1]

    @property
    def contents(self) -> str:
        """The SHA-256 of the attributes, in hexadecimal: equal if and only if two layouts are."""
        return hashlib.sha256(repr(self).encode()).hexdigest()

    def part(self, server: int) -> slice:
        """Return which elements a server holds."""
        if not 0 <= server < self.servers:
            raise InputError(f"expected a server in 0..{self.servers - 1}, got {server}")
        return slice(
            server * self.elements // self.servers, (server + 1) * self.elements // self.servers
        )

    def pieces(self, server: int) -> list[int]:
        """Return the sizes of the pieces of a server's part, cut where a parameter ends.

        The optimizer gets one tensor for each piece. Its kernels treat the last few elements of a
        tensor separately and may round them differently, so a single tensor would not give the
        same bits as the model's own parameters.
        """
        part = self.part(server)
        inside = {offset for offset in self.offsets if part.start < offset < part.stop}
        cuts = sorted(inside | {part.start, part.stop})
        return [stop - start for start, stop in itertools.pairwise(cuts)]

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
        parameters = list(model.parameters())
        flat = torch.empty(self.elements, dtype=self.dtype, device=parameters[0].device)
        for view, parameter in zip(self.views(flat), parameters, strict=True):
            view.copy_(parameter.detach())
        return flat

    def load(self, model: nn.Module, flat: Tensor) -> None:
        """Copy a flat tensor of all elements into a model's parameters."""
        for view, parameter in zip(self.views(flat), model.parameters(), strict=True):
            parameter.data.copy_(view)

    def bind(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        """Move a model's parameters and gradients into two flat tensors, shape (elements,) each.

        Returns:
            The parameters, with their values, and the gradients, which are zero. From now on the
            model's own tensors are views into these; clear the gradients by
            ``gradients.zero_()``.
        """
        values = self.flat(model)
        gradients = torch.zeros_like(values)
        views = zip(model.parameters(), self.views(values), self.views(gradients), strict=True)
        for parameter, value, gradient in views:
            parameter.data = value
            parameter.grad = gradient
        return values, gradients


def flat_layout(model: nn.Module, servers: int = 1) -> FlatLayout:
    """Lay out a model's parameters over servers.

    Raises:
        InputError: The model has no parameters, parameters of several types or of a type other
            than float32 and float64, or frozen parameters; or there are more servers than elements.
    """
    named = list(model.named_parameters())
    if not named:
        raise InputError("expected a model with parameters, got one without")
    types = {p.dtype for _, p in named}
    if len(types) > 1 or not types <= {torch.float32, torch.float64}:
        given = ", ".join(sorted(str(t).removeprefix("torch.") for t in types))
        raise InputError(
            f"expected parameters of one type, float32 or float64, got {given}: convert the model"
        )
    frozen = [name for name, p in named if not p.requires_grad]
    if frozen:
        raise InputError(
            f"expected parameters that are all trained, got {frozen[0]!r} with "
            f"requires_grad=False: make it a buffer"
        )
    elements = sum(p.numel() for _, p in named)
    if not 1 <= servers <= elements:
        raise InputError(f"expected 1 to {elements} servers for as many parameters, got {servers}")
    return FlatLayout(
        names=tuple(name for name, _ in named),
        shapes=tuple(tuple(p.shape) for _, p in named),
        strides=tuple(_stride(p) for _, p in named),
        dtype=named[0][1].dtype,
        servers=servers,
    )


def _stride(parameter: Any) -> tuple[int, ...]:
    channels_last = parameter.ndim == 4 and parameter.is_contiguous(
        memory_format=torch.channels_last
    )
    if channels_last or parameter.is_contiguous():
        return tuple(parameter.stride())
    return tuple(torch.empty(parameter.shape, device="meta").stride())
