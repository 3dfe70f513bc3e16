"""The Python that has imported torch already runs programs as any Python does."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import json, os, sys
loaded = sorted({"torch", "torch._dynamo", "ray"} & set(sys.modules))
threads = len(os.listdir("/proc/self/task"))
import torch
print(json.dumps({
    "arguments": sys.argv[1:],
    "environment": os.environ["COLOUR"],
    "folder": os.getcwd(),
    "pid": os.getpid(),
    "name": __name__,
    "loaded": loaded,
    "threads": threads,
    "sum": (torch.ones(500, 500) @ torch.ones(500, 500)).sum().item(),
}))
sys.stdout.flush()
print(sys.stdin.read(), file=sys.stderr)
"""


def test_a_program_runs_in_a_process_of_its_own_with_what_it_was_given(preloaded, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    printed, said = tmp_path / "out", tmp_path / "err"
    results = []
    for colour in ("red", "blue"):
        command = f"{preloaded} {shlex.quote(str(tmp_path / 'program.py'))} 'a b' c"
        with printed.open("w") as out, said.open("w") as err:
            subprocess.run(
                shlex.split(command),
                cwd=tmp_path,
                env={**os.environ, "COLOUR": colour},
                input=colour.encode(),
                stdout=out,
                stderr=err,
                check=True,
            )
        deadline = time.monotonic() + 60
        while said.read_text() != f"{colour}\n" and time.monotonic() < deadline:
            time.sleep(0.05)
        results.append(json.loads(printed.read_text()))
        assert results[-1].pop("environment") == colour
    pids = {result.pop("pid") for result in results}
    assert len(pids - {os.getpid()}) == 2
    expected = {
        "arguments": ["a b", "c"],
        "folder": str(tmp_path),
        "name": "__main__",
        "loaded": ["torch", "torch._dynamo"],
        "threads": 1,
        "sum": 500.0**3,
    }
    assert results == [expected, expected]


ENDING = """
import os, signal, sys, time
print(os.getpid(), sys.argv[1:], flush=True)
if sys.argv[1] == "exit":
    sys.exit(7)
if sys.argv[1] == "die":
    os.kill(os.getpid(), signal.SIGKILL)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
print("waits", flush=True)
for _ in range(6000):  # A signal that came just before a long sleep would not shorten it.
    time.sleep(0.01)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the server runs on Linux")
@pytest.mark.parametrize(("how", "status"), [("exit", 7), ("die", -signal.SIGKILL), ("wait", 5)])
def test_a_command_that_waits_ends_as_its_program_does(how, status, python):
    with subprocess.Popen(
        [*python, "-c", ENDING, how, "b"], stdout=subprocess.PIPE, text=True
    ) as command:
        pid, arguments = command.stdout.readline().split(maxsplit=1)
        assert arguments == f"['{how}', 'b']\n"
        assert int(pid) != command.pid
        if how == "wait":
            assert command.stdout.readline() == "waits\n"
            command.send_signal(signal.SIGTERM)
        assert command.wait(60) == status


@pytest.mark.skipif(sys.platform != "linux", reason="the server runs on Linux")
def test_a_program_is_killed_with_the_command_that_waits_for_it(python):
    with subprocess.Popen(
        [*python, "-c", ENDING, "wait"], stdout=subprocess.PIPE, text=True
    ) as command:
        pid = int(command.stdout.readline().split()[0])
        command.kill()
        command.stdout.read()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="the server runs on Linux")
def test_a_module_is_found_in_the_folder_of_the_command(python, tmp_path):
    (tmp_path / "own.py").write_text("import sys\nprint(__name__, sys.argv[1:], file=sys.stderr)\n")
    done = subprocess.run(
        [*python, "-u", "-m", "own", "a"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "__main__ ['a']\n")
