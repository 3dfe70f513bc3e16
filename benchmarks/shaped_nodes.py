"""Several nodes of a Ray cluster on one Linux machine, with links of a given bandwidth.

Each node is a network namespace with an address of its own. Virtual Ethernet links connect the
namespaces to a bridge, and a token bucket filter limits each link in each direction. This needs
root, ``ip`` and ``tc`` (the package iproute2), and changes nothing outside these namespaces.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

NETWORK = "10.213.0"
PORT = 6379
_BRIDGE = "fineprune0"
# Larger than a packet that the kernel hands over at once (64 kB), and much smaller than a tensor.
_BURST = "256kb"
_START_SECONDS = 60.0


def _run(command: str, *, check: bool = True) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if check and done.returncode:
        sys.exit(f"{command}: {done.stderr.strip()}")


def _namespace(node: int) -> str:
    return f"fineprune{node}"


def _remove(nodes: int) -> None:
    for node in range(nodes):
        _run(f"ip link del fpo{node}", check=False)
        _run(f"ip netns del {_namespace(node)}", check=False)
    _run(f"ip link del {_BRIDGE}", check=False)


@contextlib.contextmanager
def shaped_network(nodes: int, gigabits: float, burst: str = _BURST) -> Iterator[None]:
    """Create a namespace for each node, with a link of so many Gbit/s in each direction."""
    missing = what_is_missing()
    if missing:
        sys.exit(missing)
    _remove(nodes)
    try:
        _run(f"ip link add {_BRIDGE} type bridge")
        _run(f"ip link set {_BRIDGE} up")
        shape = f"root tbf rate {gigabits}gbit burst {burst} latency 200ms"
        for node in range(nodes):
            name, outside, inside = _namespace(node), f"fpo{node}", interface(node)
            _run(f"ip netns add {name}")
            _run(f"ip link add {outside} type veth peer name {inside}")
            _run(f"ip link set {inside} netns {name}")
            _run(f"ip link set {outside} master {_BRIDGE} up")
            _run(f"ip -n {name} link set lo up")
            _run(f"ip -n {name} addr add {address(node)}/24 dev {inside}")
            _run(f"ip -n {name} link set {inside} up")
            _run(f"tc qdisc add dev {outside} {shape}")
            _run(f"tc -n {name} qdisc add dev {inside} {shape}")
        yield
    finally:
        _remove(nodes)


def what_is_missing() -> str | None:
    """Return why shaped links cannot be made here; None if they can."""
    if os.geteuid() != 0:
        return "shaped links need root, which creates network namespaces"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"shaped links need {' and '.join(missing)} (iproute2)" if missing else None


def address(node: int) -> str:
    """Return the address of a node."""
    return f"{NETWORK}.{node + 1}"


def interface(node: int) -> str:
    """Return the name of a node's network interface."""
    return f"fpi{node}"


def on_node(node: int, command: Sequence[str]) -> list[str]:
    """Return the command that runs another one on a node."""
    return ["ip", "netns", "exec", _namespace(node), *command]


@contextlib.contextmanager
def ray_nodes(cpus: Sequence[int]) -> Iterator[str]:
    """Start Ray on each node, with so many CPUs; yield the address of its first node."""
    ray = Path(sys.executable).with_name("ray")
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    # Nothing but these nodes reaches this network, so no token is needed.
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    first = f"{address(0)}:{PORT}"
    started: list[subprocess.Popen[bytes]] = []
    try:
        for node, count in enumerate(cpus):
            where = ["--head", f"--port={PORT}"] if node == 0 else [f"--address={first}"]
            options = [f"--node-ip-address={address(node)}", f"--num-cpus={count}", "--block"]
            options.append("--object-store-memory=100000000")
            if node == 0:
                options += ["--include-dashboard=false", f"--temp-dir={folder}"]
            log = Path(folder, f"start-{node}.log")
            command = on_node(node, [str(ray), "start", *where, *options])
            with log.open("wb") as stream:
                started.append(
                    subprocess.Popen(
                        command,
                        env=environment,
                        stdout=stream,
                        stderr=stream,
                        start_new_session=True,
                    )
                )
            _wait_until_started(started[-1], log)
        yield first
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for node in range(len(cpus)):
            pids = subprocess.run(
                ["ip", "netns", "pids", _namespace(node)], capture_output=True, text=True
            )
            for pid in pids.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def _wait_until_started(process: subprocess.Popen[bytes], log: Path) -> None:
    ends = time.monotonic() + _START_SECONDS
    while "Ray runtime started" not in log.read_text():
        if process.poll() is not None or time.monotonic() > ends:
            sys.exit(f"Ray did not start on a node:\n{log.read_text()}")
        time.sleep(0.2)
