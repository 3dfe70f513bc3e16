"""Messages between the coordinator and its processes, and the channels that carry them."""

import dataclasses
import socket

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fineprune.distributed.parameter_servers.batch_ledger import BatchKey
from fineprune.distributed.parameter_servers.channel import ChannelClosed, Listener, join_channel
from fineprune.distributed.parameter_servers.messages import (
    Connect,
    Contribution,
    Hello,
    Message,
    Ping,
    Ready,
    Step,
    Stepped,
    Update,
    decode,
    encode,
)

MESSAGES: list[Message] = [
    Ping(),
    Hello(3, 4711, "n1"),
    Step(BatchKey(2, 7), np.arange(5), np.ones(5, np.float32), 0.5, True, False, BatchKey(2, 8)),
    Step(BatchKey(2, 7), np.arange(0), None, 1.0, False, next_indices=np.arange(3)),
    Stepped(
        np.array([0.5, np.nan, np.inf], np.float32), {"compute": 0.25}, {"labels": np.arange(3)}
    ),
    Update([Contribution(BatchKey(0, 1), "group0-generation1", 1.0)], ["group0"], 0.1),
    Connect("group0", {"odd": np.zeros((2, 0, 3), np.int64), "scalar": np.array(1.5)}, None),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_arrives_as_it_was_sent(message):
    arrived = decode(encode(message))
    assert type(arrived) is type(message)
    np.testing.assert_equal(vars(arrived), vars(message))
    for field in dataclasses.fields(message):
        value = getattr(message, field.name)
        if isinstance(value, np.ndarray):
            assert getattr(arrived, field.name).dtype == value.dtype


@given(frame=st.binary(max_size=60), cut=st.integers(0, 200))
def test_other_bytes_are_no_message(frame, cut):
    whole = encode(MESSAGES[2])
    for wrong in (frame, whole[: min(cut, len(whole) - 1)], b"\0\0\0\2{}" + frame):
        with pytest.raises(ValueError, match="expected a message"):
            decode(wrong)


def test_no_object_is_unpickled():
    with pytest.raises(TypeError, match="a message carries no ndarray"):
        encode(Stepped(np.array([object()]), {}, {}))
    frame = encode(Stepped(np.zeros(1), {}, {})).replace(b"<f8", b"|O8")
    with pytest.raises(ValueError, match="carries no arrays of type object"):
        decode(frame)


@pytest.fixture
def listener():
    made = Listener("127.0.0.1")
    yield made
    made.close()


def test_only_a_process_with_the_key_is_accepted(listener):
    with socket.create_connection(listener.address) as silent:
        silent.sendall(b"\0\0\0\3abc")
        with pytest.raises(ChannelClosed):
            join_channel(listener.address, b"another key")
        end = join_channel(listener.address, listener.key)
        channel = listener.accepted()
        end.send(Ready())
        assert channel.receive() == Ready()
        channel.close()
        with pytest.raises(ChannelClosed):
            end.receive()


def test_nonsense_ends_a_channel(listener):
    end = join_channel(listener.address, listener.key)
    channel = listener.accepted()
    end._connection.send_bytes(b"nonsense")
    with pytest.raises(ChannelClosed, match="expected a message, got 8 other bytes"):
        channel.receive()
