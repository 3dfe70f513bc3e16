"""The coordinator: it directs the servers and the groups of workers of a training.

It is a loop over calls to other processes: when a call ends, it starts the calls that follow. A
group computes a gradient and stages it on all servers, and only then are all servers told to apply
it. Therefore the death of a process leaves no gradient applied on some of the servers only, and no
gradient is applied twice.

An epoch ends when each of its batches is applied or lost, and only then does the next one begin.
Therefore an epoch has the same meaning under every strategy, and what is decided between two
epochs, such as which samples the next one skips, is based on all losses of the previous one.
"""

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fineprune.distributed.parameter_servers.epoch_state import EpochResult, EpochState
from fineprune.distributed.parameter_servers.events import (
    Event,
    EventKind,
    ProcessKind,
    Report,
    reporter,
)
from fineprune.distributed.parameter_servers.flat_layout import flat_layout, not_served
from fineprune.distributed.parameter_servers.link import open_store
from fineprune.distributed.parameter_servers.ray_cluster import (
    REPORT_EVERY,
    Call,
    Cluster,
    Died,
    Silent,
    available,
)
from fineprune.distributed.parameter_servers.rendezvous import Rendezvous
from fineprune.distributed.parameter_servers.scheduler import Scheduler
from fineprune.distributed.parameter_servers.server import MakeOptimizer
from fineprune.distributed.parameter_servers.server_group import ServerDied, ServerGroup
from fineprune.distributed.parameter_servers.worker import Buffers, Build
from fineprune.distributed.parameter_servers.worker_group import (
    GroupBroken,
    GroupPhase,
    WorkerGroup,
)
from fineprune.distributed.strategy import Strategy
from fineprune.errors import InputError, RunError

R = TypeVar("R")

# If a group dies this many times without computing a gradient in between, the training ends.
_FRUITLESS_DEATHS = 3
# The interval, in seconds, at which the loop looks for processes that hang.
_LOOK_SECONDS = 0.5


class Coordinator:
    """Trains a model on the servers and workers of a cluster, epoch by epoch.

    Args:
        cluster: The cluster, with places for the strategy's groups, members and servers.
        strategy: The strategy, which determines which processes wait for others.
        model: The model whose parameters and buffers the training starts from. It is not changed.
            Its frozen parameters (``requires_grad=False``), which must also be frozen in the
            replicas, are not trained and not held by servers.
        build: Function that makes a replica, given its rank. It must be picklable. The parameters
            of the replica are overwritten.
        optimizer: Function that makes a server's optimizer; see ``ParameterServer``. It must be
            picklable.
        snapshots: The folder for the servers' snapshots, which all nodes must share. It is created
            here and removed by ``close``.
        snapshot_every: The number of updates between two snapshots inside an epoch. With 0,
            snapshots are written at the end of each epoch only.
        state: The state of an earlier training, which this one continues. It must have the same
            number of servers.
        timeout_seconds: How long each message between a worker and a server may take.
        on_event: Called with each event, in the thread that calls the coordinator. Events are also
            logged.

    Raises:
        InputError: The model does not fit, or the state is of another layout.
        RunError: A server died before all servers had written their first snapshot.
    """

    def __init__(
        self,
        cluster: Cluster,
        strategy: Strategy,
        model: nn.Module,
        build: Build,
        optimizer: MakeOptimizer,
        snapshots: Path,
        *,
        snapshot_every: int = 0,
        state: dict[str, Any] | None = None,
        timeout_seconds: float = 60.0,
        on_event: Report | None = None,
    ) -> None:
        self._cluster = cluster
        self._strategy = strategy
        self._layout = flat_layout(model, strategy.servers)
        if state is not None and state["layout"] != self._layout.contents:
            raise InputError(
                "expected a state of the same model and number of servers, got a different one: "
                "resume with the settings that it was made with"
            )
        self._log = reporter(on_event)
        self._folder = snapshots
        self._folder.mkdir(parents=True, exist_ok=True)
        self._epoch = EpochState(0, [], None, lambda applied: 0.0, 0)
        self._deaths = dict.fromkeys(ProcessKind, 0)  # since the last ``take_deaths``
        self._looked = time.monotonic()
        self._waited = 0.0  # how long processes have waited for CPUs, in seconds
        self._reported = 0.0  # the value of ``_waited`` when it was last reported
        # The buffers and, because servers do not hold them either, the frozen parameters.
        self._buffers: Buffers = (
            {name: tensor.cpu().numpy().copy() for name, tensor in not_served(model).items()}
            if state is None
            else state["buffers"]
        )
        self._store = open_store(cluster.host, timeout_seconds=timeout_seconds)
        rendezvous = Rendezvous(
            cluster.host, self._store.port, timeout_seconds, strategy.gradients == "bfloat16"
        )
        self._servers = ServerGroup(
            cluster,
            strategy,
            self._layout,
            self._layout.flat(model).cpu(),
            optimizer,
            rendezvous,
            snapshots,
            None if state is None else state["servers"],
            self._report,
        )
        self._groups = [
            WorkerGroup(index, cluster, strategy, build, rendezvous, self._report)
            for index in range(strategy.groups)
        ]
        self._scheduler = Scheduler(
            strategy, self._servers, self._groups, snapshot_every, self._report
        )
        try:
            for group in self._groups:  # they start at the same time as the servers
                group.start(self._buffers)
            self._settle()
            self._servers.snapshot()
            self._settle()
        except BaseException:
            self.close()
            raise

    # -- public methods ---------------------------------------------------------------------------

    def wait_for_workers(self, stop: Callable[[], bool] | None = None) -> None:
        """Wait until all workers have joined, so that no epoch's time includes their start.

        Args:
            stop: Function that is called repeatedly. If it returns True, this method returns.

        Raises:
            RunError: A group died repeatedly.
        """
        while any(group.joining or group.pending for group in self._groups):
            if stop is not None and stop():
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
        stop: Callable[[], bool] | None = None,
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
        """
        self._epoch = EpochState(
            epoch, batches, weights, rate, self._servers.version, applied, stop
        )
        for group in self._groups:
            if group.phase is GroupPhase.IDLE:
                group.rest()
        self._scheduler.decide(self._epoch)
        while True:
            while self._epoch.ledger.remaining or self._servers.pending:
                self._go_on()
            self._servers.snapshot()
            if not self._servers.pending:
                return self._epoch.finish()

    def load_into(self, model: nn.Module) -> None:
        """Copy the parameters and buffers into a model. No epoch may be running.

        Each replica has its own normalisation statistics; those of the first group's leader are
        used.
        """
        self._layout.load(model, torch.cat(self._ask(self._servers.parameters)))
        buffers = self.buffers()
        for name, tensor in not_served(model).items():
            tensor.copy_(torch.from_numpy(np.array(buffers[name])))

    def buffers(self) -> Buffers:
        """Return the buffers of the first group's leader, and the frozen parameters.

        No epoch may be running. If that process has died or hangs, the buffers are those of the
        last successful call, or those that the training started from.
        """
        first = self._groups[0]
        if not first.starts:  # a group that starts has not loaded any buffers yet
            try:
                self._buffers = {**self._buffers, **first.buffers()}
            except (Died, Silent) as error:
                self._servers.forget(first.name)
                self._replace(first, {0: str(error)}, str(error))
        return self._buffers

    def state(self) -> dict[str, Any]:
        """Return everything that a later training needs to continue. No epoch may be running.

        It holds strings, bytes (in the format of ``torch.save``) and NumPy arrays.
        """
        return {
            "layout": self._layout.contents,
            "servers": self._ask(self._servers.state),
            "buffers": self.buffers(),
        }

    def take_deaths(self) -> dict[ProcessKind, int]:
        """Return the number of workers and of servers that died since the last call.

        They include those whose deaths are noticed before the first epoch or between two epochs.
        """
        taken, self._deaths = self._deaths, dict.fromkeys(ProcessKind, 0)
        return taken

    def close(self) -> None:
        """End all processes and remove the snapshots."""
        for group in self._groups:
            group.kill()
        self._servers.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- event loop -------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Wait until calls end, process their results, and start the calls that follow."""
        calls = list(self._servers.pending)
        for group in self._groups:
            calls += group.pending
        if not calls:
            left = self._epoch.ledger.remaining
            raise RuntimeError(f"expected a pending call for {left} batches, found none: a bug")
        for call in self._cluster.wait(calls, _LOOK_SECONDS):
            with self._recovering():
                self._handle(call)
            self._scheduler.decide(self._epoch)
        if time.monotonic() - self._looked >= _LOOK_SECONDS:
            with self._recovering():
                self._look()
            self._scheduler.decide(self._epoch)

    def _settle(self) -> None:
        """Run the loop until no call to a server is pending."""
        while self._servers.pending:
            self._go_on()

    def _ask(self, request: Callable[[], list[Call[R]]]) -> list[R]:
        """Return the answers of all servers; repeat the request if a server dies."""
        while True:
            self._settle()
            calls = request()
            left = calls
            with self._recovering():
                while left:
                    ended = self._cluster.wait(left, _LOOK_SECONDS)
                    left = [call for call in left if call not in ended]
                    self._look()
                return self._servers.results(calls)

    def _handle(self, call: Call[Any]) -> None:
        """Process the result of a call, and start the next phase of the groups that awaited it.

        Raises:
            ServerDied: A server died.
        """
        if call in self._servers.pending:
            self._epoch.add_seconds(self._servers.finish(call))
        for group in self._groups:
            if call in group.pending:
                try:
                    self._epoch.add_seconds(group.finish(call))
                except GroupBroken as broken:
                    self._servers.check(silent_is_dead=not broken.certain)
                    self._servers.forget(group.name)
                    self._replace(group, broken.dead, broken.reason)
            if not group.pending:
                self._advance(group)

    def _advance(self, group: WorkerGroup) -> None:
        """Start the next phase of a group that has no pending call."""
        match group.phase:
            case GroupPhase.STARTING if self._servers.ready:
                group.connect(self._servers)
            case GroupPhase.CONNECTING:
                group.phase = GroupPhase.IDLE
            case GroupPhase.COMPUTING | GroupPhase.PUSHING if group.lease is None:
                group.fruitless_deaths = 0
                group.phase = GroupPhase.IDLE  # an update was made without this gradient
            case GroupPhase.COMPUTING:
                group.fruitless_deaths = 0
                group.push(self._servers)
            case GroupPhase.PUSHING if group.lease is not None:
                group.note_step()
                self._epoch.ledger.stage(group.lease)

    # -- deaths -----------------------------------------------------------------------------------

    def _look(self) -> None:
        """Look for processes that hang, and report those that wait for CPUs.

        Raises:
            ServerDied: A server died or hangs.
        """
        # If this process was suspended, that time does not count as silence of other processes.
        seconds = min(time.monotonic() - self._looked, 2 * _LOOK_SECONDS)
        self._looked = time.monotonic()
        self._servers.add_silence(seconds)
        if self._servers.answering:  # otherwise, workers may be silent because of a server
            for group in self._groups:
                try:
                    group.add_silence(seconds)
                except GroupBroken as broken:
                    self._servers.forget(group.name)
                    self._replace(group, broken.dead, broken.reason)
        self._report_waiting(seconds)

    def _report_waiting(self, seconds: float) -> None:
        unplaced = [*self._servers.unplaced, *(w for g in self._groups for w in g.unplaced)]
        if not unplaced:
            if self._reported:
                self._cluster.report_shared_nodes()
            self._waited = self._reported = 0.0
            return
        self._waited += seconds
        if self._waited >= self._reported + REPORT_EVERY and self._cluster.unplaced():
            self._reported = self._waited
            reason = f"{self._waited:.0f} s so far for {', '.join(unplaced)}, on {available()}"
            self._report(Event(EventKind.WAITING, reason=reason))

    def _replace(self, group: WorkerGroup, dead: Mapping[int, str], reason: str) -> None:
        """Restart a group, and queue its batch again.

        Args:
            group: The group.
            dead: The members that died or hang, each with the reason.
            reason: Why the other members have to be restarted.

        Raises:
            RunError: The group died repeatedly, without computing a gradient in between.
        """
        self._epoch.ledger.orphan(group.index)
        group.end(dead, "a member of its group died" if dead else reason)
        if dead:
            group.fruitless_deaths += 1
        if group.fruitless_deaths == _FRUITLESS_DEATHS:
            raise RunError(
                f"group {group.index} died {group.fruitless_deaths} times without a batch in "
                f"between; the last time: {reason}"
            )
        group.start(self._buffers)

    @contextlib.contextmanager
    def _recovering(self) -> Iterator[None]:
        """If a server dies, roll all servers back to the last common version, and reconnect."""
        try:
            yield
        except ServerDied:
            for group in self._groups:
                dead, _ = group.probe()
                if dead or group.phase is GroupPhase.CONNECTING:
                    # It may be waiting for the dead server to make a link, which cannot be aborted.
                    self._replace(group, dead, "a server died")
                else:
                    self._epoch.ledger.orphan(group.index)
                    group.reconnect()
            self._servers.roll_back()
            lose = self._strategy.undone_batches == "lose"
            batches = self._epoch.undo(self._servers.version, lose=lose)
            fate = "lost" if lose else "queued again"
            reason = f"{batches} batches are {fate}" if batches else "no update is undone"
            version = self._servers.version
            self._report(Event(EventKind.ROLLED_BACK, reason=reason, version=version))

    def _report(self, event: Event) -> None:
        """Log an event, and count it if it is a death."""
        if event.kind is EventKind.DIED:
            assert event.process is not None
            self._deaths[event.process] += 1
            if event.process is ProcessKind.SERVER:
                self._epoch.result.server_deaths += 1
            else:
                self._epoch.result.worker_deaths += 1
        self._log(event)
