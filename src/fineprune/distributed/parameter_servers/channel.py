"""Channels carry messages between the coordinator and each of its processes.

A channel is a TCP connection with the framing and the authentication of
``multiprocessing.connection``: both ends prove that they know the key of the training, before
anything else is read. The key is random, and processes receive it from Ray when they are started.
After that, messages are neither signed nor encrypted, so channels need a trusted network.

The end of a channel shows that the process at its other end has died, however that happened. A
process that hangs does not end its channel, but answers no pings.
"""

import contextlib
import os
import queue
import secrets
import socket
import struct
import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from fineprune.distributed.parameter_servers.messages import Message, Ping, Pong, decode, encode

# How long the other end may take to connect and to prove that it knows the key.
_GREETING_SECONDS = 10.0
# How long the coordinator waits for the rest of a message, or for room for it.
_STALLED_SECONDS = 60.0


class ChannelClosed(ConnectionError):
    """The process at the other end has ended, or stopped in the middle of a message."""


class Channel:
    """One end of a channel. Only one thread at a time may send, and one receive.

    Both ends of the connection have proved that they know the key.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def fileno(self) -> int:
        """Return the number of the socket, to wait for messages of several channels."""
        return self._connection.fileno()

    def send(self, message: Message) -> None:
        """Send a message."""
        try:
            self._connection.send_bytes(encode(message))
        except OSError as error:
            raise ChannelClosed(str(error)) from None

    def receive(self) -> Message:
        """Wait for a message, and return it."""
        try:
            return decode(self._connection.recv_bytes())
        except (EOFError, OSError, ValueError) as error:
            raise ChannelClosed(str(error)) from None

    def close(self) -> None:
        """Close this end. The other end gets ``ChannelClosed``."""
        self._connection.close()


class AnsweringChannel(Channel):
    """The end of a channel in a worker or a server: a thread receives messages and answers pings.

    Therefore pings are answered even while this process builds a replica or computes. Several
    threads may send.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._sending = threading.Lock()
        self._received: queue.SimpleQueue[Message | ChannelClosed] = queue.SimpleQueue()
        threading.Thread(target=self._answer, name="pings", daemon=True).start()

    def send(self, message: Message) -> None:
        """Send a message, as in ``Channel``."""
        with self._sending:
            super().send(message)

    def receive(self) -> Message:
        """Wait for a message that is no ping, and return it, as in ``Channel``."""
        received = self._received.get()
        if isinstance(received, ChannelClosed):
            raise received
        return received

    def _answer(self) -> None:
        try:
            while True:
                message = super().receive()
                if isinstance(message, Ping):
                    self.send(Pong())
                else:
                    self._received.put(message)
        except ChannelClosed as error:
            self._received.put(error)


class Listener:
    """Accepts the channels of the processes that know the key.

    Attributes:
        address: The address and the port.
        key: The key of the training.
    """

    def __init__(self, host: str) -> None:
        self.key = secrets.token_bytes(32)
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        self._socket = socket.create_server(address[:2], family=family)
        self.address: tuple[str, int] = (host, self._socket.getsockname()[1])
        self._accepted: queue.SimpleQueue[Channel] = queue.SimpleQueue()
        self._waiting, self._waking = socket.socketpair()
        threading.Thread(target=self._accept, name="channels", daemon=True).start()

    def fileno(self) -> int:
        """Return the number of a socket that can be read if there are accepted channels."""
        return self._waiting.fileno()

    def accepted(self) -> Channel:
        """Return the next accepted channel. Call this once whenever the socket can be read."""
        self._waiting.recv(1)
        return self._accepted.get()

    def close(self) -> None:
        """Accept no more channels."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # Wakes the thread.
        for one in (self._socket, self._waiting, self._waking):
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._socket.accept()
            except OSError:
                return  # This listener was closed.
            # Each in a thread of its own, because whoever connects may then be silent.
            threading.Thread(target=self._greet, args=(connected,), daemon=True).start()

    def _greet(self, connected: socket.socket) -> None:
        connection = _connection(connected)
        _limit_waits(connection.fileno(), _GREETING_SECONDS)
        try:
            deliver_challenge(connection, self.key)
            answer_challenge(connection, self.key)
        except (AuthenticationError, EOFError, OSError):
            connection.close()
            return
        _limit_waits(connection.fileno(), _STALLED_SECONDS)
        self._accepted.put(Channel(connection))
        with contextlib.suppress(OSError):  # This listener was closed.
            self._waking.send(b"!")


def join_channel(address: tuple[str, int], key: bytes) -> AnsweringChannel:
    """Connect to the listener of the coordinator."""
    try:
        connected = socket.create_connection(address, timeout=_GREETING_SECONDS)
        connected.settimeout(None)
        connection = _connection(connected)
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
    except (AuthenticationError, EOFError, OSError) as error:
        raise ChannelClosed(f"the coordinator does not answer: {error}") from None
    return AnsweringChannel(connection)


def _connection(connected: socket.socket) -> Connection:
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(connected.detach())


def _limit_waits(number: int, seconds: float) -> None:
    """Let reads and writes of a socket fail that make no progress for so many seconds."""
    with socket.socket(fileno=os.dup(number)) as same:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            same.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), 0))
