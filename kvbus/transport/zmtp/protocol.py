"""One connection of ZMTP 3.0 or 3.1, without I/O: it turns received bytes into events and into bytes to send.

Pass received bytes to :meth:`Protocol.receive_data`, get one event at a time from :meth:`Protocol.next_event` (so the
caller limits its work per iteration), and send the result of :meth:`Protocol.data_to_send`. This object does not send
messages: without CURVE their bytes are the same for every peer (:func:`~kvbus.transport.zmtp.wire.encode_message`).
After the handshake the caller seals all bytes with :attr:`Protocol.sealing`, if the mechanism has it. This includes the
result of :meth:`Protocol.data_to_send`.

kvbus sends no PING, because go-zeromq passes a PING to its application as a message.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from kvbus.transport.zmtp import wire
from kvbus.transport.zmtp.mechanism import Mechanism, Null, Role, Sealing
from kvbus.transport.zmtp.reasons import ProtocolError, Reason
from kvbus.transport.zmtp.wire import Frame, take_frame

MAX_IDENTITY: Final = 255

_NO_ANSWER: Final = frozenset({Reason.REFUSED, Reason.CURVE, Reason.KEY, Reason.NONCE})
"""Failures of a handshake that are not answered by an ERROR. After an ERROR libzmq never dials again. A router whose
key is added to the allow-list later would then never connect."""

_SUBSCRIBE: Final = 1
_CANCEL: Final = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds for the data of one peer. Each bound is checked before kvbus keeps the data.

    Attributes:
        frame_bytes: maximum bytes of a frame.
        message_frames: maximum number of frames of a message. Even an empty frame costs an object of some 40 bytes.
        kept_frames: maximum number of frames kept per message; further frames are read and dropped.
        message_bytes: maximum bytes of a message.
        subscriptions: maximum number of topics that a peer subscribes to.
        subscription_bytes: maximum bytes of all topics of a peer.
        handshake_bytes: maximum bytes of the handshake after the greeting.
    """

    frame_bytes: int = 65_536
    message_frames: int = 256
    kept_frames: int = 256
    message_bytes: int = 65_536
    subscriptions: int = 1_024
    subscription_bytes: int = 65_536
    handshake_bytes: int = 4_096


DEFAULT: Final = Limits()


class Opened(NamedTuple):
    """The handshake has succeeded."""

    socket_type: bytes
    identity: bytes
    version: tuple[int, int]
    key: bytes = b""
    """The public key that the peer has proven to own (CURVE)."""


class Subscribed(NamedTuple):
    """The peer wants messages whose topic has this prefix."""

    topic: bytes


class Cancelled(NamedTuple):
    """The peer no longer wants messages whose topic has this prefix."""

    topic: bytes


class Message(NamedTuple):
    """A complete message."""

    frames: list[bytes]


class Progress(NamedTuple):
    """A frame that the caller need not handle, such as a PING. The caller counts it as work of this iteration."""


Event = Opened | Subscribed | Cancelled | Message | Progress


class Subscriptions:
    """A bounded set of topic prefixes. A repeated subscription has no effect, and one CANCEL ends it, as in libzmq.

    Args:
        limits: the bounds for the number and the bytes of the topics.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._topics: dict[bytes, None] = {}
        self.bytes = 0
        """Bytes of all topics."""

    def add(self, topic: bytes) -> bool:
        """Add a topic; return False if the peer has it already.

        Raises:
            ProtocolError: the peer has too many topics, or too many bytes of topics.
        """
        if topic in self._topics:
            return False
        limits = self._limits
        if len(self._topics) >= limits.subscriptions:
            raise ProtocolError(Reason.SUBSCRIPTIONS, f"more than {limits.subscriptions} subscriptions")
        if self.bytes + len(topic) > limits.subscription_bytes:
            text = f"more than {limits.subscription_bytes} bytes of subscriptions"
            raise ProtocolError(Reason.SUBSCRIPTION_BYTES, text)
        self._topics[topic] = None
        self.bytes += len(topic)
        return True

    def remove(self, topic: bytes) -> bool:
        """Remove a topic; return False if the peer does not have it."""
        if topic not in self._topics:
            return False
        del self._topics[topic]
        self.bytes -= len(topic)
        return True

    def __len__(self) -> int:
        return len(self._topics)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._topics)

    def __contains__(self, topic: object) -> bool:
        return topic in self._topics


class State(Enum):
    """The phase of a connection."""

    GREETING = "greeting"
    """The peer's greeting has not arrived."""
    HANDSHAKE = "handshake"
    """The greetings are exchanged, and the handshake has not ended."""
    OPEN = "open"
    """Messages can be sent and received."""
    FAILED = "failed"
    """The peer broke a rule. Received bytes are ignored."""


class Protocol:
    """One end of one connection.

    Args:
        role: our role.
        accepting: True for the side that accepted the connection, False for the side that dialled.
        limits: bounds for the peer.
        publisher_limits: bounds for a peer that publishes (role EITHER).
        mechanism: the security mechanism; None for NULL.
        any_peer: True to accept every socket type, for a diagnosis that reports the type.
    """

    def __init__(
        self,
        role: Role,
        *,
        accepting: bool,
        limits: Limits = DEFAULT,
        publisher_limits: Limits = DEFAULT,
        mechanism: Mechanism | None = None,
        any_peer: bool = False,
    ) -> None:
        self.state = State.GREETING
        self.topics = Subscriptions(limits)
        self.sealing: Sealing | None = None
        """Seals and unseals frames after the handshake; None if frames are not sealed."""

        self._role = role
        self._limits = limits
        self._publisher_limits = publisher_limits
        self._any_peer = any_peer

        # The handshake.
        self._mechanism = mechanism or Null(role, accepting=accepting)
        self._rest_of_greeting = wire.rest_of_greeting(self._mechanism.name)
        self._version = (0, 0)
        self._handshake_bytes = 0

        # Received bytes that are not decoded yet, bytes to send, and the limit for the next frame.
        self._buffer = bytearray()
        self._out = bytearray(wire.OPENING)
        self._frame_bytes = limits.frame_bytes

        # The incomplete message: its kept frames, and its bytes and frames so far.
        self._frames: list[bytes] = []
        self._message_bytes = 0
        self._message_frames = 0

    @property
    def held_bytes(self) -> int:
        """Number of bytes kept for the peer, including its subscriptions."""
        return len(self._buffer) + sum(map(len, self._frames)) + self.topics.bytes

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        """Add received bytes. Get all events before the next call, so that the buffer holds at most part of a frame."""
        if self.state is not State.FAILED:
            self._buffer += data

    def data_to_send(self) -> bytes:
        """Return the bytes to send for greeting, handshake and answers, and remove them."""
        data = bytes(self._out)
        self._out.clear()
        return data

    def next_event(self) -> Event | None:
        """Return the next event; None if more bytes are needed.

        Raises:
            ProtocolError: the peer broke a rule or a limit. Send :meth:`data_to_send`, then close the connection.
        """
        try:
            if self.state is State.OPEN:
                return self._next()
            if self.state is State.GREETING:
                self._greet()
            return self._shake_hands() if self.state is State.HANDSHAKE else None
        except ProtocolError as problem:
            if self.state is State.HANDSHAKE and problem.reason not in _NO_ANSWER:
                self._out += wire.error(str(problem))
            self.state = State.FAILED
            self._buffer.clear()
            self._frames.clear()
            raise

    def _greet(self) -> None:
        """Process the peer's greeting if it has arrived, and start the handshake."""
        arrived = len(self._buffer)
        greeting = wire.take_greeting(self._buffer)
        if arrived >= len(wire.OPENING):
            self._out += self._rest_of_greeting
            self._rest_of_greeting = b""
        if greeting is None:
            return
        self.state = State.HANDSHAKE
        self._version = greeting.version
        ours, theirs = self._mechanism.name, greeting.mechanism
        if theirs != ours:
            text = f"mechanism {theirs.decode('ascii', 'replace')}; here it is {ours.decode()}"
            raise ProtocolError(Reason.MECHANISM, text)
        self._out += self._mechanism.start()

    def _shake_hands(self) -> Event | None:
        """Process the next command of the handshake."""
        mechanism = self._mechanism
        room = self._limits.handshake_bytes - self._handshake_bytes
        frame = take_frame(self._buffer, room, Reason.HANDSHAKE_BYTES)
        if frame is None:
            return None
        self._handshake_bytes += len(frame.body)
        if not frame.command:
            raise ProtocolError(Reason.COMMAND, "a message before the handshake is over")
        name, data = wire.parse_command(frame.body)
        if name == wire.ERROR:
            raise wire.refusal(data)
        if name != mechanism.expected:
            raise ProtocolError(Reason.COMMAND, f"{name!r} in place of {mechanism.expected.decode()}")
        answer = mechanism.receive(data)
        opened = None if mechanism.peer is None else self._open(mechanism.peer)
        self._out += answer
        return opened or Progress()

    def _open(self, peer: dict[bytes, bytes]) -> Opened:
        """Check the peer's properties, and change to state OPEN."""
        socket_type, identity = peer.get(b"socket-type", b""), peer.get(b"identity", b"")
        if socket_type not in self._role.peers and not self._any_peer:
            ours = self._role.socket_type.decode() or "PUB or SUB"
            text = f"socket type {socket_type.decode('ascii', 'replace')} cannot talk to {ours}"
            raise ProtocolError(Reason.SOCKET_TYPE, text)
        if len(identity) > MAX_IDENTITY:
            raise ProtocolError(Reason.COMMAND, "the identity is too long")
        if self._role is Role.EITHER:
            self._role = self._role.towards(socket_type)
            if self._role is Role.SUB:
                self._limits = self._publisher_limits
        self.state = State.OPEN
        self.sealing = self._mechanism.sealing
        self._frame_bytes = self._limits.frame_bytes + (self.sealing.overhead if self.sealing else 0)
        return Opened(socket_type, identity, self._version, self._mechanism.peer_key)

    def _next(self) -> Event | None:
        """Process the next frame after the handshake."""
        frame = take_frame(self._buffer, self._frame_bytes)
        if frame is None:
            return None
        if self.sealing is not None:
            frame = self.sealing.unseal(frame)
        return self._command(frame.body) if frame.command else self._message(frame)

    def _message(self, frame: Frame) -> Event:
        limits, body = self._limits, frame.body
        self._message_frames += 1
        self._message_bytes += len(body)
        if self._message_frames > limits.message_frames:
            raise ProtocolError(Reason.MESSAGE_FRAMES, f"a message of more than {limits.message_frames} frames")
        if self._message_bytes > limits.message_bytes:
            raise ProtocolError(Reason.MESSAGE_BYTES, f"a message of more than {limits.message_bytes} bytes")
        single = self._message_frames == 1 and not frame.more
        if not frame.more:
            self._message_frames = self._message_bytes = 0
        if self._role is not Role.PUB:
            if len(self._frames) < limits.kept_frames:
                self._frames.append(body)
            if frame.more:
                return Progress()
            frames, self._frames = self._frames, []
            return Message(frames)
        if not single or not body or body[0] not in {_SUBSCRIBE, _CANCEL}:
            return Progress()  # a message from the application of an XSUB
        return self._subscription(subscribe=body[0] == _SUBSCRIBE, topic=body[1:])

    def _subscription(self, *, subscribe: bool, topic: bytes) -> Event:
        if subscribe:
            return Subscribed(topic) if self.topics.add(topic) else Progress()
        return Cancelled(topic) if self.topics.remove(topic) else Progress()

    def _command(self, body: bytes) -> Event:
        name, data = wire.parse_command(body)
        if name == wire.PING:
            self._out += wire.pong(data)
        elif name == wire.ERROR:
            raise wire.refusal(data)
        elif self._role is Role.PUB and name in {wire.SUBSCRIBE, wire.CANCEL}:
            return self._subscription(subscribe=name == wire.SUBSCRIBE, topic=data)
        return Progress()
