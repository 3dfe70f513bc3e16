"""Stopping in good order: a signal asks for it, the loop saves a checkpoint and ends.

Slurm sends SIGUSR1 or SIGTERM before it takes a machine away, and a user presses Ctrl-C. The
handlers only remember the signal, so that nothing is interrupted halfway. A second Ctrl-C ends the
process at once.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name)
)


class Stopped(Exception):
    """The run was told to stop, and its state is saved.

    Attributes:
        number: The signal that told it.
        place: How far it was.
    """

    def __init__(self, number: int, place: str) -> None:
        super().__init__(number, place)  # as given, so that it can be pickled
        self.number = number
        self.place = place

    def __str__(self) -> str:
        return f"stopped by {signal.Signals(self.number).name} {self.place}"


class StopRequest:
    """Remembers the first signal that asked this process to stop.

    Attributes:
        number: The signal; None as long as there was none.
    """

    def __init__(self) -> None:
        self.number: int | None = None

    def __bool__(self) -> bool:
        return self.number is not None

    def note(self, number: int, frame: FrameType | None = None) -> None:
        """Remember a signal; a handler for ``signal.signal``."""
        if self.number is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = self.number or number


@contextlib.contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Catch the signals that ask this process to stop, as long as the block runs.

    Only the main thread can catch signals; in another one the request never comes.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request.note) for number in _SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
