"""The Python that has imported torch already runs programs as any Python does."""

import json
import os
import shlex
import subprocess
import time

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
