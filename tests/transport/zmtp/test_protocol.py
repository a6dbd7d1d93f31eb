"""Tests for one ZMTP connection without I/O: the handshake of each version, messages in parts of any size, and limits.

A message above a limit must fail before kvbus has stored it.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus.transport.zmtp import wire
from kvbus.transport.zmtp.mechanism import Role
from kvbus.transport.zmtp.protocol import Cancelled, Limits, Message, Opened, Protocol, State, Subscribed
from kvbus.transport.zmtp.reasons import ProtocolError, Reason
from kvbus.transport.zmtp.wire import encode_command, encode_message
from tests.transport.zmtp.curves import feed
from tests.transport.zmtp.peers import SIGNATURE, greeting, hello, hello_2, ready

LIMITS = Limits(
    frame_bytes=100, message_frames=4, message_bytes=150, subscriptions=3, subscription_bytes=50, handshake_bytes=200
)


def opened(role=Role.PUB, first=None, limits=LIMITS):
    """Return kvbus's end of a ZMTP connection after a complete handshake."""
    protocol = Protocol(role, accepting=True, limits=limits)
    feed(protocol, hello(b"SUB" if b"SUB" in role.peers else min(role.peers)) if first is None else first)
    assert protocol.state is State.OPEN
    protocol.data_to_send()
    return protocol


def failure(protocol, data):
    """Pass bytes to a protocol, and return the reason for which it fails.

    Check that the protocol then accepts nothing.
    """
    with pytest.raises(ProtocolError) as failed:
        feed(protocol, data)
    assert protocol.state is State.FAILED
    assert feed(protocol, b"more") == []
    assert protocol.held_bytes == protocol.topics.bytes
    return failed.value.reason


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (hello(b"SUB"), Opened(b"SUB", b"", (3, 1))),
        (hello(b"XSUB", minor=0), Opened(b"XSUB", b"", (3, 0))),
        (hello(b"SUB", minor=7, Identity=b"me"), Opened(b"SUB", b"me", (3, 1))),
        (greeting(4, 0) + ready(b"SUB"), Opened(b"SUB", b"", (3, 1))),
    ],
)
def test_a_pub_completes_the_handshake_of_each_peer(data, expected):
    for chunk in (1, 7, len(data)):
        protocol = Protocol(Role.PUB, accepting=True)
        events = [event for at in range(0, len(data), chunk) for event in feed(protocol, data[at : at + chunk])]
        assert events == [expected]
        assert protocol.data_to_send() == greeting() + ready(b"PUB")
        assert protocol.data_to_send() == b""


@pytest.mark.parametrize("data", [hello(b"DEALER"), hello(b"REQ", Identity=b"x" * 255)])
def test_a_router_socket_completes_the_handshake_of_each_peer(data):
    protocol = Protocol(Role.ROUTER, accepting=True)
    assert [type(event) for event in feed(protocol, data)] == [Opened]


def test_the_mechanism_is_sent_only_after_the_first_bytes_of_the_peer():
    """kvbus sends the name of its security mechanism only after the beginning of the peer's greeting.

    If libzmq reads the name of another mechanism than its own, it closes the connection without sending its own name.
    kvbus would then not learn the peer's mechanism.
    """
    protocol = Protocol(Role.PUB, accepting=True)
    assert protocol.data_to_send() == SIGNATURE + b"\3"
    feed(protocol, SIGNATURE)
    assert protocol.data_to_send() == b""
    feed(protocol, b"\3")
    assert protocol.data_to_send() == greeting()[11:]
    feed(protocol, b"\1")
    assert protocol.data_to_send() == b""


@pytest.mark.parametrize("role", Role)
def test_the_connecting_side_sends_ready_first(role):
    protocol = Protocol(role, accepting=False)
    protocol.receive_data(greeting())
    assert protocol.next_event() is None
    assert protocol.data_to_send() == greeting() + ready(role.socket_type)
    peer = min(role.peers)
    assert feed(protocol, ready(peer)) == [Opened(peer, b"", (3, 1))]
    assert protocol.data_to_send() == b""


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x01", Reason.GREETING),  # ZMTP 1.0 without an identity
        (b"G", Reason.GREETING),
        (b"\x00", Reason.GREETING),
        (b"\xff" + bytes(7) + b"\x01\x00", Reason.GREETING),  # ZMTP 1.0 with a long frame
        (SIGNATURE + b"\x00", Reason.VERSION),
        (SIGNATURE + b"\x02", Reason.VERSION),
        (greeting(mechanism=b"CURVE"), Reason.MECHANISM),
        (greeting(mechanism=b""), Reason.MECHANISM),
        (hello(b"PULL"), Reason.SOCKET_TYPE),
        (hello(b"PUB"), Reason.SOCKET_TYPE),
        (hello(b""), Reason.SOCKET_TYPE),
        (greeting() + wire.command(b"READY"), Reason.SOCKET_TYPE),
        (SIGNATURE + b"\x01", Reason.VERSION),  # ZMTP 2.0
        (greeting() + b"\x08", Reason.FRAME),
        (greeting() + b"\x05", Reason.FRAME),
        (hello(b"SUB", Identity=b"x" * 256), Reason.COMMAND),
        (greeting() + encode_message([b"\1"]), Reason.COMMAND),
        (greeting() + wire.command(b"PING", b"\0\0"), Reason.COMMAND),
        (greeting() + wire.command(b"READY", b"\x0bSocket-Type\0\0\0\4SUB"), Reason.COMMAND),
        (greeting() + encode_command(b""), Reason.COMMAND),
        (greeting() + wire.error("go away"), Reason.REFUSED),
        (greeting() + b"\x06" + (5000).to_bytes(8, "big"), Reason.HANDSHAKE_BYTES),
    ],
)
def test_a_handshake_fails_at_the_first_byte_that_shows_it(data, reason):
    protocol = Protocol(Role.PUB, accepting=True)
    assert feed(protocol, data[:-1]) == []
    assert failure(protocol, data[-1:]) is reason


def test_an_unsuitable_socket_type_is_answered_with_error():
    protocol = Protocol(Role.ROUTER, accepting=True)
    protocol.receive_data(greeting())
    protocol.next_event()
    protocol.data_to_send()
    assert failure(protocol, ready(b"SUB")) is Reason.SOCKET_TYPE
    assert protocol.data_to_send() == wire.error("socket type SUB cannot talk to ROUTER")


def test_an_error_command_is_not_answered_with_error():
    protocol = Protocol(Role.PUB, accepting=True)
    feed(protocol, greeting())
    protocol.data_to_send()
    assert failure(protocol, wire.error("no")) is Reason.REFUSED
    assert protocol.data_to_send() == b""


@pytest.mark.parametrize("first", [hello(b"SUB"), hello(b"SUB", minor=0)])
def test_a_pub_accepts_subscriptions_as_messages(first):
    protocol = opened(first=first)
    assert feed(protocol, encode_message([b"\1a"]) * 2) == [Subscribed(b"a")]
    assert list(protocol.topics) == [b"a"]
    assert feed(protocol, encode_message([b"\0a"]) * 2) == [Cancelled(b"a")]
    assert feed(protocol, encode_message([b"\0never"])) == []
    assert list(protocol.topics) == []


def test_a_pub_accepts_subscriptions_as_commands():
    protocol = opened()
    assert feed(protocol, wire.command(b"SUBSCRIBE", b"a") * 2) == [Subscribed(b"a")]
    assert feed(protocol, wire.command(b"SUBSCRIBE")) == [Subscribed(b"")]
    assert feed(protocol, wire.command(b"CANCEL", b"a")) == [Cancelled(b"a")]
    assert list(protocol.topics) == [b""]


def test_messages_to_a_pub_that_are_not_subscriptions_are_ignored():
    protocol = opened()
    for frames in ([b""], [b"\2a"], [b"\1a", b"b"], [b"a", b"\1b"], [b"", b""]):
        assert feed(protocol, encode_message(frames)) == []
    assert protocol.held_bytes == 0


@pytest.mark.parametrize("role", Role)
def test_unknown_and_unexpected_commands_are_ignored(role):
    protocol = opened(role)
    data = wire.command(b"HELLO", b"x") + wire.command(b"PONG") + wire.command(b"READY")
    assert feed(protocol, data) == []
    if role is Role.ROUTER:
        assert feed(protocol, wire.command(b"SUBSCRIBE", b"a") + wire.command(b"CANCEL", b"a")) == []
    assert protocol.data_to_send() == b""


@pytest.mark.parametrize(("peer", "ours"), [(b"PUB", b"SUB"), (b"XPUB", b"SUB"), (b"SUB", b"PUB"), (b"XSUB", b"PUB")])
def test_a_shared_port_has_the_socket_type_that_suits_each_peer(peer, ours):
    protocol = Protocol(Role.EITHER, accepting=True, limits=LIMITS, publisher_limits=Limits(frame_bytes=1000))
    assert feed(protocol, hello(peer)) == [Opened(peer, b"", (3, 1))]
    assert protocol.data_to_send() == greeting() + ready(ours)
    if ours == b"PUB":
        assert feed(protocol, encode_message([b"\1a"])) == [Subscribed(b"a")]
        assert failure(protocol, encode_message([b"x" * 101])) is Reason.FRAME_BYTES
    else:
        assert feed(protocol, encode_message([b"\1a", b"x" * 1000])) == [Message([b"\1a", b"x" * 1000])]
        assert feed(protocol, wire.command(b"SUBSCRIBE", b"a")) == []
        assert failure(protocol, encode_message([b"x" * 1001])) is Reason.FRAME_BYTES


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (hello(b"DEALER"), Reason.SOCKET_TYPE),
        (hello(b""), Reason.SOCKET_TYPE),
        (greeting() + wire.command(b"READY"), Reason.SOCKET_TYPE),
        (greeting(mechanism=b"CURVE"), Reason.MECHANISM),
        (greeting(mechanism=b"PLAIN"), Reason.MECHANISM),
        (hello_2(1), Reason.VERSION),
        (hello_2(2), Reason.VERSION),
        (b"\x01\x00", Reason.GREETING),
    ],
)
def test_a_shared_port_refuses_a_peer_that_is_neither_publisher_nor_subscriber(data, reason):
    assert failure(Protocol(Role.EITHER, accepting=True), data) is reason


def test_frames_beyond_kept_frames_are_read_and_dropped():
    limits = Limits(frame_bytes=100, message_frames=1000, kept_frames=3, message_bytes=500)
    protocol = Protocol(Role.EITHER, accepting=True, publisher_limits=limits)
    feed(protocol, hello(b"PUB"))
    long = encode_message([b"%d" % n for n in range(100)])
    assert feed(protocol, long + encode_message([b"", b"1", b"2"])) == [
        Message([b"0", b"1", b"2"]),
        Message([b"", b"1", b"2"]),
    ]
    assert protocol.held_bytes == 0
    assert failure(protocol, encode_message([b"x" * 100] * 6)) is Reason.MESSAGE_BYTES


@pytest.mark.parametrize("version", [(3, 0), (3, 1)])
def test_a_subscription_has_the_form_of_the_zmtp_version(version):
    """ZMTP 3.0 sends a subscription as a message, and ZMTP 3.1 as a command. kvbus's publisher understands both
    forms.
    """
    protocol = Protocol(Role.EITHER, accepting=True)
    data = wire.subscribe(b"kv@" + b"a" * 300, version)
    assert feed(protocol, hello(b"SUB") + data)[1:] == [Subscribed(b"kv@" + b"a" * 300)]
    assert (data[0] & 4 == 4) is (version == (3, 1))


@pytest.mark.parametrize("role", Role)
def test_a_ping_is_answered_with_a_pong(role):
    protocol = opened(role)
    assert feed(protocol, wire.command(b"PING", b"\0\x0acontext")) == []
    assert protocol.data_to_send() == wire.command(b"PONG", b"context")
    assert failure(protocol, wire.command(b"PING", b"\0")) is Reason.COMMAND


def test_an_error_command_ends_the_connection():
    assert failure(opened(), wire.error("enough")) is Reason.REFUSED


messages = st.lists(st.lists(st.binary(max_size=300), min_size=1, max_size=5), min_size=1, max_size=4)


@given(messages, st.integers(1, 40))
def test_messages_of_a_dealer_are_complete_for_any_chunk_size(sent, chunk):
    protocol = opened(Role.ROUTER, limits=Limits())
    data = b"".join(map(encode_message, sent))
    events = [event for at in range(0, len(data), chunk) for event in feed(protocol, data[at : at + chunk])]
    assert events == [Message(frames) for frames in sent]
    assert protocol.held_bytes == 0


def test_a_handshake_and_messages_may_be_split_at_any_byte():
    sent = [[b"", b"x" * 3], [b"y" * 256, b"", b"z"], [b"a"]]
    data = hello(b"REQ") + b"".join(map(encode_message, sent))
    for at in range(len(data) + 1):
        protocol = Protocol(Role.ROUTER, accepting=True)
        events = feed(protocol, data[:at]) + feed(protocol, data[at:])
        assert events == [Opened(b"REQ", b"", (3, 1)), *map(Message, sent)]


@pytest.mark.parametrize(
    ("role", "data", "reason"),
    [
        (Role.ROUTER, b"\0\x65", Reason.FRAME_BYTES),
        (Role.PUB, b"\2" + b"\x7f" * 8, Reason.FRAME_BYTES),
        (Role.ROUTER, b"\1\0" * 5, Reason.MESSAGE_FRAMES),
        (Role.PUB, b"\1\0" * 5, Reason.MESSAGE_FRAMES),
        (Role.ROUTER, (b"\1\x40" + bytes(64)) * 3, Reason.MESSAGE_BYTES),
        (Role.PUB, b"".join(encode_message([b"\1" + bytes([n])]) for n in range(4)), Reason.SUBSCRIPTIONS),
        (
            Role.PUB,
            b"".join(wire.command(b"SUBSCRIBE", bytes([n]) * 26) for n in range(2)),
            Reason.SUBSCRIPTION_BYTES,
        ),
        (Role.PUB, b"\x04\0", Reason.COMMAND),
        (Role.PUB, b"\x10", Reason.FRAME),
    ],
)
def test_each_breach_of_the_protocol_has_its_reason(role, data, reason):
    assert failure(opened(role), data) is reason


def test_messages_of_exactly_the_maximum_size_are_accepted():
    protocol = opened(Role.ROUTER)
    for frames in ([b"x" * 100], [b"x" * 50] * 3, [b""] * 4):
        assert feed(protocol, encode_message(frames)) == [Message(frames)]


CEILING = 9 + max(LIMITS.frame_bytes, LIMITS.handshake_bytes) + LIMITS.message_bytes + LIMITS.subscription_bytes + 16


@settings(max_examples=400)
@given(
    role=st.sampled_from(Role),
    first=st.sampled_from([b"", SIGNATURE, greeting(), hello(b"SUB"), hello(b"DEALER"), hello_2(2), hello_2(5)]),
    parts=st.lists(
        st.one_of(
            st.binary(max_size=60),
            st.lists(st.binary(max_size=90), min_size=1, max_size=4).map(encode_message),
            st.binary(min_size=1, max_size=90).map(encode_command),
            st.sampled_from([b"\1\0", b"\0\2\1a", wire.command(b"PING", b"\0\0abc"), b"\2" + b"\0" * 7 + b"\x60"]),
        ),
        max_size=30,
    ),
    chunk=st.integers(1, 16),
    accepting=st.booleans(),
)
def test_arbitrary_bytes_exceed_no_limit_and_fail_only_with_protocol_errors(role, first, parts, chunk, accepting):
    protocol = Protocol(role, accepting=accepting, limits=LIMITS)
    data = first + b"".join(parts)
    try:
        for at in range(0, len(data), chunk):
            feed(protocol, data[at : at + chunk])
            assert protocol.held_bytes <= CEILING
            assert len(protocol.data_to_send()) < 2_000
            assert len(protocol.topics) <= LIMITS.subscriptions
    except ProtocolError:
        assert protocol.state is State.FAILED
        assert protocol.held_bytes <= LIMITS.subscription_bytes
