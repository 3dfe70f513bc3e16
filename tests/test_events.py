"""What happens to processes is told in one line each: in the log, and by the command line."""

import logging
import sys

import pytest

from fineprune.cli.main import main
from fineprune.distributed.parameter_servers.batches import BatchKey
from fineprune.distributed.parameter_servers.events import (
    LOGGER,
    Event,
    EventKind,
    ProcessKind,
    report,
)

WORKER, SERVER = ProcessKind.WORKER, ProcessKind.SERVER
DIED = Event(EventKind.DIED, WORKER, 3, pid=77, node="n1", reason="it ended unexpectedly")


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (DIED, "worker 3 died (process 77 on n1): it ended unexpectedly"),
        (Event(EventKind.DIED, SERVER, 0, reason="it was killed"), "server 0 died: it was killed"),
        (
            Event(EventKind.RESTARTED, SERVER, 0, pid=78, node="n1"),
            "server 0 restarted (process 78 on n1)",
        ),
        (
            Event(EventKind.ROLLED_BACK, version=40, reason="12 batches are queued again"),
            "rolled back to version 40: 12 batches are queued again",
        ),
        (
            Event(EventKind.WAITING, reason="20 s so far for worker 3"),
            "waiting for CPUs: 20 s so far for worker 3",
        ),
        (Event(EventKind.SHARED, node="n1"), "dedicated servers share nodes with workers: n1"),
        (
            Event(EventKind.LEASED, WORKER, 1, batch=BatchKey(0, 3)),
            "batch 3 of epoch 0 leased to worker 1",
        ),
        (
            Event(EventKind.UPDATED, version=2, reason="batches 2, 3"),
            "updated to version 2: batches 2, 3",
        ),
    ],
)
def test_an_event_is_one_line(event, line, caplog):
    with caplog.at_level(logging.DEBUG, logger=LOGGER.name):
        report(event)
    assert caplog.messages == [line]
    assert caplog.records[0].args == (event,)


def test_the_command_prints_warnings_as_lines(monkeypatch, capsys):
    logger = logging.getLogger("fineprune")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(sys, "argv", ["fineprune", "--help"])
    with pytest.raises(SystemExit):
        main()
    capsys.readouterr()
    report(DIED)
    report(Event(EventKind.STARTED, WORKER, 3, pid=77, node="n1"))
    told = capsys.readouterr()
    assert told.err == "fineprune: worker 3 died (process 77 on n1): it ended unexpectedly\n"
    assert told.out == ""
