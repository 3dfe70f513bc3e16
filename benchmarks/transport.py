"""How fast links carry gradients and parameters, compared with the speed of the network.

    python benchmarks/transport.py                        # needs root, for network namespaces
    python benchmarks/transport.py --without-namespaces   # loopback only

There are one worker and one or two servers, each a process with one thread; each of two servers
holds half of the parameters. They are connected over loopback, and through two network namespaces
whose links ``tc ... tbf`` limits to 1 and to 10 Gbit/s in both directions.

The limit is the speed of a plain TCP socket on the same network: the same number of bytes in the
same direction, from memory to memory, until the receiver confirms that it has them all. The limit,
push, pull, and Gloo's all-reduce over two ranks take turns in one run, so that other load on the
machine affects all of them equally, and medians are compared. An all-reduce over two ranks moves as
many bytes in each direction as a push, in both directions at once, and adds them up.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from fineprune.distributed.parameter_servers.link import Link, WireFormat, join_store, open_store
from shaped_nodes import address, interface, on_node, shaped_network, what_is_missing
from table import show
from torch._C._distributed_c10d import PrefixStore, TCPStore

from fineprune.training.hardware import describe

SERVERS = (1, 2)
# A bucket of 256 KB holds 2 ms at 1 Gbit/s, and of 2 MB the same at 10.
SHAPES = {"veth, 1 Gbit/s": (1, "256kb"), "veth, 10 Gbit/s": (10, "2mb")}
TIMEOUT = 300.0

# The name of a transfer and its number of servers.
Turn = tuple[str, int]
# An end of a network: its host, its interface and the command that enters its namespace.
End = tuple[str, str, list[str]]


# --- The processes that are measured ------------------------------------------------------------


def work(options: argparse.Namespace) -> None:
    """Measure, as the worker: print the port of the store, then the times of all transfers."""
    store = open_store(options.host, timeout_seconds=TIMEOUT)
    listening = socket.create_server((options.host, 0))
    store.set("control", str(listening.getsockname()[1]))
    print(store.port, flush=True)
    controls = {}
    for _ in range(max(SERVERS)):
        connection = listening.accept()[0]
        controls[connection.recv(1)[0]] = tuned(connection)

    elements = options.bytes // 4
    gradients, parameters = torch.ones(elements), torch.zeros(elements)
    buffer = bytearray(options.bytes)
    links = {s: [make_link(store, options, 0, s, i) for i in range(s)] for s in SERVERS}
    rounding = make_link(store, options, 0, 1, 0, torch.bfloat16)
    group(store, options, 0)

    def begin(servers: int) -> None:
        for server in range(servers):
            controls[server].sendall(b"!")
        for server in range(servers):
            controls[server].recv(1)

    def stream_up() -> None:
        controls[0].sendall(buffer)
        controls[0].recv(1)

    def push(links: Sequence[Link]) -> None:
        parts = zip(links, gradients.chunk(len(links)), strict=True)
        for transfer in [link.send_later(part) for link, part in parts]:
            transfer.wait()

    def pull(links: Sequence[Link]) -> None:
        parts = zip(links, parameters.chunk(len(links)), strict=True)
        for transfer in [link.receive_later(part) for link, part in parts]:
            transfer.wait()

    turns: dict[Turn, Callable[[], object]] = {
        ("plain socket, up", 1): stream_up,
        ("plain socket, down", 1): lambda: fill(controls[0], buffer),
        **{("push", s): partial(push, links[s]) for s in SERVERS},
        **{("pull", s): partial(pull, links[s]) for s in SERVERS},
        ("push as bfloat16", 1): lambda: push([rounding]),
        ("all-reduce", 1): lambda: dist.all_reduce(gradients),
    }
    seconds: dict[Turn, list[float]] = {turn: [] for turn in turns}
    for repeat in range(options.repeats + 1):
        for (what, servers), turn in turns.items():
            gradients.fill_(repeat)
            begin(servers)
            started = time.perf_counter()
            turn()
            # The first round warms up the memory and the connections.
            if repeat:
                seconds[what, servers].append(time.perf_counter() - started)
            if what == "pull" and not torch.equal(parameters, torch.full_like(parameters, repeat)):
                sys.exit("what was pulled is not what was sent")
    print(json.dumps([[*turn, times] for turn, times in seconds.items()]), flush=True)
    dist.destroy_process_group()


def serve(options: argparse.Namespace) -> None:
    """Do what the worker's schedule says, as a server."""
    store = join_store(options.peer, int(sys.stdin.readline()), timeout_seconds=TIMEOUT)
    me = options.server
    control = tuned(socket.create_connection((options.peer, int(store.get("control")))))
    control.sendall(bytes([me]))
    elements = options.bytes // 4
    memory = torch.zeros(elements)
    buffer = bytearray(options.bytes)
    links = {s: make_link(store, options, 1, s, me) for s in SERVERS if me < s}
    if me == 0:
        rounding = make_link(store, options, 1, 1, 0, torch.bfloat16)
        group(store, options, 1)

    def part(servers: int) -> torch.Tensor:
        own: torch.Tensor = memory.chunk(servers)[me]
        return own

    def stream_up() -> None:
        fill(control, buffer)
        control.sendall(b"!")

    def push(servers: int) -> None:
        links[servers].receive(part(servers))

    def pull(servers: int) -> None:
        links[servers].send(part(servers))

    turns: dict[Turn, Callable[[], object]] = {
        ("plain socket, up", 1): stream_up,
        ("plain socket, down", 1): lambda: control.sendall(buffer),
        **{("push", s): partial(push, s) for s in SERVERS},
        **{("pull", s): partial(pull, s) for s in SERVERS},
        ("push as bfloat16", 1): lambda: rounding.receive(memory),
        ("all-reduce", 1): lambda: dist.all_reduce(memory),
    }
    for _ in range(options.repeats + 1):
        for (_, servers), turn in turns.items():
            if me < servers:
                control.recv(1)
                control.sendall(b"!")
                turn()
    # Wait for the worker to end: it has the store, and this process has its end of each link.
    control.recv(1)
    if me == 0:
        dist.destroy_process_group()


def make_link(
    store: TCPStore,
    options: argparse.Namespace,
    side: int,
    servers: int,
    server: int,
    wire_dtype: torch.dtype | None = None,
) -> Link:
    elements = -(-(options.bytes // 4) // servers)
    return Link(
        store,
        f"{server} of {servers}, {wire_dtype}",
        side,
        WireFormat(elements, wire_dtype=wire_dtype),
        WireFormat(elements),
        host=options.host,
        timeout_seconds=TIMEOUT,
    )


def group(store: TCPStore, options: argparse.Namespace, rank: int) -> None:
    """Join the worker and the first server in a plain Gloo group on the given interface."""
    os.environ["GLOO_SOCKET_IFNAME"] = options.interface
    prefixed = PrefixStore("all-reduce", store)
    dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=2)


def tuned(connection: socket.socket) -> socket.socket:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def fill(connection: socket.socket, buffer: bytearray) -> None:
    rest = memoryview(buffer)
    while rest:
        rest = rest[connection.recv_into(rest) :]


# --- The driver ---------------------------------------------------------------------------------


def measure(options: argparse.Namespace, ends: Sequence[End]) -> dict[Turn, list[float]]:
    """Run the worker and the servers at the two ends of a network, and return the times."""
    (worker_host, worker_interface, inside), (server_host, server_interface, beyond) = ends

    def start(
        role: str, command: list[str], host: str, interface: str, *more: str
    ) -> subprocess.Popen[str]:
        given = {"role": role, "host": host, "interface": interface, "peer": worker_host}
        given |= {"megabytes": options.megabytes, "repeats": options.repeats}
        arguments = [part for key, value in given.items() for part in (f"--{key}", str(value))]
        return subprocess.Popen(
            [*command, sys.executable, __file__, *arguments, *more],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    processes = [start("worker", inside, worker_host, worker_interface)]
    try:
        for server in range(max(SERVERS)):
            more = ("--server", str(server))
            processes.append(start("server", beyond, server_host, server_interface, *more))
        output = processes[0].stdout
        assert output is not None
        port = output.readline()
        for process in processes[1:]:
            assert process.stdin is not None
            process.stdin.write(port)
            process.stdin.flush()
        result = output.readline()
        if not result:
            sys.exit("the worker ended before it had measured: see above")
        return {(what, servers): times for what, servers, times in json.loads(result)}
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def rows_of(
    network: str, nominal: int | None, size: int, measured: Mapping[Turn, Sequence[float]]
) -> list[dict[str, Any]]:
    limits = {
        way: size / statistics.median(measured[f"plain socket, {way}", 1]) for way in ("up", "down")
    }
    rows = []
    for (what, servers), times in measured.items():
        median = statistics.median(times)
        on_wire = size / (2 if "bfloat16" in what else 1)
        limit = limits["down" if what in ("pull", "plain socket, down") else "up"]
        rows.append(
            {
                "network": network,
                "what": what,
                "servers": servers,
                "ms": median * 1e3,
                "ms_least": min(times) * 1e3,
                "ms_most": max(times) * 1e3,
                "gigabits_a_second": on_wire / median * 8e-9,
                "share_of_limit": on_wire / median / limit,
                "share_of_nominal": on_wire / median * 8e-9 / nominal if nominal else None,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=100, help="of float32 parameters")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--without-namespaces", action="store_true", help="over loopback only")
    parser.add_argument("--json", action="store_true")
    for hidden in ("--role", "--host", "--interface", "--peer"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--server", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    # A whole number of parameters, which two servers can share equally.
    options.bytes = int(options.megabytes * 1e6) // 8 * 8
    torch.set_num_threads(1)
    if options.role:
        {"worker": work, "server": serve}[options.role](options)
        return
    missing = None if options.without_namespaces else what_is_missing()
    if missing:
        parser.error(f"{missing}; --without-namespaces measures over loopback only")

    loopback: End = ("127.0.0.1", "lo", [])
    rows = rows_of("loopback", None, options.bytes, measure(options, [loopback, loopback]))
    if not options.without_namespaces:
        for network, (gigabits, burst) in SHAPES.items():
            with shaped_network(2, gigabits, burst):
                ends = [(address(node), interface(node), on_node(node, [])) for node in (0, 1)]
                rows += rows_of(network, gigabits, options.bytes, measure(options, ends))
    about = {**vars(describe("cpu", 1)), "torch": torch.__version__, "linux": os.uname().release}
    about |= {"megabytes": options.bytes / 1e6, "repeats": options.repeats}
    if options.json:
        print(json.dumps({"about": about, "rows": rows}))
        return
    print(about, "\n")
    show(rows)


if __name__ == "__main__":
    main()
