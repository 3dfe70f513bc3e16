"""A Python that has imported torch already, because tests start many processes that need it.

Importing torch and what its optimizers need takes three seconds of a processor. A server imports
it once and forks for each program. As an executable, this file asks the server to run a program::

    python preloaded_python.py <address of the server> <program> <arguments of the program>
    python preloaded_python.py --wait <address> [-u] [-W error] <program, -m module or -c code> ...

The program runs in a process of its own, with the arguments, environment, folder and open files of
the process that asked. Without ``--wait``, that process ends at once. With it, it passes
signals on, and ends when the program has ended and with the same exit status; if it is killed, the
program is killed. The server runs on Linux only.
"""

import contextlib
import fcntl
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
import warnings
from pathlib import Path

_MODULES = (
    "torch",
    "torch._dynamo",
    "fineprune.distributed.parameter_servers.flat_layout",
    "fineprune.training.recipe_replica",
)
# Those that Ray imports, where it is installed. Ray itself does not work in a fork of a process
# that has imported it.
_MODULES_OF_RAY = ("google.protobuf.internal.builder", "jsonschema", "requests", "yaml")
_LONGEST_MESSAGE = 1 << 20
_MOST_FILES = 250  # The kernel passes 253 at once.
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
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
        try:
            # Asking needs no modules of site-packages, so they are left out.
            yield shlex.join([sys.executable, "-I", "-S", __file__, address])
        finally:
            # It would not notice that its standard input is closed while a process that this one
            # forked, such as one of a loader, has it open too.
            server.kill()


def waiting(command):
    """Return the command, a list, that runs a program and waits for it.

    Args:
        command: What ``preloaded_python`` yields.
    """
    *python, address = shlex.split(command)
    return [*python, "--wait", address]


def for_ray_workers(command):
    """Return environment variables: Ray runs its workers with this command instead of Python."""
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return {
        "RAY_RUNTIME_ENV_HOOK": "preloaded_python.ray_runtime_environment",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),  # where Ray finds this hook
        _COMMAND: command,
    }


@contextlib.contextmanager
def preloaded_ray_workers(folder):
    """Let the workers of this process's Ray run in a server that ends with this process.

    Args:
        folder: A folder with a short name, for the socket of the server.
    """
    with preloaded_python(Path(folder)) as command:
        os.environ.update(for_ray_workers(command))
        yield


def ray_runtime_environment(environment):
    """Ray calls this when it starts, with the settings of its workers' processes."""
    return {**(environment or {}), "py_executable": os.environ[_COMMAND]}


def _ask(address, program):
    with _asked(address, program, wait=False):
        pass


def _ask_and_wait(address, program):
    """Let the server run a program, and end as it does."""
    # A signal that comes before the program has started is passed on when it has.
    early: list[int] = []
    for passed_on in _PASSED_ON:
        signal.signal(passed_on, lambda number, frame: early.append(number))
    with _asked(address, program, wait=True) as server:
        pid = int(server.recv(_LONGEST_MESSAGE))
        for passed_on in _PASSED_ON:
            signal.signal(passed_on, lambda number, frame: os.kill(pid, number))
        for waiting_signal in early:
            os.kill(pid, waiting_signal)
        status = int(server.recv(_LONGEST_MESSAGE) or signal.SIGKILL)
    if os.WIFSIGNALED(status):
        last = os.WTERMSIG(status)
        if last in _PASSED_ON:
            signal.signal(last, signal.SIG_DFL)
        os.kill(os.getpid(), last)
    sys.exit(os.waitstatus_to_exitcode(status))


@contextlib.contextmanager
def _asked(address, program, wait):
    files = sorted(int(file) for file in os.listdir("/proc/self/fd"))
    files = [file for file in files if _is_open(file)]
    message = json.dumps([program, dict(os.environ), os.getcwd(), wait, files]).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(address)
        socket.send_fds(server, [message], files)
        yield server


def _is_open(file):
    """Return whether a number from a listing is that of an open file, not of the listing itself."""
    try:
        os.fstat(file)
    except OSError:
        return False
    return True


def _serve(address):
    """Fork for each program, until the process that started this one closes its standard input."""
    for name in _MODULES:
        importlib.import_module(name)
    for name in _MODULES_OF_RAY:
        with contextlib.suppress(ModuleNotFoundError):
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
        message, received, _, _ = socket.recv_fds(asking, _LONGEST_MESSAGE, _MOST_FILES)
        program, environment, folder, wait, files = json.loads(message)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgid(0, 0)
        if wait and (pid := os.fork()):
            _report(pid, asking)
    _renumber(received, files)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    # The first path is that of this file; the place is the program's.
    sys.path[1:1] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    while program[0] in ("-u", "-B"):
        del program[0]
    if program[0] == "-W":
        warnings.simplefilter(program[1])
        del program[:2]
    if program[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *program[2:]], ""
        exec(compile(program[1], "<string>", "exec"), {"__name__": "__main__"})
    elif program[0] == "-m":
        sys.argv, sys.path[0] = program[1:], folder
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = program, str(Path(program[0]).parent)
        runpy.run_path(program[0], run_name="__main__")


def _renumber(received, files):
    """Give open files the numbers that they have in the process that asked."""
    # First to numbers above all others, so that no file is closed before it has its own.
    above = max(files) + 1
    moved = [fcntl.fcntl(number, fcntl.F_DUPFD, above) for number in received]
    for number in received:
        os.close(number)
    for number, wanted in zip(moved, files, strict=True):
        os.dup2(number, wanted)
        os.close(number)


def _report(pid, asking):
    """Tell the process that asked which process runs its program, and how it ends."""
    asking.send(str(pid).encode())
    ended = os.pidfd_open(pid)
    ready, _, _ = select.select([ended, asking], [], [])
    if asking in ready:  # The process that asked was killed.
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    with contextlib.suppress(BrokenPipeError):
        asking.send(str(status).encode())
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        _serve(sys.argv[2])
    elif sys.argv[1] == "--wait":
        _ask_and_wait(sys.argv[2], sys.argv[3:])
    else:
        _ask(sys.argv[1], sys.argv[2:])
