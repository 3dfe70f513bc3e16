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
import torch
from torch import Tensor, nn

from fineprune.distributed.parameter_servers.epoch import Array, BatchKey, Stepped
from fineprune.distributed.parameter_servers.failures import told_as_text
from fineprune.distributed.parameter_servers.flat_layout import flat_layout, not_served
from fineprune.distributed.parameter_servers.server import Actor, weighted_sum
from fineprune.distributed.strategy import Strategy

Arrays = dict[str, Array]
Samples = tuple[BatchKey, Array]  # a batch, and the indices of its samples, int64, shape (B,)


class Replica(Protocol):
    """What a worker trains. The function ``build(rank)``, given to the driver, makes it.

    ``load`` is called in another thread than ``step``, while a step is computed, unless an
    attribute ``overlaps`` is False, for example because both draw from the same random generator.

    Attributes:
        model: The network. All parameters are on one device and have one type. Frozen ones
            (``requires_grad=False``) are received once, at the start. The values of the others are
            moved into a flat tensor, so nothing may depend on where they were stored.
    """

    model: nn.Module

    def load(self, key: BatchKey, indices: Tensor) -> Any:
        """Return the batch of these samples (int64, shape (B,)) on the device.

        What is drawn should depend on the key, so that a batch is the same if it is leased again.
        """
        ...

    def step(self, batch: Any, weights: Tensor | None) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Add the gradient of the batch's mean loss to the parameters' gradients, which are zero.

        Before the mean is taken, the loss of each sample is multiplied by its weight (float32,
        shape (B,), on the CPU; None for equal weights). Return the losses without weights, shape
        (B,), detached, perhaps with further tensors of one row per sample, which get into
        ``AppliedUpdate.watched``.
        """
        ...


Build = Callable[[int], Replica]


class Worker(Actor):
    """One replica. ``begin`` is called first. Each one has its own normalisation statistics."""

    @told_as_text
    def begin(
        self, build: Build, rank: int, strategy: Strategy, held: Arrays, random: Arrays | None
    ) -> tuple[int, str]:
        """Build the replica of this rank, and return where this process runs.

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
        # Ray carries arrays on the CPU. If the model is on the CPU, no copies are needed.
        self._down, self._up = (
            tensor if tensor.is_cpu else tensor.cpu().pin_memory()
            for tensor in (self._values, self._gradients)
        )
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
        return self.where()

    @told_as_text
    def step(
        self,
        samples: Samples,
        weights: Array | None,
        following: Samples | None,
        *parameters: Array,
    ) -> tuple[Any, ...]:
        """Compute the gradient of a batch, or of a part of it.

        Args:
            samples: The samples, at least one.
            weights: The weight of each sample's loss, float32, shape (B,); None for equal weights.
            following: The samples of the batch that probably follows; None if none is.
            parameters: The parameters that each server holds.

        Returns:
            ``Stepped``, and each server's part of the gradient.
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
        if self._down is not self._values:
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
        if self._up is not self._gradients:
            self._up.copy_(self._gradients)
        lap("compute")
        self._last = samples[0].epoch, now
        return stepped, *self._sent(self._up, self._narrow and self._alone)

    @told_as_text
    def average(self, shares: Sequence[float], *gradients: Array) -> tuple[Any, ...]:
        """Average the gradients of a group, whose leader this is, with the weights ``shares``.

        Return the seconds of each phase, and each server's part of the mean. ``gradients`` are the
        parts of the first member's gradient, then those of the second, and so on.
        """
        began = time.perf_counter()
        mean = torch.empty_like(self._up)
        for server, part in enumerate(self._parts):
            weighted_sum(shares, gradients[server :: len(self._parts)], out=mean[part])
        sent = self._sent(mean, self._narrow)
        return {"group reduce": time.perf_counter() - began}, *sent

    @told_as_text
    def save(self) -> tuple[Arrays, Arrays]:
        """Return the buffers, and the states of the generators from which a step draws."""
        buffers = {name: held.detach().cpu().numpy() for name, held in self._model.named_buffers()}
        random = {"cpu": torch.get_rng_state().numpy()}
        if self._device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self._device).numpy()
        return buffers, random

    def _sent(self, gradient: Tensor, narrow: bool) -> list[Array]:
        """Return each server's part; a ``narrow`` one is int16 in place of bfloat16."""
        sent = gradient.to(torch.bfloat16).view(torch.int16) if narrow else gradient
        return [sent[part].numpy() for part in self._parts]

    def _begin_to_load(self, samples: Samples, following: Samples | None) -> Callable[[], Any]:
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
