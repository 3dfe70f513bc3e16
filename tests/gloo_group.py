"""The process group of ranks that a test spawns."""

import contextlib
import time

import torch
import torch.distributed as dist

_left: list[object] = []


@contextlib.contextmanager
def gloo_group(rank, folder, size=2):
    """Join the group of ranks that meet in a file of the folder, and leave it at the end."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    try:
        yield
    finally:
        leave_group()


def leave_group():
    """Leave the process group without freeing it.

    A thread of torch 2.6 may still free the tensors of the last exchange, for which it needs
    Python's lock, and the thread that frees the group waits for it, holding this lock. A process
    that ends meanwhile is aborted, so it waits.
    """
    _left.append(dist.group.WORLD)
    dist.destroy_process_group()
    if torch.__version__ < "2.7":
        time.sleep(0.5)
