"""The place of this process among the ranks that share the samples, and where ranks exchange."""

from typing import Any

import torch
import torch.distributed as dist

from fineprune.errors import InputError
from fineprune.launcher import world_size


def rank_and_size(group: Any, before: str) -> tuple[int, int]:
    """Return the rank of this process in a group and the group's size; 0 and 1 without a group.

    None stands for the initialised world, which must be so ``before`` something.
    """
    active = dist.is_available() and dist.is_initialized()
    if not active:
        size = world_size()
        if size > 1:
            raise RuntimeError(
                f"expected an initialised process group, since WORLD_SIZE is {size}: "
                f"call torch.distributed.init_process_group() before {before}"
            )
        return 0, 1
    rank = dist.get_rank(group)
    if rank < 0:
        raise InputError(
            "expected a process_group to which this process belongs, got another one: give each "
            "process its own group"
        )
    return rank, dist.get_world_size(group)


def exchange_device(group: Any) -> torch.device | None:
    """Return the device whose memory a group exchanges; None for any memory of the CPU.

    NCCL exchanges the memory of the current GPU only. All other backends exchange that of the CPU.
    """
    if dist.get_backend(group) != "nccl":
        return None
    return torch.device("cuda", torch.cuda.current_device())
