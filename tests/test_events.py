"""What happens to processes is told in one line each: in the log, and by the command line."""

import logging
import sys

import pytest

from fineprune.cli.main import main

pytest.importorskip("ray")

from fineprune.distributed.parameter_servers.processes import (
    LOGGER,
    EventKind,
    Process,
    ProcessKind,
    report,
)


@pytest.mark.parametrize(
    ("where", "line"),
    [
        ((77, "n1"), "worker 3 died (process 77 on n1): it was killed"),
        (None, "worker 3 died: it was killed"),
    ],
)
def test_an_event_of_a_process_is_one_line(where, line, caplog):
    worker = Process(ProcessKind.WORKER, 3, where=where)
    with caplog.at_level(logging.DEBUG, logger=LOGGER.name):
        worker.report(EventKind.DIED, "it was killed")
    assert caplog.messages == [line]
    assert caplog.records[0].args[0].pid == (77 if where else None)


def test_the_command_prints_warnings_as_lines(monkeypatch, capsys):
    logger = logging.getLogger("fineprune")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(sys, "argv", ["fineprune", "--help"])
    with pytest.raises(SystemExit):
        main()
    capsys.readouterr()
    report(EventKind.DIED, "worker 3 died")
    report(EventKind.STARTED, "worker 3 started")
    told = capsys.readouterr()
    assert told.err == "fineprune: worker 3 died\n"
    assert told.out == ""
