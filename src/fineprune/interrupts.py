"""What an interrupt must not leave half done, and processes that signals must not reach."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any, ClassVar

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Held:
    """The state of this process: whether a block is in progress, and what waits for its end."""

    in_block = False
    waiting: ClassVar[list[tuple[int, FrameType | None]]] = []
    handlers: ClassVar[dict[int, Any]] = {}


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Let Ctrl-C, or a request to terminate, take effect after the block instead of inside of it.

    A notebook stops a cell in this way, and goes on with the same objects when the cell is run
    again. A second signal takes effect at once, since the block may wait for something that never
    comes. Only the main thread receives signals. A signal without a handler of Python, as SIGTERM
    is by default, ends the process as always. A handler that is not Python's, as that of
    ``faulthandler.register``, is replaced.
    """
    if _Held.in_block or threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        _Held.in_block = True
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if handler is not _hold_back:  # It is, if a signal came while handlers were put back.
                _Held.handlers[number] = handler
            if callable(handler):
                signal.signal(number, _hold_back)
        yield
    finally:
        _end()


@contextlib.contextmanager
def blocked(signals: Iterable[int]) -> Iterator[None]:
    """Block signals in the processes that are started inside of the block, which inherit this.

    A terminal and Slurm send a signal to all processes, also to one that has not yet begun to
    handle it. Windows cannot block signals.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _hold_back(number: int, frame: FrameType | None) -> None:
    _Held.waiting.append((number, frame))
    if len(_Held.waiting) > 1 or not _Held.in_block:
        _take_effect()


def _take_effect() -> None:
    while _Held.waiting:
        number, frame = _Held.waiting.pop(0)
        _Held.handlers[number](number, frame)


def _end() -> None:
    """Put the handlers back, except where the block has set others."""
    _Held.in_block = False
    for number in _SIGNALS:
        if signal.getsignal(number) is _hold_back:
            signal.signal(number, _Held.handlers[number])
    _take_effect()


def _forget() -> None:
    """Put the handlers back in a process that was forked inside of a block."""
    _Held.waiting.clear()
    _end()


if hasattr(os, "register_at_fork"):  # Windows has no fork.
    os.register_at_fork(after_in_child=_forget)
