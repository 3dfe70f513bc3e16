"""The driver: it tells the servers what to apply and the workers what to compute.

Ray starts, watches and feeds the actors, and each of them executes its calls in order. An update is
submitted to all servers when its gradients exist, so each server applies it, or has died, and then
all of them return to the last snapshot. A gradient therefore counts once, and never in part.

An epoch ends when each of its batches is applied, under every strategy, so that the plan of the
next one is based on all losses.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import OutOfMemoryError, RayActorError, RayError
from torch import Tensor, nn

from fineprune.distributed.parameter_servers.epoch import (
    Array,
    BatchKey,
    Epoch,
    Lease,
    Stepped,
    add_seconds,
    divided,
)
from fineprune.distributed.parameter_servers.failures import RAISED, Behind, cause_of, root_of
from fineprune.distributed.parameter_servers.flat_layout import FlatLayout, not_served
from fineprune.distributed.parameter_servers.placement import Placement
from fineprune.distributed.parameter_servers.processes import (
    EventKind,
    Process,
    ProcessKind,
    report,
)
from fineprune.distributed.parameter_servers.ray_session import LONGEST_LOOK_SECONDS, RayHealth
from fineprune.distributed.parameter_servers.server import MakeOptimizer, Server, loaded, state_of
from fineprune.distributed.parameter_servers.update_rule import UpdateRule
from fineprune.distributed.parameter_servers.worker import Arrays, Build, Samples, Worker
from fineprune.distributed.strategy import Strategy
from fineprune.errors import RayLost, RunError

# The interval at which the driver looks for what Ray does not report, in seconds.
_LOOK_SECONDS = 0.5
# If the parameters are rolled back so many times without getting beyond their furthest version, the
# training ends, because the same cause would kill the server again.
_FRUITLESS_ROLLBACKS = 5

Then = Callable[[Any], None]


class Training:
    """A training on servers and workers; ``start.parameter_servers`` describes the arguments."""

    def __init__(
        self,
        strategy: Strategy,
        model: nn.Module,
        layout: FlatLayout,
        build: Build,
        optimizer: MakeOptimizer,
        state: dict[str, Any] | None,
        threads: int,
        gpus: float,
    ) -> None:
        self._strategy, self._layout, self._threads = strategy, layout, threads
        quorum = strategy.quorum if strategy.synchronous else None
        self._rule = UpdateRule(quorum, strategy.staleness_bound)
        self._placement = Placement(strategy, threads, gpus)
        self._build, self._optimizer = ray.put(build), ray.put(optimizer)
        self._health = RayHealth()
        # The calls of actors that have not returned, the oldest one first, by Ray's references to
        # the answers: the actor, and what is called with its answer.
        self._calls: dict[Any, tuple[Process, Then]] = {}
        self._oldest: Any = None
        self._silence = 0.0  # for how long it has been the oldest, in seconds
        self._looked = time.monotonic()
        # The last state that all servers have saved, and its version. Servers hold neither the
        # buffers nor the frozen parameters.
        if state is None:
            flat, held = layout.flat(model).cpu(), not_served(model)
            parts = [flat[layout.part(server)].clone() for server in range(layout.servers)]
            self._saved = [state_of(part, None, version=0) for part in parts]
        else:
            self._saved, held = [part.numpy() for part in state["servers"]], state["buffers"]
        self._buffers = {name: tensor.cpu().numpy().copy() for name, tensor in held.items()}
        self._saved_version = self.version = loaded(self._saved[0])["version"]
        self._furthest_version = self._fruitless_rollbacks = 0
        self._deaths = dict.fromkeys(ProcessKind, 0)
        self._epoch = Epoch(0, [], lambda applied: 0.0, strategy)
        # Ray's references to the parameters of each server.
        self._parameters: list[Any] = [None] * strategy.servers
        self._servers = [Process(ProcessKind.SERVER, n) for n in range(strategy.servers)]
        self._workers = [Process(ProcessKind.WORKER, n) for n in range(strategy.workers)]
        size = strategy.group
        self._groups = [
            self._workers[first : first + size] for first in range(0, strategy.workers, size)
        ]
        for server in self._servers:
            self._start(server)
            self._begin_server(server)
        for worker in self._workers:
            self._start_worker(worker, state and state["random"][worker.index])

    def wait_for_workers(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Wait until all actors have begun, so that no epoch's time includes their start.

        ``stop`` is called repeatedly; if it returns True, the wait ends.

        Raises:
            InputError: There are too few resources.
            RunError: A worker or a server died repeatedly.
        """
        while self._starting and not stop():
            self._go_on()

    def run_epoch(
        self,
        epoch: int,
        batches: Sequence[Tensor],
        rate: Callable[[int], float],
        *,
        weights: Tensor | None = None,
        applied: int = 0,
        stop: Callable[[], bool] = lambda: False,
    ) -> Epoch:
        """Train an epoch to its end, or until ``stop`` returns True.

        Args:
            epoch: The epoch, from 0. Each epoch can be trained once.
            batches: The indices of each batch's samples, at least one, int64, on the CPU. A group
                divides its batch among its members. Each sample of an update has the same weight.
            rate: Function that returns the learning rate, given the number of the epoch's batches
                applied so far.
            weights: The weights of all N samples' losses, float32, shape (N,), on the CPU; None for
                equal ones.
            applied: The number of batches that were applied before the epoch was stopped
                (``Epoch.applied``), which may be empty here. The parameters must be those then.
            stop: Function that is called repeatedly and returns whether to stop. Leased batches are
                then finished, with what completes their update, so that exactly the first
                ``Epoch.applied`` batches are applied.

        Raises:
            RunError: A worker or a server died repeatedly, without progress in between.
            RemoteError: A worker or a server raised an exception.
            RayLost: Ray itself has ended.
        """
        self._settle()
        self._epoch = made = Epoch(epoch, batches, rate, self._strategy, weights, applied, stop)
        self._decide()
        while made.remaining or self._serving:
            self._go_on()
        began = time.perf_counter()
        self._settle()
        while made.remaining:  # A server died meanwhile.
            self._go_on()
            self._settle()
        made.snapshot_seconds = time.perf_counter() - began
        return made

    def load_into(self, model: nn.Module) -> None:
        """Copy the parameters and buffers into a model. No epoch may be running.

        The normalisation statistics are those of worker 0. If it has died or hangs, they are those
        of the last successful call, or those that the training started from.
        """
        self._settle()
        self._layout.load(model, torch.cat([loaded(state)["parameters"] for state in self._saved]))
        self._ask(self._workers[:1])
        for name, tensor in not_served(model).items():
            tensor.copy_(torch.tensor(self._buffers[name]))

    def state(self) -> dict[str, Any]:
        """Return everything that a later training needs to continue. No epoch may be running.

        It holds a string and tensors on the CPU: the servers' states (uint8), the buffers, and the
        random state of each worker (None if it is being started).
        """
        self._settle()
        found = self._ask(self._workers)
        return {
            "layout": repr(self._layout),
            "servers": [torch.tensor(state) for state in self._saved],
            "buffers": _tensors(self._buffers),
            "random": [
                _tensors(found[rank]) if rank in found else None
                for rank in range(len(self._workers))
            ],
        }

    def take_deaths(self) -> dict[str, int]:
        """Return ``worker_deaths`` and ``server_deaths`` since the last call.

        Deaths may also be noticed before the first epoch or between two epochs.
        """
        taken, self._deaths = self._deaths, dict.fromkeys(ProcessKind, 0)
        return {f"{kind.value}_deaths": number for kind, number in taken.items()}

    def close(self) -> None:
        """End all actors, and give their resources back."""
        self._calls.clear()
        with contextlib.suppress(RayLost):
            if self._health.answers():
                for process in (*self._servers, *self._workers):
                    process.kill()
                self._placement.release()

    # -- the loop ---------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Wait for an answer, process it, and request what follows."""
        ready: list[Any] = []
        if self._calls:
            ready, _ = ray.wait(list(self._calls), timeout=_LOOK_SECONDS)
        else:
            time.sleep(_LOOK_SECONDS)
        for reference in ready:
            process, then = self._calls.pop(reference)
            process.pending -= 1
            try:
                answer = ray.get(reference)
            except RayError as error:
                self._failed(process, root_of(error))
            else:
                then(answer)
        self._look()
        self._decide()

    def _call(
        self, process: Process, method: str, then: Then, *arguments: Any, returns: int = 1
    ) -> list[Any]:
        """Call a method of an actor, which returns so many values.

        ``then`` is called with the first one. Return Ray's references to the others.
        """
        called = getattr(process.actor, method).options(num_returns=returns).remote(*arguments)
        first, *others = [called] if returns == 1 else called
        process.pending += 1
        self._calls[first] = process, then
        return others

    def _forget(self, process: Process) -> None:
        """Wait no longer for the answers of an actor."""
        self._calls = {ref: call for ref, call in self._calls.items() if call[0] is not process}
        process.pending = 0

    @property
    def _starting(self) -> bool:
        return any(process.where is None for process in (*self._servers, *self._workers))

    @property
    def _serving(self) -> bool:
        return any(server.pending for server in self._servers)

    def _look(self) -> None:
        """Look for an actor that hangs, and at Ray itself."""
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return
        passed, self._looked = min(now - self._looked, LONGEST_LOOK_SECONDS), now
        answers = self._health.answers()
        waits = answers and self._starting and self._placement.waits(passed)
        # A call waits for older ones only. So nobody but its actor holds up the oldest one, unless
        # there are no CPUs for it.
        oldest, limit = next(iter(self._calls), None), self._strategy.silence_seconds
        self._silence = 0.0 if waits or oldest is not self._oldest else self._silence + passed
        self._oldest = oldest
        if oldest is not None and self._silence > limit:
            self._died(self._calls[oldest][0], f"killed because it did not answer for {limit:g} s")

    # -- updates and steps ------------------------------------------------------------------------

    def _decide(self) -> None:
        """Apply the gradients that may be applied, and lease batches to the idle groups."""
        epoch = self._epoch
        if any(server.where is None for server in self._servers):
            return
        epoch.look_for_stop()
        while taken := self._next_update():
            self._update(taken)
        for index, group in enumerate(self._groups):
            busy = any(worker.where is None or worker.pending for worker in group)
            if busy or index in epoch.leased or not self._rule.may_start(len(epoch.leased)):
                continue
            lease = epoch.lease(index, self.version)
            if lease is not None:
                self._step(lease)

    def _next_update(self) -> list[Lease]:
        """Return the leases whose gradients make the next update; none if it has to wait."""
        leases = self._epoch.leased.values()
        waiting = sorted((one for one in leases if one.arrived), key=lambda one: one.arrived)
        computing = [one for one in leases if not one.arrived]
        return self._rule.next_update(waiting, computing, self.version, self._epoch.remaining)

    def _update(self, taken: Sequence[Lease]) -> None:
        """Let the servers apply gradients, and discard those that come too late."""
        epoch, strategy = self._epoch, self._strategy
        taken = sorted(taken, key=lambda lease: lease.batch)
        rate = epoch.rate(epoch.applied)
        if strategy.rate_by_staleness:
            rate /= max(1, self.version - taken[0].version)
        self.version += 1
        shares = epoch.apply(self.version, taken)
        for server, phases in zip(self._servers, epoch.servers, strict=True):
            gradients = [lease.gradients[server.index] for lease in taken]
            arguments = self.version, rate, shares, *gradients
            done = partial(add_seconds, phases)
            (made,) = self._call(server, "update", done, *arguments, returns=2)
            self._parameters[server.index] = made
        batches = ", ".join(str(lease.batch) for lease in taken)
        line = f"updated to version {self.version}: batches {batches}"
        report(EventKind.UPDATED, line, version=self.version)
        if strategy.synchronous:
            for late in list(epoch.leased):
                epoch.give_back(late, died=False)
                epoch.dropped += 1
        if strategy.snapshot_every and len(epoch.by_version) % strategy.snapshot_every == 0:
            self._snapshot()

    def _step(self, lease: Lease) -> None:
        """Let a group compute the gradient of its batch, and load the one that may follow."""
        epoch, group = self._epoch, self._groups[lease.group]
        returns = 1 + len(self._servers)

        def parts_of(batch: int | None) -> list[Samples]:
            if batch is None:
                return []
            key = BatchKey(epoch.number, batch)
            return [(key, part) for part in divided(epoch.batches[batch], len(group))]

        told = f"batch {lease.batch} of epoch {epoch.number}"
        group[0].report(EventKind.LEASED, told, BatchKey(epoch.number, lease.batch))
        parts, following = parts_of(lease.batch), parts_of(lease.following)
        lease.missing = len(parts) + (len(group) > 1)
        # The last members get no sample if the batch has fewer than the group has members.
        for place, own in enumerate(parts):
            further = following[place] if place < len(following) else None
            weights = None if epoch.weights is None else epoch.weights[own[1]]
            arguments = own, weights, further, *self._parameters
            done: Then = partial(self._stepped, lease, group[place])
            lease.gradients += self._call(group[place], "step", done, *arguments, returns=returns)
        if len(group) > 1:
            shares = [len(own) / len(epoch.batches[lease.batch]) for _, own in parts]
            done = partial(self._answered, lease, group[0])
            lease.gradients = self._call(
                group[0], "average", done, shares, *lease.gradients, returns=returns
            )

    def _stepped(self, lease: Lease, worker: Process, answer: Stepped) -> None:
        worker.fruitless_deaths = 0
        lease.stepped[worker.index] = answer
        self._answered(lease, worker, answer.seconds)

    def _answered(self, lease: Lease, worker: Process, seconds: dict[str, float]) -> None:
        """Note an answer of a group, whose gradient is complete when all have arrived."""
        add_seconds(self._epoch.workers[worker.index], seconds)
        lease.missing -= 1
        if not lease.missing:
            lease.arrived = time.monotonic()

    # -- the state of the servers and the workers -------------------------------------------------

    def _snapshot(self) -> None:
        """Let all servers save this version."""
        version, parts = self.version, dict[int, Array]()

        def note(index: int, state: Array) -> None:
            parts[index] = np.array(state)  # a copy, so that Ray can free its own
            if len(parts) == len(self._servers):
                self._saved = [parts[server.index] for server in self._servers]
                self._saved_version = version

        for server in self._servers:
            self._call(server, "snapshot", partial(note, server.index))

    def _settle(self) -> None:
        """Run the loop until all servers have executed and saved all updates."""
        while self._serving or self.version != self._saved_version:
            if not self._serving:
                self._snapshot()
            self._go_on()

    def _ask(self, workers: Sequence[Process]) -> dict[int, Arrays]:
        """Ask the workers that have begun for their buffers and random states.

        Take over the buffers of worker 0, and return the states by rank.
        """
        found: dict[int, tuple[Arrays, Arrays]] = {}
        before = list(self._calls)
        for worker in workers:
            if worker.where is not None:
                self._call(worker, "save", partial(found.__setitem__, worker.index))
        asked = self._calls.keys() - before
        while asked & self._calls.keys():
            self._go_on()
        if 0 in found:
            self._buffers |= found[0][0]
        return {rank: random for rank, (_, random) in found.items()}

    # -- starts, deaths and rollbacks -------------------------------------------------------------

    def _start(self, process: Process) -> None:
        """Start an actor."""
        while not self._health.answers():  # Else Ray would hang.
            time.sleep(_LOOK_SECONDS)
        actor: Any = ray.remote(Worker if process.kind is ProcessKind.WORKER else Server)
        options = self._placement.options(process.kind, process.index)
        process.start(actor.options(**options).remote(self._threads))

    def _begin_server(self, server: Process) -> None:
        """Give a server the last saved state, also in place of the one that it has."""
        arguments = self._layout, server.index, self._optimizer, self._saved[server.index]
        (made,) = self._call(server, "begin", server.note_begun, *arguments, returns=2)
        self._parameters[server.index] = made

    def _start_worker(self, worker: Process, random: dict[str, Tensor] | None = None) -> None:
        """Start a worker; ``random`` holds the states of its generators, if they are known."""
        self._start(worker)
        states = {name: state.numpy() for name, state in random.items()} if random else None
        arguments = self._build, worker.index, self._strategy, self._buffers, states
        self._call(worker, "begin", worker.note_begun, *arguments)

    def _failed(self, process: Process, error: Exception) -> None:
        """Find out whose failure ended a call of an actor, and recover from it if it is a death."""
        if isinstance(error, RAISED) and not isinstance(error, Behind):
            raise error
        server = process.kind is ProcessKind.SERVER
        if isinstance(error, RayActorError) and error.actor_id is not None:
            # Perhaps another one died, which made an argument. If it was replaced since, there is
            # nothing to do.
            for other in (*self._servers, *self._workers):
                if other.identity == error.actor_id:
                    self._died(other, cause_of(error))
        elif isinstance(error, OutOfMemoryError) or (not server and process.where is None):
            # A worker that could not begin has perhaps lost what it begins with.
            self._died(process, cause_of(error))
        elif server or process.index // self._strategy.group in self._epoch.leased:
            # A gradient or parameters were lost with their node.
            self._roll_back(cause_of(error))

    def _died(self, process: Process, reason: str) -> None:
        """Recover from the death of an actor."""
        counts = process.end(reason)
        self._deaths[process.kind] += counts
        if process.kind is ProcessKind.SERVER:
            self._roll_back(f"server {process.index} died: {reason}", process, counts=counts)
            return
        self._forget(process)
        self._epoch.give_back(process.index // self._strategy.group)
        self._start_worker(process)

    def _roll_back(self, reason: str, dead: Process | None = None, *, counts: bool = True) -> None:
        """Return all servers to the last saved state, and start the one that died, if one did.

        It ``counts`` unless this server had never run.
        """
        if self.version > self._furthest_version:
            self._furthest_version, self._fruitless_rollbacks = self.version, 0
        self._fruitless_rollbacks += counts
        if self._fruitless_rollbacks >= _FRUITLESS_ROLLBACKS:
            raise RunError(
                f"the servers were rolled back {_FRUITLESS_ROLLBACKS} times without getting beyond "
                f"version {self._furthest_version}; the last time: {reason}"
            )
        for group in range(len(self._groups)):
            self._epoch.give_back(group)
        self.version = self._saved_version
        undone = self._epoch.undo(self.version)
        told = f"{undone} batches are queued again" if undone else "no update is undone"
        line = f"rolled back to version {self.version}: {told}"
        report(EventKind.ROLLED_BACK, line, version=self.version)
        for server in self._servers:
            self._forget(server)
            if server is dead:
                self._start(server)
            self._begin_server(server)


def _tensors(arrays: Arrays) -> dict[str, Tensor]:
    return {name: torch.tensor(array) for name, array in arrays.items()}
