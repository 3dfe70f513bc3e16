"""Replicas: the ranks that train one model together, and what they exchange."""

import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from fineprune.errors import InputError, check_whole_number
from fineprune.labels.process_group import exchange_device, rank_and_size

Number = TypeVar("Number", bound=np.generic)

# Returns the arrays that all ranks give it, in the order of the ranks.
AllGather = Callable[[npt.NDArray[Any]], list[npt.NDArray[Any]]]


class Replicas:
    """The ranks over which counts are merged. Without a process group, it is a single process.

    Args:
        process_group: A ``torch.distributed`` group. None stands for the initialised world.
        all_gather: Exchanges arrays in place of a process group.
        num_replicas, rank: The number of ranks that call ``all_gather``, and which one this is.

    Attributes:
        group: The group as it was given.
        size: Number of ranks in the group.
        rank: Number of this rank in the group.
    """

    def __init__(
        self,
        process_group: Any = None,
        all_gather: AllGather | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        self._all_gather = all_gather
        if all_gather is not None:
            if process_group is not None or num_replicas is None or rank is None:
                raise InputError(
                    "expected all_gather together with num_replicas and rank, and without "
                    "process_group: give the numbers of the framework that has this function"
                )
            self.group, self.size, self.rank = None, num_replicas, rank
            return
        self.group = process_group
        self.rank, self.size = rank_and_size(process_group, "making a Pruner")

    def group_for_logits(self) -> Any:
        """Return the process group, without which logits cannot be exchanged."""
        if self._all_gather is not None:
            raise InputError(
                "expected record() without logits on a pruner with all_gather, since logits are "
                "exchanged by a torch process group: use a LabelWatch of your own on each rank, "
                "and merge their states after the training"
            )
        return self.group

    def late_world(self) -> int | None:
        """Return the size of a world that was initialised too late; None if there is none.

        Without a group of its own, this process then trains as if it were alone.
        """
        if self._all_gather is not None or self.group is not None:
            return None
        if not (dist.is_available() and dist.is_initialized()):
            return None
        size = dist.get_world_size()
        return size if size > self.size else None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Replicas":
        return self  # Process groups cannot be copied.

    def check_equal(self, values: Mapping[str, tuple[object, str]]) -> None:
        """Raise InputError unless all ranks have the same values. All of them must call it.

        Args:
            values: For the name of each value, the value, and what to do if the ranks differ in it.
                The first one that differs is named. Two values count as the same if their ``repr``
                is.
        """
        own = np.array([zlib.crc32(repr(value).encode()) for value, _ in values.values()])
        least, most = self.least_and_most(own)
        for (name, (_, remedy)), different in zip(values.items(), least != most, strict=True):
            if different:
                raise InputError(
                    f"expected the same {name} on every rank, got different ones: {remedy}"
                )

    def least_and_most(
        self, values: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the minimum and the maximum of an array over all ranks, elementwise."""
        negative, most = self.maximum(np.concatenate([-values, values])).reshape(2, -1)
        return -negative, most

    def sum(self, values: npt.NDArray[Number]) -> npt.NDArray[Number]:
        """Return the sum of an array over all ranks, elementwise, with its shape and dtype."""
        return self._reduced(values, np.add, dist.ReduceOp.SUM)

    def maximum(self, values: npt.NDArray[Number]) -> npt.NDArray[Number]:
        """Return the maximum of an array over all ranks, elementwise, with its shape and dtype."""
        return self._reduced(values, np.maximum, dist.ReduceOp.MAX)

    def gather(self, values: npt.NDArray[Number]) -> list[npt.NDArray[Number]]:
        """Return the arrays of all ranks, in the order of the ranks.

        Args:
            values: An array with one dimension, of the same dtype on every rank, and of any length.
        """
        if self.size == 1:
            return [values]
        lengths = [int(length[0]) for length in self._gather_equal(np.array([len(values)]))]
        if not max(lengths):
            return [values for _ in lengths]
        padded = np.zeros(max(lengths), dtype=values.dtype)
        padded[: len(values)] = values
        parts = self._gather_equal(padded)
        return [part[:length] for part, length in zip(parts, lengths, strict=True)]

    def _gather_equal(self, values: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """Return the arrays of all ranks, which have the same length."""
        if self._all_gather is not None:
            return self._checked(values, self._all_gather(values))
        own = self._tensor(values)
        parts = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(parts, own, group=self.group)
        return [part.cpu().numpy() for part in parts]

    def _checked(self, own: npt.NDArray[Any], gathered: object) -> list[npt.NDArray[Any]]:
        """Return what ``all_gather`` returned for ``own``, one array of its shape for each rank."""
        parts = [np.asarray(part) for part in gathered] if isinstance(gathered, Iterable) else []
        if [part.shape for part in parts] != [own.shape] * self.size:
            got = " and ".join(sorted({str(part.shape) for part in parts}))
            raise InputError(
                f"expected all_gather to return the {self.size} arrays of all ranks, each of the "
                f"shape {own.shape} of the one that it was given, got "
                + (f"{len(parts)} of shape {got}" if parts else repr(gathered))
                + ": start the ranks first, and do not concatenate the arrays"
            )
        return parts

    def _reduced(
        self, values: npt.NDArray[Number], function: np.ufunc, operation: Any
    ) -> npt.NDArray[Number]:
        if self.size == 1:
            return values
        if self._all_gather is not None:
            gathered: npt.NDArray[Number] = function.reduce(
                self._checked(values, self._all_gather(values)), dtype=values.dtype
            )
            return gathered
        tensor = self._tensor(values)
        dist.all_reduce(tensor, op=operation, group=self.group)
        reduced: npt.NDArray[Number] = tensor.cpu().numpy()
        return reduced

    def _tensor(self, values: npt.NDArray[Any]) -> torch.Tensor:
        return torch.tensor(values, device=exchange_device(self.group) or "cpu")


def share_of_rank(
    group_size: int, group_rank: int, num_replicas: int | None, rank: int | None
) -> tuple[int, int]:
    """Return the number of replicas and the rank of a sampler, as ``DistributedSampler`` has them.

    Args:
        group_size, group_rank: Number of ranks in the process group, and of this one.
        num_replicas: Number of ranks that share the samples; None for those of the group.
        rank: Number of this rank among them; None for its number in the group.
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
