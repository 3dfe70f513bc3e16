"""Calls a function with each event of a training with parameter servers, as it is logged."""

import contextlib
import logging

LOGGER = logging.getLogger("fineprune.distributed")


@contextlib.contextmanager
def on_events(react, level=logging.INFO):
    """Call a function with each event of the log."""

    def note(record):
        event = record.args[0] if record.args else None
        if hasattr(event, "kind"):
            react(event)
        return True

    before = LOGGER.level
    LOGGER.addFilter(note)
    LOGGER.setLevel(level)
    try:
        yield
    finally:
        LOGGER.removeFilter(note)
        LOGGER.setLevel(before)
