"""A worker: a Ray actor with one replica of the model, which computes gradients of batches.

The path of a gradient: the driver calls ``Worker.step`` with the servers' parameters; the backward
pass writes into a flat tensor, of which each server gets its part. The driver hands these to
``Server.update`` without having received them, those of a group first to ``Worker.average``.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fineprune.distributed.parameter_servers.epoch import BatchKey, Stepped
from fineprune.distributed.parameter_servers.failures import told_as_text
from fineprune.distributed.parameter_servers.flat_layout import flat_layout, not_served
from fineprune.distributed.parameter_servers.processes import Started
from fineprune.distributed.parameter_servers.server import Actor, weighted_sum
from fineprune.distributed.strategy import Strategy

Array = npt.NDArray[Any]
Arrays = dict[str, Array]


class Replica(Protocol):
    """What a worker trains. The function ``build(rank)``, given to the driver, makes it.

    No method is called in the main thread of the process. ``load`` is called in another thread than
    ``step``, while a step is computed. A replica whose ``load`` must not run at the same time, for
    example because both draw from the same random generator, has an attribute ``overlaps`` that is
    False.

    Attributes:
        model: The network. All parameters are on one device and have one type. Frozen ones
            (``requires_grad=False``) are received once, at the start. The values of the others are
            moved into a flat tensor, so nothing that was made from the model before (such as a
            compiled model) may depend on where they were stored.
    """

    model: nn.Module

    def load(self, key: BatchKey, indices: Tensor) -> Any:
        """Return a batch, on the device.

        Args:
            key: The epoch and the batch. Augmentation should depend on it only, so that a batch is
                the same if it is leased again.
            indices: The indices of its samples, int64, shape (B,), on the CPU.
        """
        ...

    def step(self, batch: Any, weights: Tensor | None) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Add the gradient of the batch's mean loss to the parameters' gradients, which are zero.

        Args:
            batch: What ``load`` returned.
            weights: The number by which the loss of each sample is multiplied before the mean is
                taken, float32, shape (B,), on the CPU; None for equal weights.

        Returns:
            The loss of each sample without its weight, shape (B,), detached. Losses are sent as
            float32. Further tensors with one row per sample may follow in a dict; they are in
            ``AppliedUpdate.watched``.
        """
        ...


Build = Callable[[int], Replica]


class Worker(Actor):
    """One replica. ``begin`` is called first. Each one has its own normalisation statistics."""

    @told_as_text
    def begin(
        self, build: Build, rank: int, strategy: Strategy, held: Arrays, random: Arrays | None
    ) -> Started:
        """Build the replica.

        Args:
            build: Function that makes the replica.
            rank: The rank among all workers. The members of a group have successive ranks.
            strategy: The strategy.
            held: The buffers and the frozen parameters, by name.
            random: The states of the generators; None for those that the replica starts with.
        """
        self._replica = build(rank)
        self._model = model = self._replica.model
        layout = flat_layout(model, strategy.servers)
        self._values, self._gradients = layout.bind(model)
        self._parts = [layout.part(server) for server in range(strategy.servers)]
        self._narrow, self._alone = strategy.gradients == "bfloat16", strategy.group == 1
        self._device = self._values.device
        self._on_cpu = self._device.type == "cpu"
        # Ray carries arrays on the CPU. If the model is on the CPU, no copies are needed.
        self._down = self._values if self._on_cpu else self._values.cpu().pin_memory()
        self._up = self._gradients if self._on_cpu else self._gradients.cpu().pin_memory()
        overlaps = getattr(self._replica, "overlaps", True)
        self._loader = ThreadPoolExecutor(1, "load") if overlaps else None
        self._loading: dict[BatchKey, Future[Any]] = {}
        self._last = -1, 0.0  # the epoch and the end of the last step
        for name, tensor in not_served(model).items():
            tensor.copy_(torch.tensor(held[name]))
        if random is not None:
            torch.set_rng_state(torch.tensor(random["cpu"]))
            if "cuda" in random:
                torch.cuda.set_rng_state(torch.tensor(random["cuda"]), self._device)
        return self.started()

    @told_as_text
    def step(
        self,
        samples: tuple[BatchKey, Array],
        weights: Array | None,
        following: tuple[BatchKey, Array] | None,
        *parameters: Array,
    ) -> tuple[Any, ...]:
        """Compute the gradient of a batch, or of a part of it.

        Args:
            samples: The batch, and the indices of the samples, int64, shape (B,), B > 0.
            weights: The weight of each sample's loss, float32, shape (B,); None for equal weights.
            following: The same as ``samples`` of the batch that probably follows; None if none is.
            parameters: The parameters that each server holds.

        Returns:
            ``Stepped``, and the part of each server of the gradient. A worker without a group sends
            int16 in place of bfloat16.
        """
        seconds: dict[str, float] = {}
        epoch, now = self._last

        def lap(phase: str) -> None:
            nonlocal now
            before, now = now, time.perf_counter()
            seconds[phase] = now - before

        lap("wait")
        if epoch != samples[0].epoch:
            del seconds["wait"]
        loaded = self._begin_to_load(samples, following)
        down = self._down.numpy()
        for part, values in zip(self._parts, parameters, strict=True):
            np.copyto(down[part], values)
        if not self._on_cpu:
            self._values.copy_(self._down)
        self._gradients.zero_()
        lap("pull")
        batch = loaded()
        lap("data")
        output = self._replica.step(batch, None if weights is None else torch.tensor(weights))
        losses, watched = output if isinstance(output, tuple) else (output, {})
        stepped = Stepped(
            losses.detach().float().cpu().numpy(),
            {name: rows.cpu().numpy() for name, rows in watched.items()},
            seconds,
        )
        if not self._on_cpu:
            self._up.copy_(self._gradients)
        lap("compute")
        self._last = samples[0].epoch, now
        up = _narrow(self._up) if self._narrow and self._alone else self._up
        return stepped, *(up[part].numpy() for part in self._parts)

    @told_as_text
    def average(self, shares: Sequence[float], *gradients: Array) -> tuple[Any, ...]:
        """Average the gradients of a group, whose leader this is.

        Args:
            shares: The weight of each member's gradient.
            gradients: The parts of each member's gradient, one for each server.

        Returns:
            The seconds of each phase, and the part of each server of the mean.
        """
        began = time.perf_counter()
        means = []
        for server, part in enumerate(self._parts):
            mean = torch.empty_like(self._up[part])
            weighted_sum(shares, gradients[server :: len(self._parts)], out=mean)
            means.append((_narrow(mean) if self._narrow else mean).numpy())
        return {"group reduce": time.perf_counter() - began}, *means

    @told_as_text
    def save(self) -> tuple[Arrays, Arrays]:
        """Return the buffers, and the states of the generators from which a step draws."""
        buffers = {name: held.detach().cpu().numpy() for name, held in self._model.named_buffers()}
        random = {"cpu": torch.get_rng_state().numpy()}
        if self._device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self._device).numpy()
        return buffers, random

    def _begin_to_load(
        self, samples: tuple[BatchKey, Array], following: tuple[BatchKey, Array] | None
    ) -> Callable[[], Any]:
        """Begin to load a batch and the one that follows; return a function that waits for it."""
        if self._loader is None:
            return lambda: self._replica.load(samples[0], torch.tensor(samples[1]))
        wanted = dict([samples, following] if following else [samples])
        for key in self._loading.keys() - wanted.keys():
            self._loading.pop(key).cancel()
        for key, indices in wanted.items():
            if key not in self._loading:
                load = self._loader.submit(self._replica.load, key, torch.tensor(indices))
                self._loading[key] = load
        return self._loading.pop(samples[0]).result


def _narrow(gradient: Tensor) -> Tensor:
    """Return bfloat16 as int16, because NumPy has no bfloat16."""
    return gradient.to(torch.bfloat16).view(torch.int16)
