"""Replicas: the ranks that train one model together, and what they exchange."""

import zlib
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from fineprune.errors import InputError, check_whole_number
from fineprune.labels.process_group import exchange_device, rank_and_size

Number = TypeVar("Number", bound=np.generic)


class Replicas:
    """The ranks of a ``torch.distributed`` group: its size, and the rank of this process in it.

    None stands for the initialised world; without one, it is a single process.
    """

    def __init__(self, process_group: Any = None) -> None:
        self.group = process_group
        self.rank, self.size = rank_and_size(process_group, "making a Pruner")

    def __deepcopy__(self, memo: dict[int, Any]) -> "Replicas":
        return self  # Process groups cannot be copied.

    def late_world(self) -> int | None:
        """Return the size of a world that was initialised too late, without a group of its own."""
        if self.group is not None or not (dist.is_available() and dist.is_initialized()):
            return None
        size = dist.get_world_size()
        return size if size > self.size else None

    def check_equal(self, values: Mapping[str, tuple[object, str]]) -> None:
        """Raise InputError unless all ranks have the same values. All of them must call it.

        ``values`` has, for the name of each, the value and what to do if the ranks differ in it.
        Values with the same ``repr`` are the same.
        """
        own = np.array([zlib.crc32(repr(value).encode()) for value, _ in values.values()])
        least, most = -self.maximum(-own), self.maximum(own)
        for (name, (_, remedy)), different in zip(values.items(), least != most, strict=True):
            if different:
                raise InputError(
                    f"expected the same {name} on every rank, got different ones: {remedy}"
                )

    def sum(self, values: npt.NDArray[Number]) -> npt.NDArray[Number]:
        """Return the sum of an array over all ranks, elementwise, with its shape and dtype."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def maximum(self, values: npt.NDArray[Number]) -> npt.NDArray[Number]:
        """Return the maximum of an array over all ranks, elementwise, with its shape and dtype."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def _reduced(self, values: npt.NDArray[Number], operation: Any) -> npt.NDArray[Number]:
        if self.size == 1:
            return values
        tensor = torch.tensor(values, device=exchange_device(self.group) or "cpu")
        dist.all_reduce(tensor, op=operation, group=self.group)
        reduced: npt.NDArray[Number] = tensor.cpu().numpy()
        return reduced


def share_of_rank(
    group_size: int, group_rank: int, num_replicas: int | None, rank: int | None
) -> tuple[int, int]:
    """Return the number of replicas and the rank of a sampler, as ``DistributedSampler`` has them.

    ``num_replicas`` and ``rank`` are by default those of the process group.
    """
    if num_replicas is None:
        num_replicas = group_size
    check_whole_number("num_replicas", num_replicas, 1)
    if rank is None:
        if num_replicas not in (1, group_size):
            raise InputError(
                f"expected rank together with num_replicas={num_replicas}, which is not the size "
                f"of the process group ({group_size}), got None: give both or neither"
            )
        rank = 0 if num_replicas == 1 else group_rank
    check_whole_number("rank", rank, 0)
    if rank >= num_replicas:
        raise InputError(f"expected rank in 0..{num_replicas - 1}, got {rank}")
    return num_replicas, rank


def size_of_sharded_batches(
    batch_size: int | None, processes: int, num_replicas: int | None, rank: int | None
) -> int:
    """Return the number of samples in the batches of all processes, which a framework divides."""
    if num_replicas is not None or rank is not None:
        raise InputError(
            f"expected sharded_by_loader without num_replicas and rank, since the framework "
            f"divides the batches, got num_replicas={num_replicas} and rank={rank}: leave them "
            f"out, or leave out sharded_by_loader if batch_size is that of all processes together "
            f"(split_batches)"
        )
    if batch_size is None:
        raise InputError("expected batch_size (that of one rank) with sharded_by_loader, got None")
    return check_whole_number("batch_size", batch_size, 1) * processes
