"""Stops a training after a signal: the loop saves a checkpoint and then ends.

Slurm sends SIGUSR1 or SIGTERM before it ends a job, a terminal that is closed sends SIGHUP, and a
user presses Ctrl-C. The signal handlers only record the signal, unless there is nothing to save
yet. A second Ctrl-C ends the process immediately.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from fineprune.datasets.loader_process import STOPS
from fineprune.errors import Stopped


class StopRequest:
    """Records the first signal that asked this process to stop; true after that signal.

    Attributes:
        number: The number of the signal; None before the first signal.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._place: str | None = None

    def __bool__(self) -> bool:
        return self.number is not None

    def check(self, place: str) -> None:
        """Raise ``Stopped`` if a signal was recorded; ``place`` is a phrase for its message."""
        if self.number is not None:
            raise Stopped(self.number, place)

    def note(self, number: int, frame: FrameType | None = None) -> None:
        """Record a signal. This is the handler for ``signal.signal``."""
        if self.number is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = self.number or number
        if self._place is not None:
            raise Stopped(self.number, self._place)

    @contextlib.contextmanager
    def at_once(self, place: str) -> Iterator[None]:
        """Let a signal raise ``Stopped`` inside the block, which has nothing to save."""
        self._place = place
        try:
            self.check(place)
            yield
        except Exception:
            self.check(place)  # Code in the block may have turned it into another exception.
            raise
        finally:
            self._place = None
        self.check(place)


@contextlib.contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Catch the signals that ask this process to stop, and restore the handlers after the block.

    Only the main thread can catch signals. In any other thread, the request is never set. SIGHUP
    stays ignored if it is, as under ``nohup``.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    hangup = getattr(signal, "SIGHUP", None)
    ignored = hangup is not None and signal.getsignal(hangup) == signal.SIG_IGN
    caught = STOPS - {hangup} if ignored else STOPS
    before = {number: signal.signal(number, request.note) for number in caught}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
