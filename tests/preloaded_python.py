"""A Python that has imported torch already, because tests start many processes that need it.

Importing torch and what its optimizers need takes three seconds of a processor. A server imports
it once and forks for each program. As an executable, this file asks the server to run a program::

    python preloaded_python.py <address of the server> <program> <arguments of the program>

The program runs in a process of its own, with the arguments, environment, folder and standard
streams of the process that asked, which ends at once. The server runs on Linux only.
"""

import contextlib
import importlib
import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

# Without Ray, which does not work in a fork of a process that has imported it.
_MODULES = (
    "torch",
    "torch._dynamo",
    "fineprune.distributed.parameter_servers.server",
    "fineprune.distributed.parameter_servers.worker",
    "fineprune.training.recipe_replica",
)
_LONGEST_MESSAGE = 1 << 20
_COMMAND = "FINEPRUNE_PRELOADED_PYTHON"


@contextlib.contextmanager
def preloaded_python(folder):
    """Start a server whose socket is in this folder, and yield the command that asks it."""
    address = str(folder / "python")
    server = subprocess.Popen(
        [sys.executable, __file__, "--serve", address],
        # A fork has no other threads than the one that forks, so the server must have none.
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with server:
        if not server.stdout.readline():
            raise RuntimeError("the server of preloaded_python.py ended while it started")
        # Asking needs no modules of site-packages, so they are left out.
        yield shlex.join([sys.executable, "-I", "-S", __file__, address])


def for_ray_workers(command):
    """Return environment variables: Ray runs its workers with this command instead of Python."""
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return {
        "RAY_RUNTIME_ENV_HOOK": "preloaded_python.ray_runtime_environment",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),  # where Ray finds this hook
        _COMMAND: command,
    }


def ray_runtime_environment(environment):
    """Ray calls this when it starts, with the settings of its workers' processes."""
    return {**(environment or {}), "py_executable": os.environ[_COMMAND]}


def _ask(address, program):
    message = json.dumps([program, dict(os.environ), os.getcwd()]).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(address)
        socket.send_fds(server, [message], [0, 1, 2])


def _serve(address):
    """Fork for each program, until the process that started this one closes its standard input."""
    for name in _MODULES:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # else ended programs would stay as zombies
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(64)
        print("ready", flush=True)
        while True:
            ready, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in ready:
                return
            asking, _ = listener.accept()
            if not os.fork():
                break
            asking.close()
    _run(asking)


def _run(asking):
    """Run in this process, which was forked for it, the program that is asked for."""
    with asking:
        message, streams, _, _ = socket.recv_fds(asking, _LONGEST_MESSAGE, 3)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.argv, environment, folder = json.loads(message)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    os.setpgid(0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        _serve(sys.argv[2])
    else:
        _ask(sys.argv[1], sys.argv[2:])
