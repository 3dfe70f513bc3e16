"""Ray as training uses it: what it lets in, prints and leaves behind, and where it puts servers."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from processes import in_session, wait_until_ended

from fineprune.runs.files import read_metrics

pytest.importorskip("ray")

from ray._private import utils
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError

from fineprune.distributed.parameter_servers import end_ray
from fineprune.distributed.parameter_servers.events import ProcessKind
from fineprune.distributed.parameter_servers.placement import Node, Places, nodes_for_servers
from fineprune.distributed.parameter_servers.processes import Cluster, RemoteError, _cause, _Host
from fineprune.distributed.parameter_servers.ray_session import (
    RayHealth,
    RayLost,
    _own_sigterm,
    ray_session,
)
from fineprune.errors import InputError, RunError


def test_a_ray_that_does_not_start_is_one_line(monkeypatch):
    """What Ray raises on a machine that is too busy, without the wait of half a minute."""

    def start(**options):
        raise Exception("The current node timed out during startup.")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.init", start)
    said = "did not start on this machine: The current node timed out"
    with pytest.raises(RunError, match=said), ray_session(1):
        pass


@pytest.mark.parametrize("address", ["127.0.0.1", ":6379", "ray://127.0.0.1:10001"])
def test_an_address_that_is_none_is_one_line(address, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(InputError, match="HOST:PORT"), ray_session(1):
        pass


def test_a_process_that_ray_killed_for_its_memory_is_explained():
    told = "2 worker(s) were killed due to the node running low on memory.\n ..."
    assert _cause(OutOfMemoryError(told)).startswith("Ray killed it because the memory of its node")


@pytest.mark.parametrize(
    ("cause", "kind", "said"),
    [
        (RunError("31 of 1000 images are broken"), RunError, "^31 of 1000 images are broken$"),
        (OSError(28, "No space left on device"), RunError, "^no space left .* x.py, line 3"),
        (MemoryError("Unable to allocate"), RunError, "^out of memory: MemoryError: Unable to"),
        (OSError(5, "Input/output error"), RemoteError, "^OSError: .* x.py, line 3"),
    ],
)
def test_a_failure_of_a_worker_that_explains_itself_is_one_line(cause, kind, said, monkeypatch):
    def get(end, timeout):
        raise RayTaskError("run", 'File "x.py", line 3\n', cause)

    monkeypatch.setattr("ray.get", get)
    here = SimpleNamespace(_forget=lambda process: None)
    with pytest.raises(RuntimeError, match=said) as raised:
        Cluster._ended(here, SimpleNamespace(_end=None))  # type: ignore[arg-type]
    assert type(raised.value) is kind


def test_the_end_of_rays_own_processes_is_no_death_of_a_worker(monkeypatch):
    def get(end, timeout):
        raise RayActorError(error_msg="The actor is dead because its owner has died. Owner Id: 01")

    monkeypatch.setattr("ray.get", get)
    here = SimpleNamespace(_forget=lambda process: None)
    with pytest.raises(RayLost, match=r"^Ray's process raylet .* continue with --resume$"):
        Cluster._ended(here, SimpleNamespace(_end=None))  # type: ignore[arg-type]


def test_nothing_is_started_while_rays_own_processes_do_not_answer(monkeypatch):
    """Ray would wait for them for a minute, and then end this process without a word."""
    answers = iter([False, False, True, False, True])
    module = "fineprune.distributed.parameter_servers.ray_session"
    monkeypatch.setattr(f"{module}._control_store_answers", lambda: next(answers))
    monkeypatch.setattr(f"{module}._ANSWER_SECONDS", 0.0)
    stops: list[bool] = []
    health = RayHealth(lambda: bool(stops))
    health.wait()
    stops.append(True)
    with pytest.raises(RayLost, match=r"^Ray's process gcs_server does not answer: Ray cannot"):
        Cluster.start(SimpleNamespace(_health=health), ProcessKind.SERVER, 0, int)  # type: ignore
    health.wait()  # It answers, so the process that died is replaced, and a checkpoint written.
    assert list(answers) == []
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    monkeypatch.setattr(f"{module}._own_processes", lambda: {"raylet": ended})
    with pytest.raises(RayLost, match="raylet ended with status 0: Ray cannot"):
        RayHealth(lambda: False).wait()


def test_a_request_to_stop_that_reaches_a_worker_does_not_end_it():
    told: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    try:
        _Host(torch.get_num_threads())
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert told == []


# It prints the addresses on which it and its children listen, in the kernel's hexadecimal form.
LISTENERS = """
import contextlib
import os
from pathlib import Path
from fineprune.distributed.parameter_servers.placement import Places
from fineprune.distributed.parameter_servers.processes import cluster
from fineprune.distributed.parameter_servers.link import open_store

def family(process):
    children = (Path("/proc") / str(process) / "task").glob("*/children")
    return [process] + [p for file in children for c in file.read_text().split() for p in family(c)]

def sockets(process):
    found = set()
    with contextlib.suppress(FileNotFoundError):  # it has ended
        for file in (Path("/proc") / str(process) / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # for example, the list of this folder
                link = os.readlink(file)
                if link.startswith("socket:["):
                    found.add(link[8:-1])
    return found

with cluster(Places(groups=1)) as places:
    store = open_store(places.host)
    ours = set().union(*map(sockets, family(os.getpid())))
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in ours:
                print(words[1].partition(":")[0])
"""
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="no /proc/net")
def test_nothing_listens_beyond_loopback():
    done = subprocess.run([sys.executable, "-c", LISTENERS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    addresses = done.stdout.split()
    assert len(addresses) >= 5  # the driver's, its two for workers, and Ray's own processes'
    assert set(addresses) <= LOOPBACK


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
from fineprune.distributed.parameter_servers.coordinator import Coordinator
from fineprune.distributed.parameter_servers.placement import Places
from fineprune.distributed.parameter_servers.processes import cluster
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
with cluster(Places(groups=1, dedicated=True)) as places:
    build, optimizer = (functools.partial(kind, folder) for kind in (Replica, Optimizer))
    training = Coordinator(
        places, strategy, nn.Linear(2, 1), build, optimizer, folder / "snapshots"
    )
    for epoch in itertools.count():
        training.run_epoch(epoch, list(torch.arange(8).split(2)), lambda applied: 0.1)
        print("trained", flush=True)
"""


@pytest.fixture
def short_folder():
    """Sockets lie in it, whose paths must not be longer than 107 bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_a_signal_while_ray_starts_reaches_the_handler_of_the_program():
    told: list[object] = []

    def start():
        utils.set_sigterm_handler(lambda number, frame: told.append("Ray's handler"))
        signal.raise_signal(signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    try:
        with _own_sigterm(start):
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert told == [signal.SIGTERM, signal.SIGTERM]


def test_a_run_says_what_died_in_one_line_each_and_leaves_nothing_when_it_is_stopped(
    tmp_path, short_folder, preloaded_ray_workers
):
    with subprocess.Popen(
        [sys.executable, "-c", TRAINING, tmp_path],
        env={**os.environ, **preloaded_ray_workers, "TMPDIR": str(short_folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as training:
        assert training.stdout.readline() == "trained\n"
        assert list(short_folder.glob("ray*"))
        training.send_signal(signal.SIGTERM)
        printed, told = training.communicate()
    assert training.returncode == 128 + signal.SIGTERM
    assert set(printed.splitlines()) <= {"trained"}
    lines = [line.partition(" (")[0].partition(":")[0] for line in told.splitlines()]
    assert lines == [
        "dedicated servers share nodes with workers",
        "worker 0 died",
        "worker 0 restarted",
        "server 0 died",
        "rolled back to version 0",
        "server 0 restarted",
    ]
    assert list(short_folder.glob("ray*")) == []


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
    lines = [line for line in told if "epochs:" not in line]
    what = "was killed by SIGKILL" if number == signal.SIGKILL else r"has been silent for \d s"
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
def test_a_run_whose_ray_hangs_can_be_stopped(process, training, tmp_path, short_folder):
    run, ray_processes = training
    os.kill(ray_processes[process], signal.SIGSTOP)
    run.send_signal(signal.SIGTERM)
    told = run.communicate(timeout=90)[1]
    assert "fineprune: stopped by SIGTERM in epoch" in told
    assert run.returncode == 128 + signal.SIGTERM
    assert (tmp_path / "run/checkpoint.pt").exists()
    assert not wait_until_ended(run.pid)
    assert list(short_folder.glob("ray*")) == []


# A worker's priority, and that of the process that started Ray.
PRIORITIES = """
import os
from fineprune.distributed.parameter_servers.events import ProcessKind
from fineprune.distributed.parameter_servers.messages import Broken
from fineprune.distributed.parameter_servers.placement import Places
from fineprune.distributed.parameter_servers.processes import cluster

def priority():
    return str(os.getpriority(os.PRIO_PROCESS, 0))

class Tells:
    def __init__(self, host):
        pass
    def serve(self, channel):
        channel.send(Broken(priority()))
        channel.receive()

with cluster(Places(groups=1)) as places:
    places.start(ProcessKind.WORKER, 0, Tells)
    told = []
    while not told:
        told = [message.reason for _, message in places.poll(1.0) if isinstance(message, Broken)]
    print(told[0], priority())
"""


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "getpriority"), reason="there are no priorities")
def test_workers_have_the_priority_of_the_coordinator(preloaded_ray_workers):
    done = subprocess.run(
        [sys.executable, "-c", PRIORITIES],
        env={**os.environ, **preloaded_ray_workers},
        capture_output=True,
        text=True,
    )
    worker, own = done.stdout.split()
    assert worker == own, done.stderr


def node(name, cpus, gpus=0):
    return Node(name, name, cpus, gpus)


@pytest.mark.parametrize(
    ("nodes", "places", "chosen"),
    [
        ([node("a", 4)], Places(1, dedicated=True), []),
        ([node("a", 4), node("b", 2)], Places(1, dedicated=True), ["b"]),
        ([node("a", 4, gpus=4), node("b", 64)], Places(1, gpus=1, dedicated=True), ["b"]),
        (
            [node("a", 2), node("b", 2), node("c", 2)],
            Places(2, servers=3, dedicated=True),
            ["a", "b"],
        ),
        ([node("a", 4), node("b", 4)], Places(5, servers=2, dedicated=True), []),
        ([node("a", 0), node("b", 2), node("c", 2)], Places(2, dedicated=True), ["b"]),
        ([node("a", 2), node("b", 4)], Places(1, members=2, threads=2, dedicated=True), ["a"]),
    ],
)
def test_dedicated_servers_get_nodes_that_leave_room_for_the_groups(nodes, places, chosen):
    assert [one.name for one in nodes_for_servers(nodes, places)] == chosen


# Three nodes on one machine; it prints which nodes the workers and the servers are on.
NODES = """
import os
from ray.cluster_utils import Cluster
from fineprune.distributed.parameter_servers.events import LOGGER, ProcessKind
from fineprune.distributed.parameter_servers.messages import Broken
from fineprune.distributed.parameter_servers.placement import Places
from fineprune.distributed.parameter_servers.processes import cluster
import ray

class Where:
    def __init__(self, host):
        self.node = ray.get_runtime_context().get_node_id()
    def serve(self, channel):
        channel.send(Broken(self.node))
        channel.receive()

nodes = Cluster()
for _ in range(3):
    nodes.add_node(num_cpus=2)
os.environ["RAY_ADDRESS"] = nodes.address
events = []
LOGGER.addFilter(lambda record: events.append(record.args[0]))
for groups in (3, 5):
    events.clear()
    places = Places(groups=groups, servers=1 if groups == 5 else 2, dedicated=True)
    with cluster(places) as held:
        for group in range(groups):
            held.start(ProcessKind.WORKER, group, Where)
        for server in range(places.servers):
            held.start(ProcessKind.SERVER, server, Where)
        told = []
        while len(told) < groups + places.servers:
            told += [(p.kind, m.reason) for p, m in held.poll(1.0) if isinstance(m, Broken)]
        on = [{node for one, node in told if one is kind} for kind in ProcessKind]
        kinds = [event.kind.value for event in events]
        print(len(on[0]), len(on[1]), len(on[0] & on[1]), kinds)
nodes.shutdown()
"""


@pytest.mark.long
def test_dedicated_servers_have_nodes_of_their_own_or_it_is_said(preloaded_ray_workers):
    done = subprocess.run(
        [sys.executable, "-c", NODES],
        env={**os.environ, **preloaded_ray_workers},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["2 1 0 []", "3 1 1 ['shared']"]


FORKED = """
import os, signal, sys, time
from fineprune.distributed.parameter_servers.end_ray import ray_ends_with_this_process

with ray_ends_with_this_process(sys.argv[1]):
    loader = os.fork()  # It inherits the pipe.
    if not loader:
        time.sleep(60)
        os._exit(0)
os.kill(loader, signal.SIGKILL)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_the_end_of_ray_does_not_wait_for_loader_processes(tmp_path):
    command = [sys.executable, "-c", FORKED, str(tmp_path / "ray")]
    assert subprocess.run(command, timeout=30).returncode == 0


@on_linux
def test_the_program_that_ends_ray_outlives_requests_to_stop(tmp_path):
    """They often reach all processes of a training, which then still needs this one."""
    (tmp_path / "ray").mkdir()
    with subprocess.Popen(
        [sys.executable, "-I", "-S", end_ray.__file__, tmp_path / "ray"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as watching:
        requests = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
        deadline = time.monotonic() + 30
        while not requests <= ignored(watching.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        for number in requests:
            watching.send_signal(number)
        told = watching.communicate()[1]  # It closes the pipe, like the end of a training.
    assert watching.returncode == 0, told
    assert told.startswith("fineprune: the training ended without a message: it, or its Ray, was ")
    assert len(told.splitlines()) == 1
    assert not (tmp_path / "ray").exists()


def ignored(number):
    """Return the signals that a process ignores."""
    status = Path(f"/proc/{number}/status").read_text()
    (mask,) = re.findall(r"SigIgn:\s*([0-9a-f]+)", status)
    return {one for one in signal.Signals if int(mask, 16) >> (one - 1) & 1}
