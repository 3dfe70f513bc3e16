"""What an interrupt must not leave half done."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _State:
    held_back = False


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Let Ctrl-C, or a request to terminate, take effect after the block instead of inside of it.

    A notebook stops a cell in this way, and goes on with the same objects when the cell is run
    again. A second signal takes effect at once, since the block may wait for something that never
    comes. Only the main thread receives signals. A signal without a handler of Python, as SIGTERM
    is by default, ends the process as always.
    """
    if _State.held_back or threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {int(number): signal.getsignal(number) for number in _SIGNALS}
    waiting: list[tuple[int, FrameType | None]] = []

    def hold_back(number: int, frame: FrameType | None) -> None:
        waiting.append((number, frame))
        if len(waiting) > 1 or not _State.held_back:
            take_effect()

    def take_effect() -> None:
        while waiting:
            number, frame = waiting.pop()
            handler = handlers[number]
            if callable(handler):
                handler(number, frame)

    held = [number for number, handler in handlers.items() if callable(handler)]
    try:
        _State.held_back = True
        for number in held:
            signal.signal(number, hold_back)
        yield
    finally:
        _State.held_back = False  # One that comes from here on takes effect at once.
        for number in held:
            signal.signal(number, handlers[number])
        take_effect()
