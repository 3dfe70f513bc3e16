"""The running processes of a session, for tests that kill some of them."""

import contextlib
import time
from pathlib import Path


def in_session(number):
    """Return the numbers of the running processes of a session."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
            if state != "Z" and int(session) == number:
                found.add(int(stat.parent.name))
    return found


def wait_until_ended(session, seconds=20):
    """Wait until all processes of a session have ended, and return those that have not.

    Ray's two agents do not count: they look for their raylet once a minute.
    """
    deadline = time.monotonic() + seconds
    while (left := _not_agents(in_session(session))) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _not_agents(numbers):
    found = set()
    for number in numbers:
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{number}/cmdline").read_text()
            if not command.startswith(("ray::DashboardAgent", "ray::RuntimeEnvAgent")):
                found.add(number)
    return found
