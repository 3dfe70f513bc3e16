"""Ray as training uses it: what it lets in, prints and leaves behind, and where it puts servers."""

import contextlib
import itertools
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import pytest
import torch
from processes import in_session, wait_until_ended

from fineprune.runs.files import read_metrics

pytest.importorskip("ray")

from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError

from fineprune.distributed.parameter_servers.failures import (
    RAISED,
    RemoteError,
    cause_of,
    root_of,
    told_as_text,
)
from fineprune.distributed.parameter_servers.placement import bundles_for, nodes_for_servers
from fineprune.distributed.parameter_servers.ray_session import ray_session
from fineprune.distributed.parameter_servers.server import Actor
from fineprune.distributed.strategy import Strategy
from fineprune.errors import InputError, RayLost, RunError


def test_a_ray_that_does_not_start_is_one_line(monkeypatch):
    """What Ray raises on a machine that is too busy, without the wait of half a minute."""

    def start(**options):
        raise Exception("The current node timed out during startup.")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.init", start)
    said = "did not start on this machine: The current node timed out"
    with pytest.raises(RunError, match=said), ray_session(1):
        pass


@pytest.mark.parametrize("name", ["t\xfc", "t" * 40])
def test_a_temporary_folder_that_ray_cannot_use_is_not_used(name, monkeypatch):
    def start(**options):
        assert options["_temp_dir"].startswith("/tmp/ray-")
        raise Exception("It was asked.")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.init", start)
    monkeypatch.setattr("tempfile.gettempdir", lambda: f"/tmp/{name}")
    with pytest.raises(RunError, match="It was asked"), ray_session(1):
        pass


@pytest.mark.parametrize("address", ["127.0.0.1", ":6379", "a:b", "ray://127.0.0.1:10001"])
def test_an_address_that_is_none_is_one_line(address, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(InputError, match="HOST:PORT"), ray_session(1):
        pass


# A process of its own, because the thread that waits for Ray cannot be ended.
JOIN = """
import sys
from fineprune.distributed.parameter_servers import ray_session
ray_session._START_SECONDS, ray_session._TELL_SECONDS = 1.0, 0.1
try:
    with ray_session.ray_session(1, lambda: sys.argv[1] == "stop"):
        pass
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("host", "what", "said"),
    [
        ("127.0.0.1", "wait", r"RunError Ray at .* did not answer within 1 s\n"),
        ("[::1]", "wait", r"RunError Ray at .* did not answer within 1 s\n"),
        ("127.0.0.1", "stop", r"RayLost the start of Ray was stopped.*\n"),
    ],
)
def test_an_address_where_another_program_listens_is_one_line(host, what, said):
    """Ray itself would try for a quarter of an hour, deaf to signals."""
    family = socket.AF_INET6 if "[" in host else socket.AF_INET
    with socket.create_server((host.strip("[]"), 0), family=family) as other:
        done = subprocess.run(
            [sys.executable, "-c", JOIN, what],
            env={**os.environ, "RAY_ADDRESS": f"{host}:{other.getsockname()[1]}"},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0
    assert re.fullmatch(said, done.stdout)
    assert done.stderr.splitlines().count("starting Ray ...") == (what == "wait")


def test_a_process_that_ray_killed_for_its_memory_is_explained():
    told = "2 worker(s) were killed due to the node running low on memory.\n ..."
    reason = cause_of(OutOfMemoryError(told))
    assert reason.startswith("Ray killed it because the memory of its node")


def test_the_end_of_rays_own_processes_is_no_death_of_a_worker():
    error = RayActorError(error_msg="The actor is dead because its owner has died. Owner Id: 01")
    with pytest.raises(RayLost, match=r"^Ray's process raylet .* continue with --resume$"):
        cause_of(error)


def test_the_death_of_who_made_an_argument_is_told_from_ones_own():
    death = RayActorError(actor_id="ab")
    assert root_of(death) is death
    assert root_of(RayTaskError("step", "told", death)) is death


def fail(error):
    """Return what the driver raises if a method of an actor raises an error."""

    @told_as_text
    def method():
        raise error

    with pytest.raises(RAISED) as raised:
        method()
    sent = pickle.loads(pickle.dumps(raised.value))
    assert root_of(RayTaskError("step", "told", RayTaskError("update", "told", sent))) is sent
    return sent


LOADER = "Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback (\nOSError: torn"


@pytest.mark.parametrize(
    ("cause", "kind", "said"),
    [
        (RunError("31 of 1000 images are broken"), RunError, "^31 of 1000 images are broken$"),
        (InputError("expected a file"), InputError, "^expected a file$"),
        (OSError(28, "No space left on device"), RunError, "^no space left .* line"),
        (MemoryError("Unable to allocate"), RunError, "^out of memory: MemoryError: Unable to"),
        (OSError(5, "Input/output error"), RemoteError, r"^OSError: .*test_ray_session.py, line"),
        (RuntimeError(LOADER), RemoteError, "^RuntimeError: OSError: torn .in a worker"),
        (lambda: None, RemoteError, "^TypeError"),
    ],
)
def test_an_error_crosses_processes_as_text(cause, kind, said):
    error = fail(cause)
    assert type(error) is kind
    assert re.search(said, str(error))
    assert len(str(error).splitlines()) == 1
    assert "in method" in error.__notes__[0]  # the stack trace of the other process


def test_a_request_to_stop_that_reaches_a_worker_does_not_end_it():
    told: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    try:
        with warnings.catch_warnings():
            Actor(torch.get_num_threads())
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert told == []


# The addresses of the loopback interface in the kernel's hexadecimal form.
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


def listening(process):
    """Return the addresses on which a process and its descendants listen."""
    ours = set().union(*map(sockets, family(process)))
    tables = [Path("/proc/net", name).read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    words = [line.split() for line in itertools.chain(*tables)]
    return [word[1].partition(":")[0] for word in words if word[3] == "0A" and word[9] in ours]


def family(process):
    children = Path("/proc", str(process), "task").glob("*/children")
    return [process] + [p for file in children for c in file.read_text().split() for p in family(c)]


def sockets(process):
    found = set()
    with contextlib.suppress(FileNotFoundError):  # it has ended
        for file in Path("/proc", str(process), "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # for example, the list of this folder
                found.add(os.readlink(file).removeprefix("socket:[").removesuffix("]"))
    return found


# It trains until it is told to stop; a worker and a server kill themselves in the first epoch.
TRAINING = """
import functools
import itertools
import logging
import os
import signal
import sys
from pathlib import Path
import torch
from torch import nn
from fineprune.distributed.parameter_servers.start import parameter_servers
from fineprune.distributed.strategy import Strategy

def die_once(marker):
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)

class Replica:
    def __init__(self, folder, rank):
        self.model = nn.Linear(2, 1)
        self.folder = folder
    def load(self, key, indices):
        return indices
    def step(self, indices, weights):
        die_once(self.folder / "worker")
        losses = self.model(torch.ones(len(indices), 2)).square().mean(1)
        losses.mean().backward()
        return losses.detach()

class Optimizer(torch.optim.SGD):
    def __init__(self, folder, parameters):
        super().__init__(parameters, lr=0.1)
        self.folder = folder
    def step(self, closure=None):
        die_once(self.folder / "server")
        return super().step(closure)

logging.basicConfig(format="%(message)s")
folder = Path(sys.argv[1])
strategy = Strategy("async", workers=1, servers=1, placement="dedicated")
build, optimizer = (functools.partial(kind, folder) for kind in (Replica, Optimizer))
with parameter_servers(strategy, nn.Linear(2, 1), build, optimizer) as training:
    for epoch in itertools.count():
        training.run_epoch(epoch, list(torch.arange(8).split(2)), lambda applied: 0.1)
        print("trained", flush=True)
"""


@pytest.fixture
def short_folder():
    """Sockets lie in it, whose paths must not be longer than 107 bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="no /proc/net")
def test_a_run_listens_on_loopback_says_what_died_and_leaves_nothing_when_it_is_stopped(
    tmp_path, short_folder
):
    with subprocess.Popen(
        [sys.executable, "-c", TRAINING, tmp_path],
        env={**os.environ, "TMPDIR": str(short_folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as training:
        assert training.stdout.readline() == "trained\n"
        assert list(short_folder.glob("ray*"))
        addresses = listening(training.pid)
        training.send_signal(signal.SIGTERM)
        printed, told = training.communicate()
    assert training.returncode == 128 + signal.SIGTERM
    assert set(printed.splitlines()) <= {"trained"}
    lines = [line.partition(" (")[0].partition(":")[0] for line in told.splitlines()]
    lines = [line for line in lines if line != "starting Ray ..."]  # on a busy machine
    assert lines == [
        "dedicated servers share nodes with workers",
        "worker 0 died",
        "worker 0 restarted",
        "server 0 died",
        "rolled back to version 0",
        "server 0 restarted",
    ]
    assert list(short_folder.glob("ray*")) == []
    assert len(addresses) >= 4  # the driver's and Ray's own processes'
    assert set(addresses) <= LOOPBACK


RECIPE = """
[data]
name = "digits"
train_size = 256
[network]
name = "lenet"
[training]
epochs = 4000
batch_size = 64
milestones = []
evaluate_every = 1000
evaluate_last = 1
[pruning]
policy = "full"
[run]
device = "cpu"
threads = 1
checkpoint_every = 1000
history = false
[distributed]
strategy = "async"
workers = 1
"""
# The command, with less patience.
IMPATIENT = """
from fineprune.distributed.parameter_servers import ray_session
ray_session.SILENCE_SECONDS = 3.0
from fineprune.cli.main import main
main()
"""


@pytest.fixture
def training(tmp_path, short_folder, preloaded_ray_workers):
    """A command that trains, and the processes of its Ray by their names."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)
    command = [sys.executable, "-c", IMPATIENT, "train", recipe, "--out", tmp_path / "run"]
    with subprocess.Popen(
        command,
        env={**os.environ, **preloaded_ray_workers, "TMPDIR": str(short_folder)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        deadline = time.monotonic() + 120
        while not read_metrics(tmp_path / "run/metrics.jsonl") and time.monotonic() < deadline:
            time.sleep(0.05)
        yield process, rays_processes(process.pid)
        process.kill()
    for pid in in_session(process.pid):
        os.kill(pid, signal.SIGKILL)


def rays_processes(parent):
    """Return the children of a process that are Ray's own, by their names."""
    found = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        name, _, rest = file.read_text().partition("(")[2].rpartition(")")
        if int(rest.split()[1]) == parent:
            found[name] = int(file.parent.name)
    return found


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.mark.long
@on_linux
@pytest.mark.parametrize(
    ("process", "number"),
    [
        ("raylet", signal.SIGKILL),
        ("raylet", signal.SIGSTOP),
        ("gcs_server", signal.SIGKILL),
        ("gcs_server", signal.SIGSTOP),
    ],
)
def test_a_run_whose_ray_is_dead_or_hangs_ends_with_one_line(
    process, number, training, tmp_path, short_folder
):
    run, ray_processes = training
    os.kill(ray_processes[process], number)
    told = run.communicate(timeout=90)[1].splitlines()
    lines = [line for line in told if "epochs:" not in line and "starting Ray" not in line]
    what = "ended" if number == signal.SIGKILL else r"has been silent for \d s"
    (line,) = lines
    assert re.fullmatch(
        rf"fineprune: Ray's process {process} {what}: Ray cannot start or replace processes "
        r"without it; continue with --resume",
        line,
    )
    assert run.returncode == 1
    assert not wait_until_ended(run.pid)
    assert list(short_folder.glob("ray*")) == []


@pytest.mark.long
@on_linux
@pytest.mark.parametrize("process", ["raylet", "gcs_server"])
def test_a_run_whose_ray_hangs_can_be_stopped(process, training, short_folder):
    run, ray_processes = training
    os.kill(ray_processes[process], signal.SIGSTOP)
    run.send_signal(signal.SIGTERM)
    told = run.communicate(timeout=90)[1]
    assert "fineprune: stopped by SIGTERM" in told
    assert run.returncode == 128 + signal.SIGTERM
    assert not wait_until_ended(run.pid)
    assert list(short_folder.glob("ray*")) == []


@pytest.mark.parametrize(
    ("cpus", "gpus", "processes", "each", "chosen"),
    [
        ({"a": 4}, {}, (1, 1, 1), (1, 0), []),
        ({"a": 4, "b": 2}, {}, (1, 1, 1), (1, 0), ["b"]),
        ({"a": 4, "b": 64}, {"a": 4}, (1, 1, 1), (1, 1), ["b"]),
        ({"a": 2, "b": 2, "c": 2}, {}, (2, 1, 3), (1, 0), ["a", "b"]),
        ({"a": 4, "b": 4}, {}, (5, 1, 2), (1, 0), []),
        ({"a": 0, "b": 2, "c": 2}, {}, (2, 1, 1), (1, 0), ["b"]),
        ({"a": 2, "b": 4}, {}, (2, 2, 1), (2, 0), ["a"]),
    ],
)
def test_dedicated_servers_get_nodes_that_leave_room_for_the_groups(
    cpus, gpus, processes, each, chosen
):
    workers, group, servers = processes
    strategy = Strategy("mixed", workers, group, servers=servers, placement="dedicated")
    nodes = {name: {"CPU": cpus[name], "GPU": gpus.get(name, 0)} for name in cpus}
    assert nodes_for_servers(nodes, *bundles_for(strategy, *each)) == chosen


# Three nodes on one machine; it prints which nodes the workers and the servers are on.
NODES = """
import os
from ray.cluster_utils import Cluster
from fineprune.distributed.parameter_servers.processes import LOGGER, ProcessKind
from fineprune.distributed.parameter_servers.placement import Placement
from fineprune.distributed.parameter_servers.ray_session import ray_session
from fineprune.distributed.strategy import Strategy
import ray

class Where:
    def node(self):
        return ray.get_runtime_context().get_node_id(), os.getpriority(os.PRIO_PROCESS, 0)

nodes = Cluster()
for _ in range(3):
    nodes.add_node(num_cpus=2)
os.environ["RAY_ADDRESS"] = nodes.address
events = []
LOGGER.addFilter(lambda record: events.append(record.args[0]))
with ray_session(1):
    for groups in (3, 5):
        events.clear()
        servers = 1 if groups == 5 else 2
        strategy = Strategy("async", workers=groups, servers=servers, placement="dedicated")
        placement = Placement(strategy, 1, 0.0)
        on, actors = [], []
        for kind, number in ((ProcessKind.WORKER, groups), (ProcessKind.SERVER, servers)):
            made = [
                ray.remote(Where).options(**placement.options(kind, index)).remote()
                for index in range(number)
            ]
            on.append({node for node, _ in ray.get([one.node.remote() for one in made])})
            actors += made
        print(len(on[0]), len(on[1]), len(on[0] & on[1]), [event.kind.value for event in events])
        del actors, made
        placement.release()
nodes.shutdown()
"""


@pytest.mark.long
def test_dedicated_servers_have_nodes_of_their_own_or_it_is_said(preloaded_ray_workers):
    done = subprocess.run(
        [sys.executable, "-c", NODES],
        env={**os.environ, **preloaded_ray_workers, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["2 1 0 []", "3 1 1 ['shared']"]
