"""One connection of ZMTP 3.0 or 3.1, without I/O. It decodes received bytes into events, and creates answers.

Pass received bytes to :meth:`Protocol.receive_data`. Get one event at a time from :meth:`Protocol.next_event`, so that
you can limit the work in each iteration of the event loop. Send the result of :meth:`Protocol.data_to_send`.

This object does not send messages. Without CURVE the bytes of a message are the same for every peer, and
:func:`~kvbus.transport.zmtp.wire.encode_message` creates them. If the mechanism has :attr:`Protocol.sealing`, the
caller encrypts all bytes with it after the handshake, including the result of :meth:`Protocol.data_to_send`.

kvbus sends no PING, because go-zeromq passes a PING to its application like a message.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from kvbus.transport.zmtp import wire
from kvbus.transport.zmtp.mechanism import Mechanism, Null, Role, Sealing
from kvbus.transport.zmtp.reasons import ProtocolError, Reason
from kvbus.transport.zmtp.wire import Frame, take_frame, take_message

MAX_IDENTITY: Final = 255

_NO_ANSWER: Final = frozenset({Reason.REFUSED, Reason.CURVE, Reason.KEY, Reason.NONCE})
"""Reasons for which a handshake fails without an ERROR from kvbus to the peer.

After an ERROR, libzmq never dials again. Then a router could not connect even after its key was added to the
allow-list.
"""

_SUBSCRIBE: Final = 1
_CANCEL: Final = 0

_FRAMES: Final = 16
"""Maximum number of frames of an unfinished message that are decoded for one event.

An engine's batch has three frames. A message with many frames takes several events, which the caller limits.
"""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits for the data of one peer. kvbus checks each limit before it keeps the data.

    Attributes:
        frame_bytes: maximum bytes of a frame.
        message_frames: maximum number of frames of a message. Even an empty frame needs an object of some 40 bytes.
        kept_frames: maximum number of frames that are kept of each message. Further frames are read and dropped.
        message_bytes: maximum bytes of a message.
        subscriptions: maximum number of topics that a peer subscribes to.
        subscription_bytes: maximum bytes of all topics that a peer subscribes to.
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
    """The event that the handshake has succeeded, with the peer's announced properties, version and key."""

    socket_type: bytes
    identity: bytes
    version: tuple[int, int]
    key: bytes = b""
    """The public key that the peer has proven to own; empty without CURVE."""


class Subscribed(NamedTuple):
    """The event that the peer subscribes to the messages whose topic begins with ``topic``."""

    topic: bytes


class Cancelled(NamedTuple):
    """The event that the peer cancels its subscription to the messages whose topic begins with ``topic``."""

    topic: bytes


class Message(NamedTuple):
    """The event that the peer has sent a complete message."""

    frames: list[bytes]


class Progress(NamedTuple):
    """The event that a frame, such as a PING, was processed without a result for the caller.

    The caller counts it towards its limit of events for each iteration of the event loop.
    """


Event = Opened | Subscribed | Cancelled | Message | Progress


class Subscriptions:
    """The topic prefixes that a peer has subscribed to, limited in number and bytes.

    As in libzmq, a repeated subscription has no effect, and one CANCEL ends the subscription.

    Args:
        limits: the limits for the number and the bytes of the topics.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._topics: dict[bytes, None] = {}
        self.bytes = 0
        """Number of bytes of all topics together."""

    def add(self, topic: bytes) -> bool:
        """Add a topic; return False if the peer has subscribed to it already.

        Raises:
            ProtocolError: the peer has too many topics, or its topics have too many bytes.
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
        """Remove a topic; return False if the peer has not subscribed to it."""
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
    """The phase of a ZMTP connection."""

    GREETING = "greeting"
    """kvbus waits for the peer's greeting."""
    HANDSHAKE = "handshake"
    """Both greetings have been sent, and the handshake has not ended."""
    OPEN = "open"
    """The handshake has succeeded, so both sides can send messages."""
    FAILED = "failed"
    """The peer broke a rule. All bytes that it sends are ignored."""


class Protocol:
    """kvbus's side of one ZMTP connection, without I/O.

    Args:
        role: kvbus's socket type, and the socket types that the peer may have.
        accepting: True if kvbus has accepted the connection, False if it has dialled.
        limits: limits for the data that the peer may send.
        publisher_limits: the limits for a peer that publishes, if the role is EITHER.
        mechanism: the security mechanism; None for NULL.
        any_peer: True to accept a peer of every socket type, for a diagnosis that reports the type.
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
        """Encrypts and decrypts frames after the handshake; None without encryption."""

        self._role = role
        self._limits = limits
        self._publisher_limits = publisher_limits
        self._any_peer = any_peer

        # The state of the handshake.
        self._mechanism = mechanism or Null(role, accepting=accepting)
        self._rest_of_greeting = wire.rest_of_greeting(self._mechanism.name)
        self._version = (0, 0)
        self._handshake_bytes = 0

        self.buffer = bytearray()
        """Received bytes that are not decoded yet."""
        self.out = bytearray(wire.OPENING)
        """Bytes that :meth:`data_to_send` returns next."""
        # Maximum bytes of the next frame's body.
        self._frame_bytes = limits.frame_bytes

        # The message whose last frame has not arrived: its kept frames, and its bytes and frames so far.
        self._frames: list[bytes] = []
        self._message_bytes = 0
        self._message_frames = 0

    @property
    def held_bytes(self) -> int:
        """Number of bytes that this object keeps for the peer, including the topics of its subscriptions."""
        return len(self.buffer) + sum(map(len, self._frames)) + self.topics.bytes

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        """Add received bytes to the buffer.

        Get all events with :meth:`next_event` before the next call, so that the buffer never holds more than one
        incomplete frame and the new bytes.
        """
        if self.state is not State.FAILED:
            self.buffer += data

    def data_to_send(self) -> bytes:
        """Remove and return the bytes that are to be sent to the peer: the greeting, the handshake and answers."""
        data = bytes(self.out)
        self.out.clear()
        return data

    def next_event(self) -> Event | None:
        """Decode the buffer and return the next event; None if more bytes are needed.

        Raises:
            ProtocolError: the peer broke a rule or a limit. Send :meth:`data_to_send`, then close the connection.
        """
        try:
            if self.state is State.OPEN:
                if self.sealing is None and not self._message_frames and self._role is not Role.PUB:
                    limits = self._limits
                    frames = take_message(self.buffer, limits.frame_bytes, limits.message_bytes, limits.kept_frames)
                    if frames is not None:
                        return Message(frames)
                return self._next()
            if self.state is State.GREETING:
                self._greet()
            return self._shake_hands() if self.state is State.HANDSHAKE else None
        except ProtocolError as problem:
            if self.state is State.HANDSHAKE and problem.reason not in _NO_ANSWER:
                self.out += wire.error(str(problem))
            self.state = State.FAILED
            self.buffer.clear()
            self._frames.clear()
            raise

    def _greet(self) -> None:
        """Process the peer's greeting if it is complete, and start the handshake."""
        arrived = len(self.buffer)
        greeting = wire.take_greeting(self.buffer)
        if arrived >= len(wire.OPENING):
            self.out += self._rest_of_greeting
            self._rest_of_greeting = b""
        if greeting is None:
            return
        self.state = State.HANDSHAKE
        self._version = greeting.version
        ours, theirs = self._mechanism.name, greeting.mechanism
        if theirs != ours:
            text = f"the peer's mechanism is {theirs.decode('ascii', 'replace')}, kvbus's is {ours.decode()}"
            raise ProtocolError(Reason.MECHANISM, text)
        self.out += self._mechanism.start()

    def _shake_hands(self) -> Event | None:
        """Process the peer's next command of the handshake, and return the event; None if the command is incomplete."""
        mechanism = self._mechanism
        room = self._limits.handshake_bytes - self._handshake_bytes
        frame = take_frame(self.buffer, room, Reason.HANDSHAKE_BYTES)
        if frame is None:
            return None
        self._handshake_bytes += len(frame.body)
        if not frame.command:
            raise ProtocolError(Reason.COMMAND, "a message before the end of the handshake")
        name, data = wire.parse_command(frame.body)
        if name == wire.ERROR:
            raise wire.refusal(data)
        if name != mechanism.expected:
            raise ProtocolError(Reason.COMMAND, f"the command {name!r} in place of {mechanism.expected.decode()}")
        answer = mechanism.receive(data)
        opened = None if mechanism.peer is None else self._open(mechanism.peer)
        self.out += answer
        return opened or Progress()

    def _open(self, peer: dict[bytes, bytes]) -> Opened:
        """Check the peer's properties at the end of the handshake, and change to the state OPEN."""
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
        """Process the next message or command after the handshake, and return the event; None if it is incomplete."""
        buffer, limit, sealing = self.buffer, self._frame_bytes, self.sealing
        for _ in range(_FRAMES):
            frame = take_frame(buffer, limit)
            if frame is None:
                return None
            if sealing is not None:
                frame = sealing.unseal(frame)
            if frame.command:
                return self._command(frame.body)
            event = self._message(frame)
            if event is not None:
                return event
        return Progress()

    def _message(self, frame: Frame) -> Event | None:
        """Add a frame to the message, and return the event at the message's last frame."""
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
                return None
            frames, self._frames = self._frames, []
            return Message(frames)
        if not single or not body or body[0] not in {_SUBSCRIBE, _CANCEL}:
            # An application may send such a message on its XSUB. kvbus ignores it, because it is no subscription.
            return Progress()
        return self._subscription(subscribe=body[0] == _SUBSCRIBE, topic=body[1:])

    def _subscription(self, *, subscribe: bool, topic: bytes) -> Event:
        if subscribe:
            return Subscribed(topic) if self.topics.add(topic) else Progress()
        return Cancelled(topic) if self.topics.remove(topic) else Progress()

    def _command(self, body: bytes) -> Event:
        name, data = wire.parse_command(body)
        if name == wire.PING:
            self.out += wire.pong(data)
        elif name == wire.ERROR:
            raise wire.refusal(data)
        elif self._role is Role.PUB and name in {wire.SUBSCRIBE, wire.CANCEL}:
            return self._subscription(subscribe=name == wire.SUBSCRIBE, topic=data)
        return Progress()
