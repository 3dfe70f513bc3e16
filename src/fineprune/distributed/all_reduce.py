"""Synchronous data parallelism by all-reduce: ``torch.distributed`` under ``torchrun``, with DDP.

Each process trains its part of every batch on its own replica of the model, and DDP averages the
gradients in the backward pass. Each replica has its own normalisation statistics; those of rank 0
are saved.
"""

import contextlib
import datetime
import inspect
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from fineprune.errors import InputError, RunError, first_line
from fineprune.launcher import launched

_Result = TypeVar("_Result")

# torch 2.13 renamed the argument.
_SYNC_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    else "broadcast_buffers"
)

# The interval at which rank 0 looks for the other ranks when they start.
_POLL_SECONDS = 0.02
# How long the ranks wait for what rank 0 does alone.
_LONGEST_WORK = datetime.timedelta(days=7)
# The group that was left last. A model wrapped by DDP holds its group too, from C++, and may exist
# longer than ``joined``. If DDP had the last reference, it would keep the GIL while the threads of
# the group end, which they cannot do without the GIL. Python releases the GIL for that.
_kept: list[Any] = []


@dataclass(frozen=True)
class RankGroup:
    """The processes that train one model together, and the number of this one, from 0."""

    rank: int = 0
    size: int = 1

    @property
    def main(self) -> bool:
        """Whether this process writes files and evaluates."""
        return self.rank == 0

    @property
    def _store(self) -> Store:
        return dist.distributed_c10d._get_default_store()

    def replicate(self, model: nn.Module, forward: nn.Module) -> nn.Module:
        """Wrap ``forward`` (the model, or the model compiled) so that gradients are averaged."""
        if self.size == 1:
            return forward
        device = next(model.parameters()).device
        # Buffers are not sent in every step, because each rank normalises by its own batches.
        options: dict[str, Any] = {_SYNC_BUFFERS: False}
        ids = [device.index] if device.type == "cuda" else None
        return DistributedDataParallel(forward, device_ids=ids, **options)

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over all ranks. The argument is not changed."""
        return self._all_reduced(value, dist.ReduceOp.SUM)

    def maximum(self, value: torch.Tensor) -> torch.Tensor:
        """Return the elementwise maximum over all ranks. The argument is not changed."""
        return self._all_reduced(value, dist.ReduceOp.MAX)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in the order of the ranks. They must be picklable."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def from_main(self, ask: Callable[[], _Result]) -> _Result:
        """Return on all ranks what a function returns on rank 0, or raise its InputError."""
        if self.size == 1:
            return ask()
        told: list[Any] = [None, None]
        if self.main:
            try:
                told[0] = ask()
            except InputError as error:
                told[1] = str(error)
        dist.broadcast_object_list(told, src=0)
        if told[1] is not None:
            raise InputError(told[1])
        result: _Result = told[0]
        return result

    @contextlib.contextmanager
    def wait_for_main(self, work: str) -> Iterator[None]:
        """Let the other ranks wait at the end of the block until rank 0 has ended it, too.

        In a collective they would wait for ten to thirty minutes, and then fail. ``work`` names
        what rank 0 does in the block, only once.
        """
        try:
            yield
        finally:  # After an error of rank 0, the others fail in their next collective.
            if self.size > 1 and self.main:
                self._store.set(work, "")
            elif self.size > 1:
                self._store.wait([work], _LONGEST_WORK)

    def leave_together(self) -> None:
        """Wait for all ranks, so that none closes a connection that another still uses.

        ``joined`` does this at its end. Call it before an exception that all ranks raise together.
        """
        if self.size == 1:
            return
        self._store.set(f"done-{self.rank}", "")
        # If rank 0 hosts the store, the store ends with rank 0, which waits until all are done.
        with contextlib.suppress(RuntimeError):
            self._store.wait([f"done-{rank}" for rank in range(self.size)])

    def _all_reduced(self, value: torch.Tensor, operation: Any) -> torch.Tensor:
        if self.size == 1:
            return value
        result = value.clone()
        dist.all_reduce(result, op=operation)
        return result


class StopVote:
    """Lets all ranks stop after the same step if one of them is asked to stop.

    Each vote is exchanged over a separate Gloo group while the next step is computed, so that no
    step waits for it, on whichever device. All of ``ranks`` must create the vote.
    """

    def __init__(self, ranks: RankGroup) -> None:
        self._group = dist.new_group(backend="gloo") if ranks.size > 1 else None
        self._votes = torch.zeros(1, dtype=torch.int32)
        self._exchange: Any = None

    def says_stop(self, asked: bool) -> bool:
        """Vote (``asked``), and return whether any rank voted to stop in the previous call.

        Every rank must call this after the same steps. A single process gets its own vote at once.
        """
        if self._group is None:
            return asked
        decided = False
        if self._exchange is not None:
            self._exchange.wait()
            decided = bool(self._votes.item())
        self._votes.fill_(int(asked))
        self._exchange = dist.all_reduce(self._votes, group=self._group, async_op=True)
        return decided


@contextlib.contextmanager
def joined(device: str) -> Iterator[RankGroup]:
    """Join the processes that ``torchrun`` started, and leave them at the end of the block.

    If the caller has initialised a process group, that group is used and stays initialised. The
    device ``cuda`` selects NCCL and the GPU with this process's local rank; ``cpu`` selects Gloo.

    Raises:
        InputError: There are more processes on this machine than GPUs, or the device has a number,
            or the launcher has not set what they need to meet.
        RunError: The processes cannot connect to each other.
    """
    if dist.is_initialized():
        yield RankGroup(dist.get_rank(), dist.get_world_size())
        return
    found = launched()
    if found.size == 1:
        yield RankGroup()
        return
    on_gpu = device.startswith("cuda")
    if on_gpu and found.local_rank is None:
        raise InputError(
            f"expected the environment of a launcher such as torchrun, got WORLD_SIZE={found.size} "
            f"without LOCAL_RANK: start it with torchrun, or unset WORLD_SIZE"
        )
    if on_gpu and device != "cuda":
        raise InputError(
            f"expected run.device without a number for several processes, each with its own GPU, "
            f"got {device!r}: set run.device=cuda"
        )
    if on_gpu and (local := found.local_rank) is not None:
        if local >= torch.cuda.device_count():
            raise InputError(
                f"expected at most {torch.cuda.device_count()} processes on this machine, one per "
                f"GPU, got local rank {local}: start torchrun with a smaller --nproc-per-node"
            )
        torch.cuda.set_device(local)
    try:
        with _ended_by_ctrl_c():
            store, rank, size = next(rendezvous("env://"))
            # torchrun may keep its store, with the addresses of dead ranks, when it restarts them.
            of_this_start = PrefixStore(_name_of_start(store, rank, size), store)
            backend = "nccl" if on_gpu else "gloo"
            dist.init_process_group(backend, store=of_this_start, rank=rank, world_size=size)
    except (RuntimeError, ValueError) as error:  # Such as for GLOO_SOCKET_IFNAME without a device.
        raise RunError(f"rank {found.rank} cannot join the others: {first_line(error)}") from error
    try:
        ranks = RankGroup(rank, size)
        yield ranks
        ranks.leave_together()
    finally:
        _kept[:] = [dist.group.WORLD]
        dist.destroy_process_group()


@contextlib.contextmanager
def _ended_by_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C end this process while torch waits for other ranks, deaf to Python's handler."""
    of_python = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not of_python or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _name_of_start(store: Store, rank: int, size: int) -> str:
    """Return a name that the ranks of this start share, and no earlier rank of the same store has.

    Nothing in the environment is one: after a failure on one node, torchrun counts the restarts of
    each node differently. So rank 0 draws a name and tells it to each rank that asks, until all
    ranks have confirmed it.
    """
    own = uuid.uuid4().hex
    if rank:
        store.set(f"start/asks/{rank}", own)
        name: str = store.get(f"start/name for {own}").decode()
        store.set(f"start/{name}/{rank}", "")
        return name
    left = set(range(1, size))
    while left := {other for other in left if not store.check([f"start/{own}/{other}"])}:
        for other in left:
            if store.check([f"start/asks/{other}"]):
                store.set(f"start/name for {store.get(f'start/asks/{other}').decode()}", own)
        time.sleep(_POLL_SECONDS)
    return own
