"""The process group of ranks that a test spawns."""

import contextlib
import socket
import time

import torch
import torch.distributed as dist

_left: list[object] = []


def free_port():
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launched(rank, port, size=2):
    """Return the environment that torchrun gives to a rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "fineprune",
    }


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
