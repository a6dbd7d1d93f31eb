"""One connection of ZMTP 3.1, without I/O: bytes go in, events and bytes to send come out.

The caller feeds received bytes with :meth:`Protocol.receive_data`, takes events one at a time with
:meth:`Protocol.next_event` (so it decides how much work it does at once), and sends :meth:`Protocol.data_to_send`.
Messages are not sent through this object: without encryption their bytes are the same for every peer, see
:func:`~kvbus.transport.zmtp.frames.encode_message`. Once the handshake is over, all that is sent goes through
:attr:`Protocol.sealing` if the mechanism has one, the answers of :meth:`Protocol.data_to_send` too.

Peers of ZMTP 3.0 and 2.0 are understood too. kvbus sends no PING: go-zeromq gives it to the application as a message.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from kvbus.transport.zmtp import commands, greeting
from kvbus.transport.zmtp.events import Cancelled, Event, Message, Opened, Progress, Subscribed
from kvbus.transport.zmtp.frames import Frame, FrameReader, encode_message
from kvbus.transport.zmtp.limits import DEFAULT, Limits
from kvbus.transport.zmtp.mechanism import Mechanism, Null, Sealing, check_type
from kvbus.transport.zmtp.reasons import ProtocolError, Reason
from kvbus.transport.zmtp.roles import Role
from kvbus.transport.zmtp.subscriptions import Subscriptions

_NO_ANSWER: Final = frozenset({Reason.REFUSED, Reason.CURVE, Reason.KEY, Reason.NONCE})
"""Why a handshake ends without an ERROR. libzmq takes every ERROR as final and never dials again: a router whose key is
added to the list later would stay away."""

_SUBSCRIBE: Final = 1
_CANCEL: Final = 0


class State(Enum):
    """Where a connection is."""

    GREETING = "greeting"
    """The peer's version is not known yet."""
    HANDSHAKE = "handshake"
    """The greeting was sent; the peer's READY (or, in ZMTP 2.0, its identity) is missing."""
    OPEN = "open"
    """Messages may come and go."""
    FAILED = "failed"
    """The peer broke a rule. Nothing is read any more."""


class Protocol:
    """One end of one connection.

    Args:
        role: our socket type.
        accepting: True for the side that accepted the connection, False for the one that dialled.
        limits: what the peer may make us keep.
        publisher_limits: the same for a peer that turns out to publish (EITHER).
        mechanism: the security mechanism; None for NULL.
    """

    def __init__(
        self,
        role: Role,
        *,
        accepting: bool,
        limits: Limits = DEFAULT,
        publisher_limits: Limits = DEFAULT,
        mechanism: Mechanism | None = None,
    ) -> None:
        self.state = State.GREETING
        self.topics = Subscriptions(limits)
        self.sealing: Sealing | None = None
        """Seals and unseals frames once the handshake is over; None if they travel as they are."""

        self._role = role
        self._limits = limits
        self._publisher_limits = publisher_limits
        self._mechanism = mechanism or Null(role, accepting=accepting)

        # What was received and not taken yet, and what is to be sent.
        self._buffer = bytearray()
        self._out = bytearray(greeting.OPENING)

        # The handshake.
        self._frame_bytes = limits.frame_bytes
        self._major: int | None = None
        self._version = (0, 0)
        self._socket_type = b""
        self._handshake_bytes = 0
        self._reader = FrameReader(self._buffer, commands=True)

        # The message that is arriving.
        self._frames: list[bytes] = []
        self._message_bytes = 0
        self._message_frames = 0

    @property
    def held_bytes(self) -> int:
        """Bytes kept of what the peer has sent, subscriptions included."""
        return len(self._buffer) + sum(map(len, self._frames)) + self.topics.bytes

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        """Take in received bytes. Take all events before the next call: then the buffer holds part of a frame."""
        if self.state is not State.FAILED:
            self._buffer += data

    def data_to_send(self) -> bytes:
        """Return, once, the bytes of greeting, handshake and answers that are to be sent."""
        data = bytes(self._out)
        self._out.clear()
        return data

    def next_event(self) -> Event | None:
        """Return the next event, or None until more bytes have arrived.

        Raises:
            ProtocolError: the peer broke a rule or a limit. Send what :meth:`data_to_send` has, and close.
        """
        try:
            if self.state is State.OPEN:
                return self._next()
            if self.state is State.GREETING and not self._greet():
                return None
            return self._shake_hands() if self.state is State.HANDSHAKE else None
        except ProtocolError as problem:
            if self.state is State.HANDSHAKE and self._version >= (3, 0) and problem.reason not in _NO_ANSWER:
                self._out += commands.error(str(problem))
            self.state = State.FAILED
            self._buffer.clear()
            self._frames.clear()
            raise

    def _greet(self) -> bool:
        """Take in the peer's greeting; return False until it has arrived."""
        if self._major is None:
            self._major = greeting.peer_major(self._buffer)
            if self._major is None:
                return False
            if self._major == greeting.VERSION_2 and self._role is Role.EITHER:
                # a peer of ZMTP 2.0 may wait for our type before it says its own
                raise ProtocolError(Reason.VERSION, "ZMTP 2.0 does not say in time who dials")
            self._out += greeting.rest(self._major, self._role.socket_type, self._mechanism.name)
        peer = greeting.take_greeting(self._buffer, self._major)
        if peer is None:
            return False
        self._version = peer.version
        self.state = State.HANDSHAKE
        if peer.version < (3, 0):
            if self._mechanism.name != Null.name:
                raise ProtocolError(Reason.MECHANISM, f"ZMTP 2.0 has no {self._mechanism.name.decode()}")
            check_type(self._role, peer.socket_type)
            self._socket_type = peer.socket_type
            self._reader = FrameReader(self._buffer, commands=False)
            self._out += encode_message([b""])  # our identity
        elif peer.mechanism != self._mechanism.name:
            text = f"mechanism {peer.mechanism.decode('ascii', 'replace')}; here it is {self._mechanism.name.decode()}"
            raise ProtocolError(Reason.MECHANISM, text)
        else:
            self._out += self._mechanism.start()
        return True

    def _shake_hands(self) -> Event | None:
        room = self._limits.handshake_bytes - self._handshake_bytes
        frame = self._reader.next_frame(room, Reason.HANDSHAKE_BYTES)
        if frame is None:
            return None
        self._handshake_bytes += len(frame.body)
        if self._version < (3, 0):
            return self._identity(frame)
        if not frame.command:
            raise ProtocolError(Reason.COMMAND, "a message before the handshake is over")
        self._out += self._mechanism.receive(*commands.parse_command(frame.body))
        peer = self._mechanism.peer
        if peer is None:
            return Progress()
        self.sealing = self._mechanism.sealing
        if self.sealing is not None:
            self._frame_bytes += self.sealing.overhead
        return self._open(peer[b"socket-type"], peer.get(b"identity", b""), self._mechanism.peer_key)

    def _identity(self, frame: Frame) -> Event:
        if frame.more or len(frame.body) > commands.MAX_IDENTITY:
            raise ProtocolError(Reason.FRAME, "no identity where ZMTP 2.0 has one")
        return self._open(self._socket_type, frame.body)

    def _open(self, socket_type: bytes, identity: bytes, key: bytes = b"") -> Opened:
        self.state = State.OPEN
        if self._role is Role.EITHER:
            self._role = self._role.towards(socket_type)
            if self._role is Role.SUB:
                self._limits = self._publisher_limits
                self._frame_bytes = self._limits.frame_bytes
        return Opened(socket_type, identity, self._version, key)

    def _next(self) -> Event | None:
        frame = self._reader.next_frame(self._frame_bytes)
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
        single = self._message_frames == 1
        if not frame.more:
            self._message_frames = self._message_bytes = 0
        if self._role is not Role.PUB:
            if len(self._frames) < limits.kept_frames:
                self._frames.append(body)
            if frame.more:
                return Progress()
            frames, self._frames = self._frames, []
            return Message(frames)
        if not single or frame.more or not body or body[0] not in {_SUBSCRIBE, _CANCEL}:
            return Progress()  # a message of an XSUB's application
        return self._subscription(subscribe=body[0] == _SUBSCRIBE, topic=body[1:])

    def _subscription(self, *, subscribe: bool, topic: bytes) -> Event:
        if subscribe:
            return Subscribed(topic) if self.topics.add(topic) else Progress()
        return Cancelled(topic) if self.topics.remove(topic) else Progress()

    def _command(self, body: bytes) -> Event:
        name, data = commands.parse_command(body)
        if name == commands.PING:
            self._out += commands.pong(data)
        elif name == commands.ERROR:
            raise commands.refusal(data)
        elif self._role is Role.PUB and name in {commands.SUBSCRIBE, commands.CANCEL}:
            return self._subscription(subscribe=name == commands.SUBSCRIBE, topic=data)
        return Progress()
