"""The messages between the coordinator and its workers and servers, and their form on the wire.

A message is a JSON text, preceded by its length and followed by the bytes of the arrays in it. No
message is unpickled.

The first messages of a process are ``Hello``, when it runs, and ``Ready``, when what it holds has
been built. After that, it executes requests in the order in which they come.
"""

import json
import math
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fineprune.distributed.parameter_servers.batch_ledger import BatchKey

Array: TypeAlias = np.ndarray[Any, Any]
# The buffers and the frozen parameters of a model by their names, or the states of torch's random
# generators by the kinds of their devices.
Arrays: TypeAlias = dict[str, Array]

_LENGTH = struct.Struct("!I")
# The key of the JSON object that stands for an array. No parameter or buffer has this name.
_ARRAY = ""
_ARRAY_KINDS = "biufc"


class Contribution(NamedTuple):
    """What one staged gradient contributes to an update.

    Attributes:
        key: The gradient's batch.
        reader: The name of the group that staged the gradient.
        share: The weight of the gradient in the mean.
    """

    key: BatchKey
    reader: str
    share: float


@dataclass
class Message:
    """What a channel carries. Each subclass is a kind of message."""


@dataclass
class Hello(Message):
    """A process runs. ``number`` was given to it when it was started."""

    number: int
    pid: int
    node: str


@dataclass
class Ready(Message):
    """The process has built its replica or its part of the parameters."""


@dataclass
class Done(Message):
    """The process has executed ``Connect`` or ``Restore``."""


@dataclass
class Ping(Message):
    """Answer ``Pong`` at once, even while another request is executed."""


@dataclass
class Pong(Message):
    """The answer to ``Ping``."""


# -- to a worker ----------------------------------------------------------------------------------


@dataclass
class Connect(Message):
    """Close the old links, join the group, and make links to all servers: ``Done``.

    Attributes:
        name: The name of this generation of the group, which names its links.
        buffers: The buffers and frozen parameters to load; None to keep those of the process.
        random: The states of torch's random generators to load; None to keep them.
    """

    name: str
    buffers: Arrays | None = None
    random: Arrays | None = None


@dataclass
class Step(Message):
    """Compute the gradient of a batch, and push it to all servers: ``Stepped``.

    Attributes:
        key: The batch.
        indices: The indices of this member's samples, int64, shape (B,).
        weights: The weights of their losses, float32, shape (B,); None for equal weights.
        share: The weight of this member's mean in the mean of the group. If it is 0, the member
            steps only because the others wait for it, and its gradient has no effect.
        reads: Whether to receive the parameters first, which the servers have been told to send.
        first: Whether this is the group's first step of an epoch.
        next_key: The batch that this group probably gets next; None if none is known.
        next_indices: The indices of this member's samples in that batch.
    """

    key: BatchKey
    indices: Array
    weights: Array | None
    share: float
    reads: bool
    first: bool = False
    next_key: BatchKey | None = None
    next_indices: Array | None = None

    def __post_init__(self) -> None:
        self.key = BatchKey(*self.key)
        self.next_key = self.next_key and BatchKey(*self.next_key)


@dataclass
class Save(Message):
    """Return the buffers and the random state: ``Saved``."""


# -- from a worker --------------------------------------------------------------------------------


@dataclass
class Stepped(Message):
    """The step has ended, and all servers have received the gradient of the group's leader.

    Attributes:
        losses: The loss of each sample of this member, float32, shape (B,).
        seconds: The duration of each phase, in seconds.
        watched: What the replica returned besides the losses, one row per sample, by names.
    """

    losses: Array
    seconds: dict[str, float]
    watched: Arrays


@dataclass
class Broken(Message):
    """A link or the group's communication is broken. The worker has closed all its links."""

    reason: str


@dataclass
class Saved(Message):
    """The buffers and the states of torch's random generators."""

    buffers: Arrays
    random: Arrays


# -- to a server ----------------------------------------------------------------------------------


@dataclass
class Admit(Message):
    """Make the link to a group. Each generation of a group has a new name."""

    reader: str


@dataclass
class Forget(Message):
    """Close the link to a group, and drop its gradient."""

    reader: str


@dataclass
class Update(Message):
    """Apply staged gradients as one update, and send the parameters to readers.

    Attributes:
        contributions: The gradients, in the order of their keys. If there are none, there is no
            update, and the version stays the same.
        readers: The names of the groups that receive the parameters after the update.
        rate: The learning rate of the update.
    """

    contributions: list[Contribution]
    readers: list[str]
    rate: float

    def __post_init__(self) -> None:
        self.contributions = [
            Contribution(BatchKey(*key), reader, share) for key, reader, share in self.contributions
        ]


@dataclass
class Snapshot(Message):
    """Write the complete state to a file: ``Written``."""

    number: int
    path: str


@dataclass
class Restore(Message):
    """Close all links, and return to the snapshot in a file: ``Done``."""

    path: str


# -- from a server --------------------------------------------------------------------------------


@dataclass
class Written(Message):
    """The snapshot is complete.

    Attributes:
        number: The number of the request.
        seconds: The duration of each phase since the last snapshot, in seconds.
    """

    number: int
    seconds: dict[str, float]


_KINDS: dict[str, Any] = {kind.__name__: kind for kind in Message.__subclasses__()}


def encode(message: Message) -> bytes:
    """Return the bytes of a message."""
    arrays: list[Any] = []

    def stand_in(value: Any) -> Any:
        if not isinstance(value, np.ndarray) or value.dtype.kind not in _ARRAY_KINDS:
            raise TypeError(f"a message carries no {type(value).__name__}")
        arrays.append(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
        return {_ARRAY: [value.dtype.str, value.shape]}

    content = [type(message).__name__, vars(message)]
    text = json.dumps(content, default=stand_in, check_circular=False).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *arrays])


def decode(frame: bytes) -> Message:
    """Return the message with these bytes."""
    try:
        (length,) = _LENGTH.unpack_from(frame)
        place = _LENGTH.size + length

        def array(found: dict[str, Any]) -> Any:
            nonlocal place
            if _ARRAY not in found:
                return found
            dtype, shape = np.dtype(found[_ARRAY][0]), found[_ARRAY][1]
            if dtype.kind not in _ARRAY_KINDS:
                raise ValueError(f"a message carries no arrays of type {dtype}")
            # The bytes may not be aligned for their type, but a copy is.
            values = np.frombuffer(frame, np.uint8, math.prod(shape) * dtype.itemsize, place)
            place += values.nbytes
            return values.copy().view(dtype).reshape(shape)

        kind, fields = json.loads(frame[_LENGTH.size : place], object_hook=array)
        message: Message = _KINDS[kind](**fields)
    except (ValueError, TypeError, KeyError, struct.error) as error:
        raise ValueError(f"expected a message, got {len(frame)} other bytes: {error}") from error
    return message
