"""Links between processes: transfers, refused arguments, failures, and listening addresses."""

import multiprocessing as mp
import os
import signal
import threading
import time
import warnings
from contextlib import closing
from pathlib import Path

import pytest
import torch

from fineprune.distributed.parameter_servers import link as links
from fineprune.distributed.parameter_servers.link import (
    Link,
    LinkBroken,
    WireFormat,
    join_store,
    open_store,
)
from fineprune.distributed.parameter_servers.worker import _use_loopback

PATIENCE = 60.0  # seconds; only a test that fails waits this long
BIG = WireFormat(16_000_000)  # 64 MB, which is more than the buffers of a connection hold
SMALL = WireFormat(5)
ROUNDED = WireFormat(links._PIECE + 3, wire_dtype=torch.bfloat16)
LISTENING = "0A"  # the state of a listening socket in /proc/net/tcp


# --- Functions of the other process ------------------------------------------------------------


def peer(connection, port):
    """Join the store, then run the functions that the test names, and send back their results."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    store = join_store("127.0.0.1", port, timeout_seconds=PATIENCE)
    connection.send("ready")
    while True:
        act, *arguments = connection.recv()
        connection.send(act(store, connection, *arguments))


def echo(store, connection, name, up, down, port=None):
    """Send back each tensor that arrives, until the link breaks."""
    if port is not None:
        store = join_store("127.0.0.1", port, timeout_seconds=PATIENCE)
    link = make(store, name, 1, up, down)
    values = torch.zeros(up.elements, dtype=up.dtype)
    connection.send("linked")
    try:
        while True:
            number = link.receive(values)
            link.send(values.to(down.dtype), number + 1)
    except LinkBroken as error:
        return str(error)


def refused(store, connection, name, up, down, contents=""):
    try:
        make(store, name, 1, up, down, contents=contents)
    except ValueError as error:
        return str(error)


def send_for_ever(store, connection, name):
    link = make(store, name, 1, SMALL, BIG)
    values = torch.ones(BIG.elements)
    connection.send("linked")
    while True:
        link.send(values)


def receive_once(store, connection, name, timeout):
    link = make(store, name, 1, BIG, BIG, timeout_seconds=timeout)
    transfer = link.receive_later(torch.zeros(BIG.elements))
    connection.send("receiving")
    transfer.wait()


def send_when_told(store, connection, name, timeout):
    link = make(store, name, 1, SMALL, SMALL, timeout_seconds=timeout)
    connection.send("linked")
    connection.recv()
    link.send(torch.ones(SMALL.elements), 7)


def wait_for_a_message(store, connection, name):
    link = make(store, name, 1, SMALL, SMALL)
    connection.send("linked")
    try:
        link.receive(torch.zeros(SMALL.elements), patient=True)
    except LinkBroken as error:
        return str(error)


def addresses(store, connection, name):
    """Return the addresses on which this process listens while it has a store and a link."""
    own = open_store(timeout_seconds=PATIENCE)
    link = make(store, name, 1, SMALL, SMALL)
    found = listening()
    link.close()
    return found, own.port


# --- Shared by the tests -----------------------------------------------------------------------


class Peer:
    def __init__(self, port):
        self.connection, theirs = mp.Pipe()
        context = mp.get_context("spawn")
        self.process = context.Process(target=peer, args=(theirs, port), daemon=True)
        self.process.start()
        assert self.process.pid is not None
        self.pid = self.process.pid
        theirs.close()

    def ask(self, act, *arguments):
        self.connection.send((act, *arguments))

    def answer(self):
        assert self.connection.poll(2 * PATIENCE), "the peer does not answer"
        return self.connection.recv()

    def signal(self, number):
        os.kill(self.pid, number)

    def stop(self):
        self.signal(signal.SIGSTOP)
        assert os.WIFSTOPPED(os.waitpid(self.pid, os.WUNTRACED)[1])

    def kill(self):
        self.process.kill()
        self.process.join()


def make(store, name, side, up, down, **settings):
    return Link(store, name, side, up, down, **{"timeout_seconds": PATIENCE, **settings})


@pytest.fixture(scope="module")
def store():
    return open_store(timeout_seconds=PATIENCE)


@pytest.fixture(scope="module")
def peers(store):
    """Return one process that no test kills, and three that tests may kill."""
    started = [Peer(store.port) for _ in range(4)]
    for one in started:
        assert one.answer() == "ready"
    yield started
    for one in started:
        one.kill()


@pytest.fixture
def living(peers):
    return peers[0]


def connected(store, other, name, up, down, *more):
    other.ask(echo, name, up, down, *more)
    link = make(store, name, 0, up, down)
    assert other.answer() == "linked"
    return link


def there_and_back(link, values, back, number=0):
    sending = link.send_later(values, number)
    assert link.receive(back) == number + 1
    sending.wait()
    return back


def listening():
    """Return the addresses on which this process listens, in the kernel's hexadecimal form."""
    mine = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            mine.add(os.readlink(descriptor))
        except OSError:
            continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == LISTENING and f"socket:[{rest[5]}]" in mine:
                found.append(local)
    return found


# --- Transfers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_arrive_bit_for_bit(store, living, dtype):
    layout = WireFormat(10_007, dtype)
    random = torch.Generator().manual_seed(1)
    values = torch.randn(layout.elements, dtype=dtype, generator=random)
    values[:6] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 5e-324], dtype=dtype)
    whole = torch.int32 if dtype == torch.float32 else torch.int64
    with closing(connected(store, living, f"exact {dtype}", layout, layout)) as link:
        for number in (7, -(2**62)):
            back = there_and_back(link, values, torch.zeros_like(values), number)
            assert torch.equal(back.view(whole), values.view(whole))
    assert "died or closed the link" in living.answer()


def test_bfloat16_arrives_rounded_and_as_float32(store, living):
    random = torch.Generator().manual_seed(2)
    values = torch.randn(ROUNDED.elements, generator=random) * 1e-3
    before = values.clone()
    with closing(
        connected(store, living, "rounded", ROUNDED, WireFormat(ROUNDED.elements))
    ) as link:
        for _ in range(2):
            back = there_and_back(link, values, torch.zeros_like(values))
            assert torch.equal(back, before.bfloat16().float())
    assert torch.equal(values, before)
    living.answer()


def test_a_link_lives_on_without_its_store(living):
    own = open_store(timeout_seconds=PATIENCE)
    client = join_store("127.0.0.1", own.port, timeout_seconds=PATIENCE)
    with closing(connected(client, living, "on its own", SMALL, SMALL, own.port)) as link:
        del own, client
        assert torch.equal(there_and_back(link, torch.ones(5), torch.zeros(5)), torch.ones(5))
    living.answer()


# --- Refused arguments -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theirs", "contents"),
    [
        ((WireFormat(6), SMALL), ""),
        ((SMALL, WireFormat(5, torch.float64)), ""),
        ((WireFormat(5, wire_dtype=torch.bfloat16), SMALL), ""),
        ((SMALL, SMALL), "weight (5,)"),
    ],
)
def test_layouts_that_differ_fail_at_both_ends(store, living, theirs, contents):
    name = f"differs {theirs} {contents}"
    living.ask(refused, name, *theirs, contents)
    with pytest.raises(ValueError, match="same layout at both ends") as caught:
        make(store, name, 0, SMALL, SMALL, contents="bias (5,)" if contents else "")
    for message in (str(caught.value), living.answer()):
        assert "'5 float32 up, 5 float32 down'" in message
        assert len(message.splitlines()) == 1


def test_wrong_settings_and_wrong_tensors_are_one_line(store, living):
    for wrong in (
        lambda: WireFormat(5, torch.float64, torch.bfloat16),
        lambda: make(store, "wrong", 0, SMALL, SMALL, timeout_seconds=0),
        lambda: make(store, "wrong", 0, SMALL, SMALL, host="192.0.2.1"),
        lambda: open_store("192.0.2.1"),
    ):
        with pytest.raises(ValueError, match=r"\A[^\n]+\Z"):
            wrong()
    with closing(connected(store, living, "tensors", SMALL, SMALL)) as link:
        for tensor in (
            torch.ones(4),
            torch.ones(5, dtype=torch.float64),
            torch.ones(10)[::2],
            torch.ones(5, 1),
        ):
            for way in (link.send, link.receive):
                with pytest.raises(ValueError, match=r"\A.*carries flat contiguous.*\Z"):
                    way(tensor)
        transfer = link.receive_later(torch.zeros(5))
        with pytest.raises(RuntimeError, match="wait for the last one first"):
            link.receive_later(torch.zeros(5))
        link.send(torch.ones(5), 1)
        assert transfer.wait() == 2
        with pytest.raises(ValueError, match="was already made"):
            make(store, "tensors", 0, SMALL, SMALL)
    living.answer()
    with pytest.raises(LinkBroken, match="closed at this end"):
        link.send(torch.ones(5))


# --- Failures ----------------------------------------------------------------------------------


def test_nobody_comes(store):
    with pytest.raises(LinkBroken, match=r"\Alink 'alone' .* other end to come, but nothing.*\Z"):
        make(store, "alone", 0, SMALL, SMALL, timeout_seconds=0.3)


def test_a_peer_killed_while_it_sends_breaks_its_link_and_no_other(store, peers):
    living, doomed = peers[:2]
    with closing(connected(store, living, "bystander", SMALL, SMALL)) as bystander:
        doomed.ask(send_for_ever, "doomed")
        link = make(store, "doomed", 0, SMALL, BIG)
        assert doomed.answer() == "linked"
        into = torch.zeros(BIG.elements)
        for _ in range(100):
            into.zero_()
            transfer = link.receive_later(into)
            while into[0] == 0:
                pass
            doomed.stop()
            time.sleep(0.1)  # for the contents of the connection's buffers to arrive
            if into[-1] == 0:
                break
            doomed.signal(signal.SIGCONT)
            transfer.wait()
        assert (into[0].item(), into[-1].item()) == (1, 0), "never caught in mid-transfer"
        under_way = bystander.send_later(torch.ones(5))
        doomed.kill()
        with pytest.raises(LinkBroken, match=r"\Alink 'doomed' .* to come, but the other end died"):
            transfer.wait()
        with pytest.raises(LinkBroken, match="link 'doomed'"):
            link.send(torch.ones(5))
        link.close()
        assert bystander.receive(torch.zeros(5)) == 1
        under_way.wait()
        assert torch.equal(there_and_back(bystander, into[:5], torch.zeros(5)), torch.ones(5))
    living.answer()


def test_a_peer_killed_while_it_receives_breaks_the_link(store, peers):
    doomed = peers[2]
    doomed.ask(receive_once, "taken", PATIENCE)
    link = make(store, "taken", 0, BIG, BIG)
    assert doomed.answer() == "receiving"
    doomed.stop()
    transfer = link.send_later(torch.ones(BIG.elements))
    doomed.kill()
    with pytest.raises(LinkBroken, match=r"\Alink 'taken' .* to be taken, but the other end died"):
        transfer.wait()


def test_a_peer_that_hangs_breaks_the_link_after_the_timeout(store, peers):
    hanging = peers[3]
    hanging.ask(receive_once, "hanging", 3.0)
    link = make(store, "hanging", 0, BIG, BIG, timeout_seconds=3.0)
    assert hanging.answer() == "receiving"
    hanging.stop()
    transfer = link.send_later(torch.ones(BIG.elements))
    with pytest.raises(LinkBroken, match=r"\Alink 'hanging' .* nothing happened for 3 s\Z"):
        transfer.wait()


def test_a_patient_receiver_waits_longer_than_the_timeout(store, living):
    timeout = 1.0
    living.ask(send_when_told, "patient", timeout)
    with closing(make(store, "patient", 0, SMALL, SMALL, timeout_seconds=timeout)) as link:
        assert living.answer() == "linked"
        received = link.receive_later(torch.zeros(SMALL.elements))
        tell = threading.Timer(2 * timeout, living.connection.send, ["now"])
        tell.start()
        assert received.wait(patient=True) == 7
    living.answer()


def test_closing_wakes_those_who_wait_at_both_ends(store, living):
    living.ask(wait_for_a_message, "closed")
    link = make(store, "closed", 0, SMALL, SMALL)
    assert living.answer() == "linked"
    errors = []

    def wait():
        try:
            link.receive(torch.zeros(SMALL.elements), patient=True)
        except LinkBroken as error:
            errors.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.2)  # for the thread to wait
    link.close()
    waiting.join(PATIENCE)
    assert errors == ["link 'closed' was closed at this end"]
    assert "the other end died or closed the link" in living.answer()


# --- Listening addresses -----------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="needs Linux's /proc")
def test_nothing_listens_beyond_loopback(store, living):
    living.ask(addresses, "listens")
    link = make(store, "listens", 0, SMALL, SMALL)
    theirs, their_store = living.answer()
    ours = listening()
    link.close()
    for found, port in ((theirs, their_store), (ours, store.port)):
        assert f"0100007F:{port:04X}" in found
        assert len(found) >= 2  # the store and the link
        assert all(address.startswith("0100007F:") for address in found)


@pytest.mark.parametrize(
    ("interfaces", "used"), [("lo eth0", "lo"), ("lo0 en0", "lo0"), ("x", None)]
)
def test_a_group_on_one_machine_uses_the_loopback_interface(interfaces, used, monkeypatch):
    variables = ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"]
    kept = {name: value for name, value in os.environ.items() if name not in variables}
    monkeypatch.setattr("os.environ", kept)
    monkeypatch.setattr("socket.if_nameindex", lambda: list(enumerate(interfaces.split(), 1)))
    _use_loopback()
    assert [kept.get(name) for name in variables] == [used, used]
