"""Loader processes: what they do when the training is told to stop, and when it ends.

A signal that asks a run to stop often reaches all of its processes: Slurm, ``timeout`` and Ctrl-C
send it to each of them. A loader process that ended then would end the training, too, before it has
written a checkpoint. If the training is killed, its loader processes should not outlive it; torch
alone would end them after up to five seconds.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from fineprune.errors import InputError
from fineprune.interrupts import blocked

_POLL_SECONDS = 0.2

# The signals that stop a training. A terminal that is closed sends SIGHUP.
_NAMES = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")
STOPS = {getattr(signal, name) for name in _NAMES if hasattr(signal, name)}

# Those that would end a new process that has not called ``follow_training`` yet. Without
# ``sigtimedwait``, this needs SIGTERM unblocked.
_BLOCKED = STOPS if hasattr(signal, "sigtimedwait") else set()


class TrainingLoader(DataLoader[Any]):
    """A ``DataLoader`` whose processes end with the training, and not before.

    Args:
        dataset: Its method ``__getitems__`` returns a whole batch.
        parts: What to pass to this method for each batch. It may change between iterations.
        num_workers: The number of processes. There are no more of them than parts.
        start_method: How they are started; None for Python's default.
        options: Further arguments of ``DataLoader``.
    """

    def __init__(
        self,
        dataset: Any,
        parts: Sequence[Any],
        *,
        num_workers: int,
        start_method: str | None = None,
        **options: Any,
    ) -> None:
        workers = min(num_workers, len(parts))
        super().__init__(
            dataset,
            batch_sampler=parts,
            num_workers=workers,
            collate_fn=_unchanged,
            worker_init_fn=follow_training,
            multiprocessing_context=start_method if workers else None,
            # By default, the loader draws a seed for its workers from torch's global generator.
            generator=torch.Generator(),
            **options,
        )

    def __iter__(self) -> Any:
        with blocked(_BLOCKED):
            batches = super().__iter__()
        return self._in_one_line(batches)

    def _in_one_line(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches. An InputError of a loader process has its own message, as in this one.

        Torch puts the whole traceback of the loader process into the message, and its error refers
        to itself. If that kept the iterator alive, the garbage collector would finalize its queues
        first, and then wait for five seconds for each process.
        """
        try:
            yield from batches
            return
        except InputError as error:
            message = str(error).strip().rpartition(f"{InputError.__name__}: ")[2]
            error.__traceback__ = None
        del batches
        self._iterator = None  # that of persistent processes
        raise InputError(message)


def _unchanged(batch: Any) -> Any:
    return batch


def follow_training(worker: int) -> None:
    """Let this loader process end with the training, and not before. For ``worker_init_fn``.

    ``STOPS`` have no effect, except a SIGTERM from the training itself. On systems without
    ``sigtimedwait``, which tells where a signal comes from, SIGTERM ends this process: at its end,
    a training may send SIGTERM to its processes and wait for them.
    """
    if hasattr(signal, "sigtimedwait"):
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    else:
        for number in STOPS - {signal.SIGTERM}:
            signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_watch, name="follow-training", daemon=True).start()


def _watch() -> None:
    parent, training = os.getppid(), multiprocessing.parent_process()
    assert training is not None
    senders = {parent, training.pid}  # They differ with a fork server.
    # If the training died before this process came so far, another one is its parent already.
    while os.getppid() == parent and training.is_alive():
        if not hasattr(signal, "sigtimedwait"):
            time.sleep(_POLL_SECONDS)
            continue
        received = signal.sigtimedwait(STOPS, _POLL_SECONDS)
        if received and received.si_signo == signal.SIGTERM and received.si_pid in senders:
            break
    os._exit(0)
