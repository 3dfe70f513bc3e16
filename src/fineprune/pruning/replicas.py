"""Replicas: the ranks that train one model together, and what they exchange."""

import os
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist


class Replicas:
    """The process group over which counts are merged. Without a group, it is a single process.

    Args:
        process_group: A ``torch.distributed`` group. None stands for the initialised world.

    Attributes:
        group: The group as it was given.
        size: Number of ranks in the group.
        rank: Number of this rank in the group.

    Raises:
        RuntimeError: A launcher has set ``WORLD_SIZE`` above 1, but no group is initialised.
    """

    def __init__(self, process_group: Any = None) -> None:
        active = dist.is_available() and dist.is_initialized()
        launched = int(os.environ.get("WORLD_SIZE", "1"))
        if launched > 1 and not active:
            raise RuntimeError(
                f"expected an initialised process group, since WORLD_SIZE is {launched}: "
                f"call torch.distributed.init_process_group() before making a Pruner"
            )
        self.group = process_group
        self.size = dist.get_world_size(process_group) if active else 1
        self.rank = dist.get_rank(process_group) if active else 0

    def sum(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the sum of an array over all ranks, elementwise; float64, any shape."""
        return self._all_reduce(values, dist.ReduceOp.SUM) if self.size > 1 else values

    def maximum(self, values: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Return the maximum of an array over all ranks, elementwise; uint8, any shape."""
        return self._all_reduce(values, dist.ReduceOp.MAX) if self.size > 1 else values

    def most(self, number: int) -> int:
        """Return the maximum of a number over all ranks."""
        if self.size == 1:
            return number
        return int(self._all_reduce(np.array([number]), dist.ReduceOp.MAX)[0])

    def _all_reduce(self, values: npt.NDArray[Any], operation: Any) -> npt.NDArray[Any]:
        # NCCL exchanges device memory only. All other backends exchange the memory of the CPU.
        on_gpu = dist.get_backend(self.group) == "nccl"
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else "cpu"
        tensor = torch.tensor(values, device=device)
        dist.all_reduce(tensor, op=operation, group=self.group)
        reduced: npt.NDArray[Any] = tensor.cpu().numpy()
        return reduced
