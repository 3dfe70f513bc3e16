"""The driver: it tells the servers what to apply and the workers what to compute.

Ray starts, watches and feeds the actors, and each of them executes its calls in order. An update is
submitted to all servers when its gradients exist, so each server applies it, or has died, and then
all of them return to the last snapshot. A gradient therefore counts once, and never in part.

An epoch ends when each of its batches is applied, and only then does the next one begin. So an
epoch has the same meaning under every strategy, and what is decided between two epochs, such as
which samples the next one skips, is based on all losses of the previous one.
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
    BatchKey,
    Epoch,
    Stepped,
    add_seconds,
    divided,
)
from fineprune.distributed.parameter_servers.failures import RAISED, Behind, cause_of, root_of
from fineprune.distributed.parameter_servers.flat_layout import FlatLayout, not_served
from fineprune.distributed.parameter_servers.placement import Placement
from fineprune.distributed.parameter_servers.processes import (
    Event,
    EventKind,
    Group,
    Process,
    ProcessKind,
    report,
)
from fineprune.distributed.parameter_servers.ray_session import RayHealth
from fineprune.distributed.parameter_servers.server import (
    MakeOptimizer,
    Server,
    loaded,
    state_of,
)
from fineprune.distributed.parameter_servers.update_rule import Gradient, UpdateRule
from fineprune.distributed.parameter_servers.worker import Array, Arrays, Build, Worker
from fineprune.distributed.strategy import Strategy
from fineprune.errors import RayLost, RunError

# The interval at which the driver looks for what Ray does not report, in seconds.
_LOOK_SECONDS = 0.5
# An interval between two looks that shows that this process was suspended.
_SUSPENDED_SECONDS = 10.0
# If the parameters are rolled back so many times without getting beyond their furthest version, the
# training ends, because the same cause would kill the server again.
_FRUITLESS_ROLLBACKS = 5

Then = Callable[[Any], None]


class Training:
    """A training on servers and workers, epoch by epoch; see ``start.parameter_servers``."""

    def __init__(
        self,
        strategy: Strategy,
        placement: Placement,
        model: nn.Module,
        layout: FlatLayout,
        build: Build,
        optimizer: MakeOptimizer,
        state: dict[str, Any] | None,
        threads: int,
        stop: Callable[[], bool],
    ) -> None:
        self._strategy, self._placement, self._layout = strategy, placement, layout
        self._threads, self._stop = threads, stop
        quorum = strategy.quorum if strategy.synchronous else None
        self._rule = UpdateRule(quorum, strategy.staleness_bound)
        self._build, self._optimizer = ray.put(build), ray.put(optimizer)
        self._health = RayHealth()
        # The calls of actors that have not returned, the oldest one first, by Ray's references to
        # the answers: the actor, and what is called with its answer.
        self._calls: dict[Any, tuple[Process, Then]] = {}
        self._oldest: Any = None
        self._looked = self._since = time.monotonic()  # since when it is the oldest
        # The last state that all servers have saved, and its version.
        if state is None:
            flat = layout.flat(model).cpu()
            parts = [flat[layout.part(server)].clone() for server in range(layout.servers)]
            self._saved = [state_of(part, None, version=0) for part in parts]
        else:
            self._saved = [content.numpy() for content in state["servers"]]
        self._saved_version = self.version = loaded(self._saved[0])["version"]
        self._furthest_version = self._fruitless_rollbacks = 0
        # The buffers and, because servers do not hold them either, the frozen parameters.
        tensors = not_served(model) if state is None else state["buffers"]
        self._buffers = {name: tensor.cpu().numpy().copy() for name, tensor in tensors.items()}
        self._epoch = Epoch(0, [], lambda applied: 0.0, strategy)
        # Ray's references to the parameters of each server.
        self._parameters: list[Any] = [None] * strategy.servers
        self._servers = [
            Process(ProcessKind.SERVER, index, self._make) for index in range(strategy.servers)
        ]
        workers = [
            Process(ProcessKind.WORKER, rank, self._make) for rank in range(strategy.workers)
        ]
        size = strategy.group
        self._groups = [
            Group(index, workers[index * size : (index + 1) * size])
            for index in range(strategy.groups)
        ]
        self._group_of = {worker: group for group in self._groups for worker in group.workers}
        self._processes = [*self._servers, *workers]
        for server in self._servers:
            server.start()
            self._begin_server(server)
        for worker in workers:
            self._start_worker(worker, None if state is None else state["random"][worker.index])

    # -- public methods ---------------------------------------------------------------------------

    def wait_for_workers(self) -> None:
        """Wait until all actors have begun, so that no epoch's time includes their start.

        If the training was asked to stop, this returns earlier.

        Raises:
            InputError: There are too few resources.
            RunError: A worker or a server died repeatedly.
        """
        while self._starting and not self._stop():
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
            batches: The indices of each batch's samples, int64, on the CPU. A group divides its
                batch among its members. The gradients of an update are averaged, weighted by the
                numbers of samples in their batches.
            rate: Function that returns the learning rate, given the number of the epoch's batches
                applied so far.
            weights: The weight of each sample's loss, float32, shape (N,), on the CPU, where N is
                the number of samples in the data set; None for equal weights.
            applied: The number of batches that were applied before the epoch was stopped
                (``Epoch.applied``). The parameters must be those at that time. These batches
                are not used, and may be empty.
            stop: Function that is called repeatedly and returns whether to stop. After it has
                returned True, leased batches are finished, with what completes their update. Then
                exactly the first ``Epoch.applied`` batches are applied, and a later training
                can continue from ``state()``.

        Raises:
            InputError: A batch is empty.
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
        made.count_samples()
        return made

    def load_into(self, model: nn.Module) -> None:
        """Copy the parameters and buffers into a model. No epoch may be running.

        Each replica has its own normalisation statistics; those of the first group's leader are
        used. If that process has died or hangs, they are those of the last successful call, or
        those that the training started from.
        """
        self._settle()
        self._layout.load(model, torch.cat([loaded(state)["parameters"] for state in self._saved]))
        self._ask(self._groups[0].workers[:1])
        for name, tensor in not_served(model).items():
            tensor.copy_(torch.tensor(self._buffers[name]))

    def state(self) -> dict[str, Any]:
        """Return everything that a later training needs to continue. No epoch may be running.

        It holds a string and tensors on the CPU: the servers' parts (uint8, in the format of
        ``torch.save``), the buffers, and the random state of each worker (None if it is being
        started).
        """
        self._settle()
        workers = list(self._group_of)
        found = self._ask(workers)
        random = [found.get(worker.index) for worker in workers]
        return {
            "layout": self._layout.contents,
            "servers": [torch.tensor(state) for state in self._saved],
            "buffers": _tensors(self._buffers),
            "random": [states and _tensors(states) for states in random],
        }

    def take_deaths(self) -> dict[ProcessKind, int]:
        """Return the number of workers and of servers that died since the last call.

        They include those whose deaths are noticed before the first epoch or between two epochs.
        """
        deaths = dict.fromkeys(ProcessKind, 0)
        for process in self._processes:
            deaths[process.kind] += process.deaths
            process.deaths = 0
        return deaths

    def close(self) -> None:
        """End all actors, and give their resources back."""
        self._calls.clear()
        with contextlib.suppress(RayLost):
            self._health.check(patience=0.0)
            for process in self._processes:
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

    def _call(self, process: Process, answer: Any, then: Then) -> None:
        """Wait for the answer to a call of an actor, which ``then`` is called with."""
        process.pending += 1
        self._calls[answer] = process, then

    def _forget(self, process: Process) -> None:
        """Wait no longer for the answers of an actor."""
        self._calls = {ref: call for ref, call in self._calls.items() if call[0] is not process}
        process.pending = 0

    @property
    def _starting(self) -> bool:
        """Whether an actor has not begun."""
        return any(process.where is None for process in self._processes)

    @property
    def _serving(self) -> bool:
        """Whether a server has not executed all that it was told."""
        return any(server.pending for server in self._servers)

    def _look(self) -> None:
        """Look for an actor that hangs, and at Ray itself."""
        now = time.monotonic()
        passed = now - self._looked
        if passed < _LOOK_SECONDS:
            return
        self._looked = now
        answers = self._health.check()
        waits = answers and self._starting and self._placement.waits(passed)
        # A call waits for older ones only. So nobody but its actor holds up the oldest one, unless
        # there are no CPUs for it, or this process and perhaps all others were suspended.
        oldest, limit = next(iter(self._calls), None), self._strategy.silence_seconds
        if oldest is not self._oldest or waits or passed > _SUSPENDED_SECONDS:
            self._oldest, self._since = oldest, now
        elif oldest is not None and now - self._since > limit:
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
        idle = [group for group in self._groups if group.idle]
        for group in idle:
            if self._rule.may_start(len(epoch.leased)):
                group.lease = epoch.lease(group.index)
        # The groups without a lease get the lowest batches.
        absent = max(0, self._strategy.quorum - len(epoch.leased))
        for group in idle:
            if group.lease is not None:
                self._step(group, group.lease, epoch.announce(group.index, absent))

    def _next_update(self) -> list[Group]:
        """Return the groups whose gradients make the next update; none if it has to wait."""
        leased = [self._groups[index] for index in self._epoch.leased.values()]
        waiting = sorted((g for g in leased if g.arrived), key=lambda group: group.arrived)
        taken = self._rule.next_update(
            [Gradient(group.index, group.version) for group in waiting],
            [Gradient(group.index, group.version) for group in leased if not group.arrived],
            self.version,
            self._epoch.remaining,
        )
        return [self._groups[gradient.worker] for gradient in taken]

    def _update(self, taken: Sequence[Group]) -> None:
        """Let the servers apply the gradients of groups, and discard those that come too late."""
        epoch, strategy = self._epoch, self._strategy
        staleness = self.version - taken[0].version
        rate = epoch.rate(epoch.applied)
        if strategy.rate_by_staleness:
            rate /= max(1, staleness)
        groups = {group.lease: group for group in taken if group.lease is not None}
        computed = {
            batch: [group.stepped[place] for place in group.shares]
            for batch, group in groups.items()
        }
        self.version += 1
        shares = epoch.apply(self.version, staleness, computed)
        for index, server in enumerate(self._servers):
            gradients = [groups[batch].gradients[index] for batch in shares]
            arguments = self.version, rate, list(shares.values()), *gradients
            method = server.actor.update.options(num_returns=2)
            done, self._parameters[index] = method.remote(*arguments)
            self._call(server, done, partial(add_seconds, epoch.servers[index]))
        line = f"updated to version {self.version}: batches {', '.join(map(str, shares))}"
        report(Event(EventKind.UPDATED, line, version=self.version))
        for group in taken:
            group.release()
        if strategy.synchronous:
            for batch, late in list(epoch.leased.items()):
                self._groups[late].release()
                epoch.give_back(batch)
                epoch.dropped += 1
        if strategy.snapshot_every and len(epoch.by_version) % strategy.snapshot_every == 0:
            self._snapshot()

    def _step(self, group: Group, batch: int, following: int | None) -> None:
        """Let a group compute the gradient of its batch, and load the one that may follow."""
        epoch = self._epoch

        def of(number: int, place: int) -> tuple[BatchKey, Array]:
            part = divided(epoch.batches[number], len(group.workers))[place]
            return BatchKey(epoch.number, number), part

        group.version = self.version
        key, size = BatchKey(epoch.number, batch), len(epoch.batches[batch])
        told = f"batch {batch} of epoch {epoch.number}"
        group.workers[0].report(EventKind.LEASED, told, key)
        for place, worker in enumerate(group.workers):
            samples = of(batch, place)
            if not len(samples[1]):
                continue  # The batch has fewer samples than the group has members.
            group.shares[place] = len(samples[1]) / size
            method = worker.actor.step.options(num_returns=1 + len(self._servers))
            further = None if following is None else of(following, place)
            arguments = samples, epoch.weights(samples[1]), further, *self._parameters
            done, *group.parts[place] = method.remote(*arguments)
            self._call(worker, done, partial(self._stepped, worker, place))

    def _stepped(self, worker: Process, place: int, answer: Stepped) -> None:
        """Note that a gradient exists; if it is the last of its group, they can be averaged."""
        group = self._group_of[worker]
        add_seconds(self._epoch.workers[worker.index].seconds, answer.seconds)
        if len(group.workers) == 1:
            worker.fruitless_deaths = 0
        if group.lease is None:  # An update was made without this gradient.
            return
        group.stepped[place] = answer
        if len(group.stepped) < len(group.shares):
            return
        if len(group.workers) == 1:
            group.gradients, group.arrived = group.parts[0], time.monotonic()
            return
        leader = group.workers[0]
        method = leader.actor.average.options(num_returns=1 + len(self._servers))
        gradients = [part for one in group.shares for part in group.parts[one]]
        done, *group.gradients = method.remote(list(group.shares.values()), *gradients)
        self._call(leader, done, partial(self._averaged, group))

    def _averaged(self, group: Group, seconds: dict[str, float]) -> None:
        add_seconds(self._epoch.workers[group.workers[0].index].seconds, seconds)
        for worker in group.workers:
            worker.fruitless_deaths = 0
        if group.lease is not None:
            group.arrived = time.monotonic()

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
            saved = server.actor.snapshot.remote()
            self._call(server, saved, partial(note, server.index))

    def _settle(self) -> None:
        """Run the loop until all servers have executed and saved all updates."""
        while self._serving or self.version != self._saved_version:
            if not self._serving:
                self._snapshot()
            self._go_on()

    def _ask(self, workers: Sequence[Process]) -> dict[int, Arrays]:
        """Ask workers for their buffers and random states; take over the first one's buffers.

        Returns:
            The states of the generators by rank, without those of workers that are being started.
        """
        found: dict[int, tuple[Arrays, Arrays]] = {}
        asked = []
        for worker in workers:
            if worker.where is not None:
                asked.append(worker.actor.save.remote())
                self._call(worker, asked[-1], partial(found.__setitem__, worker.index))
        while any(reference in self._calls for reference in asked):
            self._go_on()
        if 0 in found:
            self._buffers |= found[0][0]
        return {rank: random for rank, (_, random) in found.items()}

    # -- starts, deaths and rollbacks -------------------------------------------------------------

    def _make(self, process: Process) -> Any:
        """Make an actor."""
        self._health.check(patience=0.0)  # Else Ray might hang.
        actor: Any = ray.remote(Worker if process.kind is ProcessKind.WORKER else Server)
        options = self._placement.options(process.kind, process.index)
        return actor.options(**options).remote(self._threads)

    def _begin_server(self, server: Process) -> None:
        """Give a server the last saved state, also in place of the one that it has."""
        arguments = self._layout, server.index, self._optimizer, self._saved[server.index]
        method = server.actor.begin.options(num_returns=2)
        begun, self._parameters[server.index] = method.remote(*arguments)
        self._call(server, begun, server.note_begun)

    def _start_worker(self, worker: Process, random: dict[str, Tensor] | None = None) -> None:
        """Start a worker; ``random`` holds the states of its generators, if they are known."""
        worker.start()
        states = {name: state.numpy() for name, state in (random or {}).items()} or None
        arguments = self._build, worker.index, self._strategy, self._buffers, states
        self._call(worker, worker.actor.begin.remote(*arguments), worker.note_begun)

    def _failed(self, process: Process, error: Exception) -> None:
        """Find out whose failure ended a call, and recover from it if it is a death.

        Args:
            process: The actor that was called.
            error: What ``root_of`` returned.
        """
        if isinstance(error, RAISED) and not isinstance(error, Behind):
            raise error
        dead, own = error.actor_id if isinstance(error, RayActorError) else None, process.where
        if dead is not None and own is not None and dead != own.actor:
            # It made an argument. If it was replaced since, there is nothing to do.
            for other in self._processes:
                if other.where is not None and other.where.actor == dead:
                    self._died(other, cause_of(error))
        elif dead is not None or isinstance(error, OutOfMemoryError):
            self._died(process, cause_of(error))
        elif own is None and process in self._group_of:
            # It could not begin, for example because what it begins with was lost.
            self._died(process, cause_of(error))
        elif process not in self._group_of or self._group_of[process].lease is not None:
            # A gradient or parameters were lost with their node.
            self._roll_back(cause_of(error))

    def _died(self, process: Process, reason: str) -> None:
        """Recover from the death of an actor."""
        if process.kind is ProcessKind.SERVER:
            counts = process.end(reason)
            self._roll_back(f"server {process.index} died: {reason}", process, counts=counts)
            return
        self._forget(process)
        self._end_lease(self._group_of[process])
        process.end(reason)
        self._start_worker(process)

    def _end_lease(self, group: Group) -> None:
        """Queue again what a group has."""
        self._epoch.orphan(group.index)
        group.release()

    def _roll_back(self, reason: str, dead: Process | None = None, *, counts: bool = True) -> None:
        """Return all servers to the last saved state.

        Args:
            reason: The reason.
            dead: A server that has ended, and is started again.
            counts: Whether this is a rollback that a further one like it makes fruitless.
        """
        if self.version > self._furthest_version:
            self._furthest_version, self._fruitless_rollbacks = self.version, 0
        self._fruitless_rollbacks += counts
        if self._fruitless_rollbacks >= _FRUITLESS_ROLLBACKS:
            raise RunError(
                f"the servers were rolled back {_FRUITLESS_ROLLBACKS} times without getting beyond "
                f"version {self._furthest_version}; the last time: {reason}"
            )
        for group in self._groups:
            self._end_lease(group)
        self.version = self._saved_version
        undone = self._epoch.undo(self.version)
        told = f"{undone} batches are queued again" if undone else "no update is undone"
        line = f"rolled back to version {self.version}: {told}"
        report(Event(EventKind.ROLLED_BACK, line, version=self.version))
        for server in self._servers:
            self._forget(server)
            if server is dead:
                server.start()
            self._begin_server(server)


def _tensors(arrays: Arrays) -> dict[str, Tensor]:
    return {name: torch.tensor(array) for name, array in arrays.items()}
