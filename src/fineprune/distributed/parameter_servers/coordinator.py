"""The coordinator: it directs the servers and the groups of workers of a training.

It is a loop over messages. A group computes a gradient and pushes it to all servers, and only when
all of them have confirmed it are all servers told to apply it. Therefore the death of a process
leaves no gradient applied on some of the servers only, and no gradient is applied twice. The update
and the next step of the group are requested at the same time.

An epoch ends when each of its batches is applied or lost, and only then does the next one begin.
Therefore an epoch has the same meaning under every strategy, and what is decided between two
epochs, such as which samples the next one skips, is based on all losses of the previous one.
"""

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore

from fineprune.distributed.parameter_servers.epoch_state import EpochResult, EpochState
from fineprune.distributed.parameter_servers.events import ProcessKind
from fineprune.distributed.parameter_servers.flat_layout import flat_layout, not_served
from fineprune.distributed.parameter_servers.link import open_store
from fineprune.distributed.parameter_servers.messages import (
    Admit,
    Arrays,
    Message,
    Stepped,
    Written,
)
from fineprune.distributed.parameter_servers.processes import Cluster, Ended, Process
from fineprune.distributed.parameter_servers.recovery import Recovery
from fineprune.distributed.parameter_servers.rendezvous import Rendezvous
from fineprune.distributed.parameter_servers.scheduler import Scheduler
from fineprune.distributed.parameter_servers.server import MakeOptimizer
from fineprune.distributed.parameter_servers.server_group import ServerGroup
from fineprune.distributed.parameter_servers.worker import Build
from fineprune.distributed.parameter_servers.worker_group import WorkerGroup
from fineprune.distributed.strategy import Strategy
from fineprune.errors import InputError

# The interval, in seconds, at which the loop looks for processes that hang.
_LOOK_SECONDS = 0.5


class Coordinator:
    """Trains a model on the servers and workers of a cluster, epoch by epoch.

    The processes are started at once. Methods that need them wait for them.

    Args:
        cluster: The cluster, with places for the strategy's groups, members and servers.
        strategy: The strategy, which determines which processes wait for others, how often the
            servers write snapshots, and how long everything may take.
        model: The model whose parameters and buffers the training starts from. It is not changed.
            Its frozen parameters (``requires_grad=False``), which must also be frozen in the
            replicas, are not trained and not held by servers.
        build: Function that makes a replica, given its rank. It must be picklable. The parameters
            of the replica are overwritten.
        optimizer: Function that makes a server's optimizer; see ``ParameterServer``. It must be
            picklable.
        snapshots: The folder for the servers' snapshots, which all nodes must share. It is created
            here and removed by ``close``.
        state: The state of an earlier training, which this one continues. It must have the same
            number of servers.

    Raises:
        InputError: The model does not fit, or the state is of another layout.
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
        state: dict[str, Any] | None = None,
    ) -> None:
        self._cluster = cluster
        self._strategy = strategy
        self._layout = flat_layout(model, strategy.servers)
        if state is not None and state["layout"] != self._layout.contents:
            raise InputError(
                "expected a state of the same model and number of servers, got a different one: "
                "resume with the same settings"
            )
        self._folder = snapshots
        self._folder.mkdir(parents=True, exist_ok=True)
        self._epoch = EpochState(0, [], None, lambda applied: 0.0, strategy)
        self._looked = time.monotonic()
        # The buffers and, because servers do not hold them either, the frozen parameters.
        tensors = not_served(model) if state is None else state["buffers"]
        buffers = {name: tensor.cpu().numpy().copy() for name, tensor in tensors.items()}
        store = open_store(cluster.host, timeout_seconds=strategy.link_seconds)
        self._store: TCPStore | None = store
        rendezvous = Rendezvous(
            cluster.host,
            store.port,
            strategy.link_seconds,
            strategy.gradients == "bfloat16",
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
        )
        self._groups = [
            WorkerGroup(index, cluster, strategy, build, rendezvous)
            for index in range(strategy.groups)
        ]
        self._scheduler = Scheduler(strategy, self._servers, self._groups)
        self._recovery = Recovery(
            cluster, strategy, self._servers, self._groups, self._epoch, buffers
        )
        for group in self._groups:
            first = group.index * group.size
            saved = [] if state is None else state["random"][first : first + group.size]
            random = [one and {kind: held.numpy() for kind, held in one.items()} for one in saved]
            group.start(buffers, random)

    # -- public methods ---------------------------------------------------------------------------

    def wait_for_workers(self, stop: Callable[[], bool] | None = None) -> None:
        """Wait until all processes have joined, so that no epoch's time includes their start.

        Args:
            stop: Function that is called repeatedly. If it returns True, this method returns.

        Raises:
            RunError: A group died repeatedly, or a server before all servers had started.
        """
        while not self._settled() or any(group.joining for group in self._groups):
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
        self._settle()
        self._epoch = self._recovery.epoch = EpochState(
            epoch,
            batches,
            weights,
            rate,
            self._strategy,
            applied,
            stop,
        )
        for group in self._groups:
            group.begin_epoch()
        self._scheduler.decide(self._epoch)
        while self._epoch.ledger.remaining or not self._settled():
            self._go_on()
        return self._epoch.finish()

    def load_into(self, model: nn.Module) -> None:
        """Copy the parameters and buffers into a model. No epoch may be running.

        Each replica has its own normalisation statistics; those of the first group's leader are
        used. If that process has died or hangs, they are those of the last successful call, or
        those that the training started from.
        """
        self._settle()
        self._layout.load(model, self._servers.parameters())
        self._ask(self._groups[:1])
        for name, tensor in not_served(model).items():
            tensor.copy_(torch.tensor(self._recovery.buffers[name]))

    def state(self) -> dict[str, Any]:
        """Return everything that a later training needs to continue. No epoch may be running.

        It holds a string and tensors on the CPU: the servers' parts (uint8, in the format of
        ``torch.save``), the buffers, and the random state of each worker (None if it is being
        started).
        """
        self._settle()
        random = self._ask(self._groups)
        return {
            "layout": self._layout.contents,
            "servers": self._servers.state(),
            "buffers": _tensors(self._recovery.buffers),
            "random": [one and _tensors(one) for one in random],
        }

    def take_deaths(self) -> dict[ProcessKind, int]:
        """Return the number of workers and of servers that died since the last call.

        They include those whose deaths are noticed before the first epoch or between two epochs.
        """
        workers = sum(group.deaths for group in self._groups)
        deaths = {ProcessKind.WORKER: workers, ProcessKind.SERVER: self._servers.deaths}
        self._servers.deaths = 0
        for group in self._groups:
            group.deaths = 0
        return deaths

    def close(self) -> None:
        """End all processes and remove the snapshots."""
        for group in self._groups:
            group.kill()
        self._servers.kill()
        # The coordinator is in reference cycles, so the garbage collector deletes it at any time.
        # In a process that was forked, such as a loader process, the thread of the store does not
        # exist, and deleting the store would crash the process.
        self._store = None
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- the loop ---------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Wait for messages, process them, and request what follows."""
        for process, message in self._cluster.poll(_LOOK_SECONDS):
            self._handle(process, message)
        passed = time.monotonic() - self._looked
        if passed >= _LOOK_SECONDS:
            self._looked = time.monotonic()
            # If this process was suspended, that time does not count as silence of other processes.
            self._recovery.look(min(passed, 2 * _LOOK_SECONDS))
        if self._servers.ready:
            for group in self._groups:
                if group.connectable:
                    self._servers.send(Admit(group.name))
                    group.connect()
        self._scheduler.decide(self._epoch)

    def _handle(self, process: Process, message: Message | Ended) -> None:
        is_worker = process.kind is ProcessKind.WORKER
        index, place = divmod(process.index, self._strategy.group)
        owner: WorkerGroup | ServerGroup = self._groups[index] if is_worker else self._servers
        if process not in owner.processes:
            return  # It was replaced because of an earlier message.
        if isinstance(message, Ended):
            self._recovery.ended(process, message.reason)
            return
        if isinstance(message, Stepped | Written):
            self._epoch.add_seconds(process.kind, process.index, message.seconds)
        if isinstance(owner, ServerGroup):
            owner.receive(process.index, message)
        elif owner.receive(place, message):
            assert owner.lease is not None
            self._epoch.ledger.stage(owner.lease)

    def _settled(self) -> bool:
        """Return whether all servers have written a snapshot of this version; request it if not."""
        if self._servers.ready:
            self._servers.snapshot()
        return self._servers.saved

    def _settle(self) -> None:
        """Run the loop until all servers have executed all updates and written a snapshot.

        A server that died before is noticed, because each has to answer.
        """
        for server in self._servers.processes:
            server.ping()
        while not self._settled() or any(server.pinged for server in self._servers.processes):
            self._go_on()

    def _ask(self, groups: Sequence[WorkerGroup]) -> list[Arrays | None]:
        """Take over the buffers of the first group's leader, and return the workers' random states.

        A group that is being started has neither.
        """
        for group in groups:
            if group.built:
                group.save()
        while any(group.saving for group in groups):
            self._go_on()
        first = groups[0].saved.get(0)
        if first is not None:
            self._recovery.buffers = {**self._recovery.buffers, **first.buffers}
        return [
            group.saved[place].random if place in group.saved else None
            for group in groups
            for place in range(group.size)
        ]


def _tensors(arrays: Arrays) -> dict[str, Tensor]:
    return {name: torch.tensor(array) for name, array in arrays.items()}
