"""Links carry flat tensors between two processes: the leader of a group and a parameter server.

Each link is a separate Gloo process group with two ranks. The death of a process, or a timeout,
closes all connections of a process group, so it ends only this link. torch does not document the
constructor and the options that are used for this; no other module uses them.

Nothing is authenticated or encrypted, so links need a trusted network.

The following was observed with torch 2.13 on Linux, and the tests check it:

- Listening addresses. ``TCPStore`` listens on all interfaces, whichever host it is given, unless it
  is given a socket that already listens (``master_listen_fd``), as in ``open_store``. A Gloo device
  and its links listen on the address of the ``hostname`` with which the device was made.
- Detection of failures. Gloo reports a death immediately to operations that have not begun, but
  never to an operation in mid-transfer, which blocks until its timeout. Therefore each tensor is
  followed by a number, for which the receiver waits first, and is answered by a receipt, for which
  the sender waits first: neither begins while the tensor is in transfer. As a result, the death of
  a process is detected immediately. A process that hangs and a broken network are detected after
  the timeout.
- Message lengths. A message that is longer than the receiver's buffer aborts the receiver's
  process. Therefore both ends first compare their layouts, through the store, and every message has
  the agreed length.
- Timeouts. The timeout of a group also limits the wait at the store. The store is needed only while
  a link is made. A wait can be given a timeout of its own, which may be longer than the group's.
- Closing. ``ProcessGroupGloo.shutdown`` ends the process if a thread is waiting, ``abort`` does not
  wake that thread, and a connection stays open as long as a reference to any of its work exists.
  But if any wait of a group times out, all connections of the group are closed at once, and all
  threads that wait for them, at both ends, are woken. This is how ``close`` works.
"""

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore, Work
from torch.distributed import DistNetworkError, ProcessGroup, ProcessGroupGloo

from fineprune.errors import InputError, first_line

_PATIENT = timedelta(days=365)
_AT_ONCE = timedelta(milliseconds=1)
# A tag that no message has.
_CLOSING = 6
# The number of values that are rounded at a time. At 10 Gbit/s, rounding in pieces increased the
# throughput of a bfloat16 push from 74 % to 95 % of the network's. With float32 it has no effect.
_PIECE = 2_000_000


class LinkBroken(ConnectionError):
    """The other end died, closed the link or did not answer in time. The link remains broken."""


@dataclass(frozen=True)
class WireFormat:
    """The tensors of one direction of a link: flat, with ``elements`` values of type ``dtype``.

    With ``wire_dtype=torch.bfloat16``, float32 values are rounded to bfloat16, sent, and converted
    back to float32. This halves the number of bytes. It keeps the range of values and 8 bits of
    precision.
    """

    elements: int
    dtype: torch.dtype = torch.float32
    wire_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.wire_dtype is not None and (self.dtype, self.wire_dtype) != (
            torch.float32,
            torch.bfloat16,
        ):
            raise InputError(
                f"only float32 can travel in another type, and only as bfloat16, not "
                f"{_plain(self.dtype)} as {_plain(self.wire_dtype)}"
            )

    def __str__(self) -> str:
        wire = "" if self.wire_dtype is None else f" as {_plain(self.wire_dtype)}"
        return f"{self.elements:,} {_plain(self.dtype)}{wire}"


class Link:
    """One end of a link. Both ends are made at the same time, and each waits for the other.

    Side 0 sends tensors of the format ``up`` and receives tensors of the format ``down``; side 1
    does the opposite. Both directions can be used at the same time, each by one thread and for one
    message at a time. All buffers are allocated when the link is made. Tensors are contiguous, flat
    and on the CPU. A thread that waits lets other threads run; only ``close`` interrupts it.

    Args:
        store: The store in which the two ends find each other. While a thread waits for the store,
            all other threads with the same connection wait too, so give each thread a connection.
        name: The name of the link, which is the same at both ends and is used only once per store.
            If a link is made again, it needs a new name, such as one with the number of the
            attempt.
        side: The side of this end, 0 or 1.
        up: The format of the tensors from side 0 to side 1.
        down: The format of the tensors from side 1 to side 0.
        contents: Anything else that both ends must agree on, such as the names and shapes of the
            parameters.
        host: The address or name of this machine on which to listen; the other end connects to it.
        timeout_seconds: How long each message, and making the link, may take.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        side: int,
        up: WireFormat,
        down: WireFormat,
        *,
        contents: str = "",
        host: str = "127.0.0.1",
        timeout_seconds: float = 60.0,
    ) -> None:
        if timeout_seconds < 0.001:
            raise InputError(f"timeout_seconds is at least 0.001, not {timeout_seconds}")
        self.name = name
        self.side = side
        self.timeout_seconds = timeout_seconds
        self._broken: str | None = None
        self._outgoing = _Direction(up if side == 0 else down, tag=3 * side)
        self._incoming = _Direction(down if side == 0 else up, tag=3 * (1 - side))
        device = _device(host)
        described = f"{up} up, {down} down"
        try:
            if store.add(f"{name}/side{side}", 1) > 1:
                raise InputError(
                    f"link {name!r} was already made with this store: give every link, and every "
                    f"new attempt at one, a unique name"
                )
            store.set(f"{name}/layout{side}", f"{described}\n{contents}")
            store.wait([f"{name}/layout{1 - side}"], timedelta(seconds=timeout_seconds))
            other = store.get(f"{name}/layout{1 - side}").decode()
            theirs, _, their_contents = other.partition("\n")
            if (theirs, their_contents) != (described, contents):
                difference = "other contents" if theirs == described else repr(theirs)
                raise InputError(
                    f"link {name!r} needs the same layout at both ends, but this one has "
                    f"{described!r} and the other {difference}: build both from the same model and "
                    f"settings"
                )
            self._group: ProcessGroup | None = _two_ranks(
                PrefixStore(name, store), side, device, timeout_seconds
            )
        except RuntimeError as error:
            raise self._break("the other end to come", error) from None

    def send(self, tensor: Tensor, number: int = 0) -> None:
        """Send a tensor, and return when the other end has received all of it."""
        self.send_later(tensor, number).wait()

    def receive(self, into: Tensor, *, patient: bool = False) -> int:
        """Receive a tensor into this one, and return the number that came with it."""
        return self.receive_later(into).wait(patient=patient)

    def send_later(self, tensor: Tensor, number: int = 0) -> "Transfer":
        """Start to send. Do not change the tensor before ``wait()`` of the result has returned.

        Args:
            tensor: A tensor with the layout of this direction.
            number: A signed 64-bit number that is sent with the tensor, such as a version;
                ``wait()`` returns it at the other end.
        """
        way = self._outgoing
        what = f"{way.layout} to be taken"
        group = self._ready(way, tensor)
        way.number.fill_(number)
        other = 1 - self.side
        try:
            # The receipt is requested first, so that the other end can confirm immediately.
            works = [group.recv([way.receipt], other, way.tag + 2)]
            works += [group.send([piece], other, way.tag) for piece in way.leaving(tensor)]
            works.append(group.send([way.number], other, way.tag + 1))
        except RuntimeError as error:
            raise self._break(what, error) from None
        way.under_way = Transfer(self, way, tensor, works, what)
        return way.under_way

    def receive_later(self, into: Tensor) -> "Transfer":
        """Start to receive. Do not use the tensor before ``wait()`` of the result has returned."""
        way = self._incoming
        what = f"{way.layout} to come"
        group = self._ready(way, into)
        other = 1 - self.side
        try:
            body = [group.recv([piece], other, way.tag) for piece in way.pieces or (into,)]
            works = [group.recv([way.number], other, way.tag + 1), *body]
        except RuntimeError as error:
            raise self._break(what, error) from None
        way.under_way = Transfer(self, way, into, works, what)
        return way.under_way

    def close(self) -> None:
        """Close the connection. Unfinished messages are lost, and both ends get LinkBroken."""
        self._broken = self._broken or f"link {self.name!r} was closed at this end"
        group, self._group = self._group, None
        self._outgoing.under_way = self._incoming.under_way = None
        if group is not None:
            with contextlib.suppress(RuntimeError):
                never = torch.zeros(1, dtype=torch.int64)
                group.recv([never], 1 - self.side, _CLOSING).wait(_AT_ONCE)

    def _ready(self, way: "_Direction", tensor: Tensor) -> ProcessGroup:
        if self._broken is not None or self._group is None:
            raise LinkBroken(self._broken)
        if way.under_way is not None:
            raise RuntimeError(
                f"link {self.name!r} carries one message at a time in each direction: wait for the "
                f"last one first"
            )
        fits = tensor.dtype == way.layout.dtype and tensor.shape == (way.layout.elements,)
        if not (fits and tensor.is_contiguous() and tensor.device.type == "cpu"):
            raise InputError(
                f"link {self.name!r} carries flat contiguous tensors on the CPU of {way.layout}, "
                f"not {tuple(tensor.shape)} {_plain(tensor.dtype)} on {tensor.device}"
            )
        return self._group

    def _finish(self, transfer: "Transfer", patient: bool) -> int:
        group, way = self._group, transfer.way
        if self._broken is not None or group is None:
            raise LinkBroken(self._broken)
        first, *others = transfer.works
        try:
            first.wait(_PATIENT) if patient else first.wait()
            for work in others:
                work.wait()
        except RuntimeError as error:
            raise self._break(transfer.what, error) from None
        if way is self._incoming:
            # The tensor has arrived. If the other end dies now, the next message will fail.
            with contextlib.suppress(RuntimeError):
                group.send([way.receipt], 1 - self.side, way.tag + 2).wait()
            if way.staging is not None:
                transfer.tensor.copy_(way.staging)
        transfer.works = []
        way.under_way = None
        return int(way.number)

    def _break(self, expected: str, error: RuntimeError) -> LinkBroken:
        reason = _reason(error, self.timeout_seconds)
        message = f"link {self.name!r} is broken: expected {expected}, but {reason}"
        self._broken = self._broken or message
        return LinkBroken(self._broken)


@dataclass
class Transfer:
    """A message in transfer, to wait for once. It keeps its tensor alive."""

    link: Link
    way: "_Direction"
    tensor: Tensor
    works: list[Work]
    what: str

    def wait(self, *, patient: bool = False) -> int:
        """Wait until the message has arrived, and return the number that was sent with it.

        Args:
            patient: Whether to wait without limit for the other end to send or to confirm.
        """
        return self.link._finish(self, patient)


def open_store(host: str = "127.0.0.1", *, timeout_seconds: float = 60.0) -> TCPStore:
    """Open a store in which the two ends of links find each other.

    The store exists as long as the returned object. It listens on the address of ``host`` only, on
    a free port. The attributes ``host`` and ``port`` of the result are its address. A link does not
    need the store after it has been made.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listening = socket.create_server(address[:2], family=family)
    except OSError as error:
        reason = str(error.strerror).split(" (", 1)[0]
        raise InputError(
            f"cannot listen on {host}: {reason}; give an address of this machine"
        ) from None
    return TCPStore(
        host,
        listening.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_seconds),
        # From now on, the store owns the socket and closes it.
        master_listen_fd=listening.detach(),
    )


def join_store(host: str, port: int, *, timeout_seconds: float = 60.0) -> TCPStore:
    """Connect to a store that another process has opened."""
    try:
        return TCPStore(host, port, timeout=timedelta(seconds=timeout_seconds))
    except RuntimeError as error:
        raise LinkBroken(
            f"cannot join the store at {host}, port {port}: {_reason(error, timeout_seconds)}"
        ) from None


class _Direction:
    """One direction at one end of a link: its layout, its buffers and its message in transfer."""

    def __init__(self, layout: WireFormat, tag: int) -> None:
        self.layout = layout
        self.tag = tag
        self.number = torch.zeros(1, dtype=torch.int64)
        self.receipt = torch.zeros(1, dtype=torch.int64)
        self.staging: Tensor | None = None
        self.pieces: tuple[Tensor, ...] = ()
        if layout.wire_dtype is not None:
            self.staging = torch.empty(layout.elements, dtype=layout.wire_dtype)
            self.pieces = torch.split(self.staging, _PIECE)
        self.under_way: Transfer | None = None

    def leaving(self, tensor: Tensor) -> Iterator[Tensor]:
        """Yield the tensors to send. Each piece is rounded while the previous one is being sent."""
        if self.staging is None:
            yield tensor
        for piece, values in zip(self.pieces, torch.split(tensor, _PIECE), strict=False):
            yield piece.copy_(values)


def _device(host: str) -> ProcessGroupGloo.Device:
    try:
        return ProcessGroupGloo.create_device(hostname=host)
    except RuntimeError as error:
        raise InputError(
            f"cannot listen on {host!r}: {_reason(error)}; give an address of this machine"
        ) from None


def _two_ranks(
    store: Store, rank: int, device: ProcessGroupGloo.Device, timeout_seconds: float
) -> ProcessGroup:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [device]
    # These threads are for collectives. Sends and receives run on the device's thread.
    options._threads = 1
    options._timeout = timedelta(seconds=timeout_seconds)
    # A backend has the same methods ``send`` and ``recv`` as a process group.
    return cast(ProcessGroup, ProcessGroupGloo(store, rank, 2, options))


def _reason(error: RuntimeError, timeout_seconds: float = 0.0) -> str:
    text = first_line(error) or "it failed for no stated reason"
    if "closed by peer" in text or "reset by peer" in text:
        return "the other end died or closed the link"
    if "timed out" in text.lower() or "timeout" in text:
        return f"nothing happened for {timeout_seconds:g} s"
    if isinstance(error, DistNetworkError):
        return "the store was lost"
    # Gloo's messages begin with the name of a source file and end with advice.
    return text.split("] ", 1)[-1].split(". This is", 1)[0]


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
