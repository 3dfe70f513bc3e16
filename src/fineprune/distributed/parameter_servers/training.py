"""The driver: it tells the servers what to apply and the workers what to compute.

Ray starts, watches and feeds the actors, and each of them executes its calls in order. An update is
submitted to all servers when its gradients exist, so each server applies it, or has died, and then
all of them return to the last snapshot. A gradient therefore counts once, and never in part.

An epoch ends when each of its batches is applied, and only then does the next one begin. So an
epoch has the same meaning under every strategy, and what is decided between two epochs, such as
which samples the next one skips, is based on all losses of the previous one.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import OutOfMemoryError, RayError
from torch import Tensor, nn

from fineprune.distributed.parameter_servers.batches import BatchKey
from fineprune.distributed.parameter_servers.epoch import (
    Epoch,
    EpochResult,
    add_seconds,
    number_of_samples,
)
from fineprune.distributed.parameter_servers.events import Event, EventKind, ProcessKind, report
from fineprune.distributed.parameter_servers.failures import (
    cause_of,
    dead_actor,
    failure_of,
)
from fineprune.distributed.parameter_servers.flat_layout import FlatLayout, not_served
from fineprune.distributed.parameter_servers.placement import Placement, available
from fineprune.distributed.parameter_servers.ray_session import RayHealth
from fineprune.distributed.parameter_servers.server import (
    MakeOptimizer,
    Server,
    first_state,
    held_by,
)
from fineprune.distributed.parameter_servers.start import RayLost
from fineprune.distributed.parameter_servers.units import Group, Unit
from fineprune.distributed.parameter_servers.update_rule import Gradient, UpdateRule
from fineprune.distributed.parameter_servers.worker import (
    Array,
    Arrays,
    Build,
    Member,
    Saved,
    Step,
    Worker,
)
from fineprune.distributed.strategy import Strategy
from fineprune.errors import RunError

# The interval at which the driver looks for what Ray does not report, in seconds.
_LOOK_SECONDS = 0.5
# An interval between two looks that shows that this process was suspended.
_SUSPENDED_SECONDS = 10.0
# How long after an error of a member of a group the death of another may come that explains it.
_GRACE_SECONDS = 5.0
# If the parameters are rolled back so many times without getting beyond their furthest version, the
# training ends, because the same cause would kill the server again.
_FRUITLESS_ROLLBACKS = 5
# Seconds between two reports that actors wait for CPUs.
_REPORT_EVERY = 10.0

Stop = Callable[[], bool]


@dataclass(frozen=True)
class _Call:
    """A call of an actor's method that has not returned.

    Attributes:
        unit, place: The actor.
        name: The method.
        since: When the actor could begin with it.
        era: The number of rollbacks before it.
    """

    unit: Unit
    place: int
    name: str
    since: float
    era: int


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
        stop: Stop,
    ) -> None:
        self._strategy, self._placement, self._stop = strategy, placement, stop
        self._layout = layout
        quorum = strategy.quorum if strategy.synchronous else None
        self._rule = UpdateRule(quorum, strategy.staleness_bound)
        self._build, self._optimizer = ray.put(build), ray.put(optimizer)
        self._health = RayHealth()
        # The last state that all servers have saved, and its version. Those that are being saved.
        if state is None:
            flat = layout.flat(model).cpu()
            self._saved = [first_state(flat[layout.part(i)]) for i in range(layout.servers)]
        else:
            self._saved = [content.numpy() for content in state["servers"]]
        self._saved_version = self.version = held_by(self._saved[0])[0]
        self._saving: dict[int, dict[int, Array]] = {}
        # The buffers and, because servers do not hold them either, the frozen parameters.
        tensors = not_served(model) if state is None else state["buffers"]
        self._buffers = {name: tensor.cpu().numpy().copy() for name, tensor in tensors.items()}
        self._epoch = Epoch(0, [], lambda applied: 0.0, strategy)
        self._calls: dict[Any, _Call] = {}
        self._arrived: list[Group] = []  # those whose gradients wait, in the order of arrival
        self._answers: dict[tuple[int, int], Saved] = {}
        self._era = self._furthest_version = self._fruitless_rollbacks = 0
        self._looked = time.monotonic()
        self._waited = self._reported = 0.0  # for CPUs, in seconds
        # Ray's references to the parameters of each server.
        self._parameters: list[Any] = [None] * strategy.servers
        self._servers = [
            Unit(ProcessKind.SERVER, index, 1, self._make) for index in range(strategy.servers)
        ]
        self._groups = [
            Group(ProcessKind.WORKER, index, strategy.group, self._make)
            for index in range(strategy.groups)
        ]
        for server in self._servers:
            server.start()
            self._begin_server(server)
        for group in self._groups:
            self._start_group(group, [] if state is None else state["random"])

    # -- public methods ---------------------------------------------------------------------------

    def wait_for_workers(self) -> None:
        """Wait until all actors have begun, so that no epoch's time includes their start.

        If the training was asked to stop, this returns earlier.

        Raises:
            RunError: A group died repeatedly, or a server before all servers had started.
        """
        while not all(unit.ready for unit in (*self._servers, *self._groups)):
            if self._stop():
                return
            self._go_on()

    def run_epoch(
        self,
        epoch: int,
        batches: Sequence[Tensor],
        rate: Callable[[int], float],
        *,
        weights: Tensor | None = None,
        applied: int = 0,
        stop: Stop = lambda: False,
    ) -> EpochResult:
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
                (``EpochResult.applied``). The parameters must be those at that time. These batches
                are not used, and may be empty.
            stop: Function that is called repeatedly and returns whether to stop. After it has
                returned True, no further batch is leased, and leased batches are finished if they
                make up whole updates. Then exactly the first ``EpochResult.applied`` batches are
                applied, and a later training can continue from ``state()``.

        Raises:
            InputError: A batch is empty.
            RunError: A group or a server died repeatedly, without progress in between.
            RemoteError: A worker or a server raised an exception.
            RayLost: Ray itself has ended.
        """
        self._settle()
        self._epoch = made = Epoch(epoch, batches, rate, self._strategy, weights, applied, stop)
        for group in self._groups:
            group.first = True
        self._decide()
        while made.batches.remaining or not self._updated:
            self._go_on()
        began = time.perf_counter()
        self._settle()
        while made.batches.remaining:  # A server died meanwhile.
            self._go_on()
            self._settle()
        made.result.snapshot_seconds = time.perf_counter() - began
        return made.finish()

    def load_into(self, model: nn.Module) -> None:
        """Copy the parameters and buffers into a model. No epoch may be running.

        Each replica has its own normalisation statistics; those of the first group's leader are
        used. If that process has died or hangs, they are those of the last successful call, or
        those that the training started from.
        """
        self._settle()
        self._layout.load(model, torch.cat([held_by(state)[1] for state in self._saved]))
        self._ask(self._groups[:1])
        for name, tensor in not_served(model).items():
            tensor.copy_(torch.tensor(self._buffers[name]))

    def state(self) -> dict[str, Any]:
        """Return everything that a later training needs to continue. No epoch may be running.

        It holds a string and tensors on the CPU: the servers' parts (uint8, in the format of
        ``torch.save``), the buffers, and the random state of each worker (None if it is being
        started).
        """
        self._settle()
        self._ask(self._groups)
        found = [
            self._answers.get((group.index, place))
            for group in self._groups
            for place in range(group.size)
        ]
        return {
            "layout": self._layout.contents,
            "servers": [torch.tensor(state) for state in self._saved],
            "buffers": _tensors(self._buffers),
            "random": [one and one.random and _tensors(one.random) for one in found],
        }

    def take_deaths(self) -> dict[ProcessKind, int]:
        """Return the number of workers and of servers that died since the last call.

        They include those whose deaths are noticed before the first epoch or between two epochs.
        """
        kinds: dict[ProcessKind, Sequence[Unit]] = {
            ProcessKind.WORKER: self._groups,
            ProcessKind.SERVER: self._servers,
        }
        deaths = {kind: sum(unit.deaths for unit in units) for kind, units in kinds.items()}
        for unit in (*self._groups, *self._servers):
            unit.deaths = 0
        return deaths

    def close(self) -> None:
        """End all actors, and give their resources back."""
        self._calls.clear()
        if self._health.answers:
            for unit in (*self._groups, *self._servers):
                unit.kill()
            self._placement.release()

    # -- the loop ---------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Wait for an answer, process it, and request what follows."""
        if self._calls:
            ready, _ = ray.wait(list(self._calls), timeout=_LOOK_SECONDS)
        else:
            time.sleep(_LOOK_SECONDS)
            ready = []
        for reference in ready:
            call = self._calls.pop(reference)
            try:
                answer = ray.get(reference)
            except RayError as error:
                self._failed(call, error)
            else:
                self._answered(call, answer)
        self._look()
        self._decide()

    def _answered(self, call: _Call, answer: Any) -> None:
        unit, place = call.unit, call.place
        if isinstance(unit, Group):
            if call.name == "begin":
                unit.note_begun(place, answer)
            elif call.name == "save":
                self._answers[unit.index, place] = answer
            else:
                self._stepped(unit, place, call, answer)
        elif call.name == "begin":
            unit.note_begun(place, answer)
        elif call.name == "update":
            self._renew(answer)
        elif call.name == "snapshot" and call.era == self._era:
            version, state, seconds = answer
            add_seconds(self._epoch.result.servers[unit.index], seconds)
            # A copy, so that Ray can free its own.
            self._saving[version][unit.index] = np.array(state)
            if len(self._saving[version]) == len(self._servers):
                self._saved = [held for _, held in sorted(self._saving.pop(version).items())]
                self._saved_version = version

    def _stepped(self, group: Group, place: int, call: _Call, answer: Any) -> None:
        group.busy -= 1
        rank = group.index * group.size + place
        add_seconds(self._epoch.result.workers[rank].seconds, answer.seconds)
        if call.era == self._era:
            group.stepped[place] = answer
        if not group.busy:
            group.fruitless_deaths, group.failure = 0, None

    def _failed(self, call: _Call, error: RayError) -> None:
        """Find out whose failure ended a call, and recover from it if it is a death."""
        unit, place = call.unit, call.place
        failure, dead = failure_of(error), dead_actor(error)
        if failure is not None and failure.kind != "behind":
            if unit.size == 1:
                raise failure.again()
            assert isinstance(unit, Group)
            unit.failure = unit.failure or (failure, time.monotonic())
            return
        if isinstance(unit, Group) and call.name == "step":
            unit.busy -= 1
        own = unit.where[place]
        if dead is not None and own is not None and dead != own.actor:
            # One that made an argument: a server that lives no more, or not any longer.
            server = next(
                (s for s in self._servers if s.where[0] and s.where[0].actor == dead), None
            )
            if server is not None:
                self._died(server, {0: cause_of(error)})
        elif dead is not None or isinstance(error, OutOfMemoryError):
            self._died(unit, {place: cause_of(error)})
        elif call.era == self._era:
            # A gradient or parameters were lost with their node.
            self._roll_back({}, failure.line if failure else cause_of(error))

    def _look(self) -> None:
        """Look for actors that hang, for unexplained errors, and at Ray itself."""
        now = time.monotonic()
        passed = now - self._looked
        if passed < _LOOK_SECONDS:
            return
        self._looked = now
        self._health.check()
        if passed > _SUSPENDED_SECONDS:  # This process was suspended, and perhaps all others.
            self._renew(None)
        for group in self._groups:
            if group.failure is not None and now - group.failure[1] > _GRACE_SECONDS:
                raise group.failure[0].again()
        self._report_waiting(passed)
        limit = self._strategy.silence_seconds
        silent = next((c for c in self._calls.values() if now - c.since > limit), None)
        if silent is not None:
            reason = f"killed because it did not answer for {limit:g} s"
            self._died(silent.unit, {silent.place: reason})
            self._renew(None)  # The others may have waited for it.

    def _renew(self, version: int | None) -> None:
        """Let the time of calls begin now: of all, or of steps whose parameters exist since now."""
        now = time.monotonic()
        for reference, call in self._calls.items():
            unit = call.unit
            if version is None or (isinstance(unit, Group) and unit.version == version):
                self._calls[reference] = _Call(unit, call.place, call.name, now, call.era)

    def _report_waiting(self, passed: float) -> None:
        """Report actors that wait for CPUs, from time to time. This is no silence of theirs."""
        starting = [unit for unit in (*self._servers, *self._groups) if not unit.ready]
        if not starting or not self._health.answers or not self._placement.unplaced():
            if self._reported and not starting:
                self._placement.report_shared_nodes()
                self._waited = self._reported = 0.0
            return
        self._renew(None)
        self._waited += passed
        if self._waited >= self._reported + _REPORT_EVERY:
            self._reported = self._waited
            names = [f"{unit.kind.value} {unit.index * unit.size}" for unit in starting]
            reason = f"{self._waited:.0f} s so far for {', '.join(names)}, on {available()}"
            report(Event(EventKind.WAITING, reason=reason))

    # -- updates and steps ------------------------------------------------------------------------

    def _decide(self) -> None:
        """Apply the gradients that may be applied, and lease batches to the idle groups."""
        epoch = self._epoch
        if not all(server.ready for server in self._servers):
            return
        if epoch.stopping:
            for index in epoch.batches.stop(self._strategy.quorum):
                self._groups[index].release()
        while taken := self._next_update():
            self._update(taken)
        leased = [group for group in self._groups if group.idle and self._lease(group)]
        # The groups without a lease get the lowest batches.
        absent = max(0, self._strategy.quorum - len(epoch.batches.leased))
        for group in leased:
            self._step(group, epoch.batches.announce(group.index, absent))

    def _next_update(self) -> list[Group]:
        leased = [self._groups[index] for index in self._epoch.batches.leased.values()]
        waiting = [Gradient(group.index, group.version) for group in self._in_order(leased)]
        computing = [Gradient(g.index, g.version) for g in leased if not g.waiting]
        remaining = self._epoch.batches.remaining
        taken = self._rule.next_update(waiting, computing, self.version, remaining)
        return [self._groups[gradient.worker] for gradient in taken]

    def _in_order(self, leased: Sequence[Group]) -> list[Group]:
        """Return the groups whose gradients wait, in the order of their arrival."""
        waiting = [group for group in leased if group.waiting]
        self._arrived = [group for group in self._arrived if group in waiting]
        self._arrived += [group for group in waiting if group not in self._arrived]
        return self._arrived

    def _update(self, taken: Sequence[Group]) -> None:
        """Let the servers apply the gradients of groups, and discard those that come too late."""
        epoch, strategy = self._epoch, self._strategy
        staleness = self.version - taken[0].version
        rate = epoch.rate(epoch.batches.done)
        if strategy.rate_by_staleness:
            rate /= max(1, staleness)
        groups = {group.lease: group for group in taken if group.lease is not None}
        computed = {batch: group.computed for batch, group in groups.items()}
        self.version += 1
        shares = epoch.apply(self.version, staleness, computed)
        for index, server in enumerate(self._servers):
            gradients = [groups[batch].gradients[index] for batch in shares]
            method = server.actors[0].update.options(num_returns=2)
            arguments = self.version, rate, list(shares.values()), *gradients
            done, self._parameters[index] = method.remote(*arguments)
            self._note(done, server, 0, "update")
        batches = ", ".join(map(str, shares))
        report(Event(EventKind.UPDATED, reason=f"batches {batches}", version=self.version))
        for group in taken:
            group.release()
        if strategy.synchronous:
            for batch, index in list(epoch.batches.leased.items()):
                self._groups[index].release()
                epoch.batches.give_back(batch)
                epoch.result.dropped += 1
        if strategy.snapshot_every and epoch.updates % strategy.snapshot_every == 0:
            self._snapshot()

    def _lease(self, group: Group) -> bool:
        """Lease a batch to a group if it may start; return whether it got one."""
        batches = self._epoch.batches
        if self._rule.may_start(len(batches.leased)):
            group.lease = batches.lease(group.index)
        return group.lease is not None

    def _step(self, group: Group, following: int | None) -> None:
        """Let a group compute the gradient of its batch, and load the one that may follow."""
        epoch, batch, size = self._epoch, group.lease, group.size
        assert batch is not None
        indices, weights = epoch.indices(batch), epoch.weights(batch)
        group.version, group.busy, group.stepped = self.version, size, {}
        group.report(0, EventKind.LEASED, batch=BatchKey(epoch.number, batch))
        for place, actor in enumerate(group.actors):
            further = None
            if following is not None:
                samples = _part(epoch.indices(following), place, size)
                further = BatchKey(epoch.number, following), samples
            step = Step(
                BatchKey(epoch.number, batch),
                _part(indices, place, size),
                None if weights is None else _part(weights, place, size),
                number_of_samples(len(indices), place, size) / len(indices),
                group.first,
                further,
            )
            number = 1 if place else 1 + len(self._servers)
            made = actor.step.options(num_returns=number).remote(step, *self._parameters)
            if not place:
                made, *group.gradients = made
            self._note(made, group, place, "step")
        group.first = False

    def _note(self, reference: Any, unit: Unit, place: int, name: str) -> None:
        self._calls[reference] = _Call(unit, place, name, time.monotonic(), self._era)

    # -- the state of the servers and the workers -------------------------------------------------

    @property
    def _updated(self) -> bool:
        """Whether all servers have executed all updates."""
        names = ("begin", "update")
        return not any(c.unit in self._servers and c.name in names for c in self._calls.values())

    def _snapshot(self) -> None:
        """Let all servers save this version, unless they have done so or do so."""
        if self.version == self._saved_version or self.version in self._saving:
            return
        self._saving[self.version] = {}
        for server in self._servers:
            self._note(server.actors[0].snapshot.remote(), server, 0, "snapshot")

    def _settle(self) -> None:
        """Run the loop until all servers have executed and saved all updates."""
        while not self._updated or self.version != self._saved_version:
            if self._updated:
                self._snapshot()
            self._go_on()

    def _ask(self, groups: Sequence[Group]) -> None:
        """Ask workers for their buffers and random states; take over the first one's buffers."""
        self._answers.clear()
        for group in groups:
            if group.ready:
                for place, actor in enumerate(group.actors):
                    self._note(actor.save.remote(), group, place, "save")
        while any(call.name == "save" for call in self._calls.values()):
            self._go_on()
        if (0, 0) in self._answers:
            self._buffers |= self._answers[0, 0].buffers

    # -- starts, deaths and rollbacks -------------------------------------------------------------

    def _make(self, kind: ProcessKind, index: int) -> Any:
        """Make an actor, as soon as Ray's own processes answer: Ray would hang before."""
        while not self._health.answers:
            if self._stop():
                raise RayLost("Ray's own processes do not answer")
            time.sleep(_LOOK_SECONDS)
            self._health.check()
        actor: Any = ray.remote(Worker if kind is ProcessKind.WORKER else Server)
        options = self._placement.options(kind, index)
        return actor.options(**options).remote(self._placement.places.threads)

    def _begin_server(self, server: Unit) -> None:
        """Give a server the last saved state, also in place of the one that it has."""
        method = server.actors[0].begin.options(num_returns=2)
        state = self._saved[server.index]
        arguments = self._layout, server.index, self._optimizer, state
        begun, self._parameters[server.index] = method.remote(*arguments)
        self._note(begun, server, 0, "begin")

    def _start_group(self, group: Group, random: Sequence[dict[str, Tensor] | None]) -> None:
        """Start a group; ``random`` holds the states of the generators of all workers, if known."""
        group.start()
        size = group.size
        store = group.actors[0].open.remote() if size > 1 else None
        narrow = self._strategy.gradients == "bfloat16"
        for place, actor in enumerate(group.actors):
            rank = group.index * size + place
            known = (random[rank] if random else None) or {}
            generators = {name: state.numpy() for name, state in known.items()}
            saved = Saved(self._buffers, generators or None)
            member = Member(rank, size, len(self._servers), narrow)
            self._note(actor.begin.remote(self._build, member, saved, store), group, place, "begin")

    def _died(self, unit: Unit, dead: Mapping[int, str]) -> None:
        """Recover from the death of an actor."""
        if not isinstance(unit, Group):
            self._roll_back({unit.index: dead[0]}, f"server {unit.index} died: {dead[0]}")
            return
        self._forget(unit)
        self._epoch.batches.orphan(unit.index)
        unit.end(dead, "a member of its group died")
        self._start_group(unit, [])

    def _roll_back(self, dead: Mapping[int, str], reason: str) -> None:
        """Return all servers to the last saved state, starting those that died again.

        Args:
            dead: The indices of the servers that died or hang, each with the reason.
            reason: The reason of the rollback.
        """
        counts = not dead
        for index, cause in dead.items():
            server = self._servers[index]
            began = server.ready or server.starts > 1
            counts = server.end({0: cause}, "") or counts
            if not began:
                raise RunError(
                    "a server died before the training began: check that its node has enough "
                    "memory for its part of the parameters, and twice that for the optimizer's "
                    "state"
                )
        if self.version > self._furthest_version:
            self._furthest_version, self._fruitless_rollbacks = self.version, 0
        self._fruitless_rollbacks += counts
        if self._fruitless_rollbacks >= _FRUITLESS_ROLLBACKS:
            raise RunError(
                f"the servers were rolled back {_FRUITLESS_ROLLBACKS} times without getting beyond "
                f"version {self._furthest_version}; the last time: {reason}"
            )
        self._era += 1
        self._saving.clear()
        for group in self._groups:
            self._epoch.batches.orphan(group.index)
            group.release()
            if group.busy and group.size > 1:
                # Some members may wait in a collective for others that got no parameters.
                self._forget(group)
                group.end({}, "a server died")
                self._start_group(group, [])
        self.version = self._saved_version
        undone = self._epoch.undo(self.version)
        told = f"{undone} batches are queued again" if undone else "no update is undone"
        report(Event(EventKind.ROLLED_BACK, reason=told, version=self.version))
        for server in self._servers:
            self._forget(server)
            if server.index in dead:
                server.start()
            self._begin_server(server)

    def _forget(self, unit: Unit) -> None:
        """Wait no longer for the answers of a unit."""
        self._calls = {ref: call for ref, call in self._calls.items() if call.unit is not unit}


def _part(samples: Array, place: int, size: int) -> Array:
    """Return the samples that a member is sent, as many as ``number_of_samples`` says.

    Even a member that gets none has to step, because the others wait for it. It is sent the first
    one.
    """
    part = np.array_split(samples, size)[place]
    return part if len(part) else samples[:1]


def _tensors(arrays: Arrays) -> dict[str, Tensor]:
    return {name: torch.tensor(array) for name, array in arrays.items()}
