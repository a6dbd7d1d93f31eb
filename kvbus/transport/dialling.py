"""Dial an endpoint without libzmq: connect, shake hands, and then read and send messages as a SUB or DEALER does.

``kvbus doctor`` uses this module to find the reason for a missing connection. If the port does not speak ZMTP, the
server's first bytes or its answers to TLS and HTTP show which protocol it speaks.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Final

from kvbus.transport.curve import Curve
from kvbus.transport.reach import Address, Attempt, Outcome, Stop
from kvbus.transport.sockets import rebuilding_id
from kvbus.transport.zmtp import wire
from kvbus.transport.zmtp.addresses import bind, peer_address
from kvbus.transport.zmtp.mechanism import Mechanism, Null, Role, Sealing, ready_properties
from kvbus.transport.zmtp.protocol import Event, Limits, Message, Opened, Protocol, Subscribed
from kvbus.transport.zmtp.reasons import ProtocolError
from kvbus.transport.zmtp.wire import SIGNATURE, encode_message
from kvbus.transport.zmtp_keys import Keys

HANDSHAKE_S: Final = 0.9
"""Maximum seconds for the handshake, in addition to the :data:`READY_S` for which kvbus waits for the peer's READY.

It is short, because a ZeroMQ socket sends its greeting immediately.
"""
READY_S: Final = 0.3
"""Seconds to wait for the peer's READY before kvbus sends its own READY.

If kvbus sent its READY first, with a socket type that the peer does not accept, then a libzmq peer would close the
connection without a READY. kvbus would not learn the peer's socket type.
"""
GREETING_BYTES: Final = 64
_OLD: Final = (b"\1\0", SIGNATURE + b"\1")
"""The first bytes of a ZMTP 1.0 greeting (one frame with an empty identity) and of a ZMTP 2.0 greeting."""
_CHUNK: Final = 256 * 1024
_OTHER: Final = {Role.SUB: Role.DEALER, Role.DEALER: Role.SUB, Role.PUB: Role.DEALER}


class ClosedError(Exception):
    """The connection to the peer is closed or broken."""


class _Listening(Null):
    """The NULL mechanism, but it sends its READY only after the peer's READY or when :meth:`speak` is called."""

    def __init__(self, role: Role) -> None:
        super().__init__(role, accepting=True)
        properties = ready_properties(role)
        if role is Role.DEALER:
            properties += wire.encode_metadata({b"Identity": rebuilding_id()})
        self._unsaid = wire.command(wire.READY, properties)

    def speak(self) -> bytes:
        """Return kvbus's READY command at the first call, and no bytes at later calls: a peer sends READY only once."""
        ready, self._unsaid = self._unsaid, b""
        return ready

    def receive(self, data: bytes) -> bytes:
        self.peer = wire.parse_metadata(data)
        return self.speak()


class Connection:
    """A ZMTP connection that kvbus has dialled or accepted, during and after its handshake."""

    def __init__(self, connected: socket.socket, role: Role, limits: Limits, mechanism: Mechanism) -> None:
        self.mechanism = mechanism
        self.protocol = Protocol(role, accepting=False, limits=limits, mechanism=mechanism, any_peer=True)
        self.first = b""
        """The first bytes that the peer has sent, at most as many as a greeting has (64)."""
        self._socket = connected
        self._loop = asyncio.get_running_loop()

    async def next_event(self) -> Event:
        """Wait for the next event from the peer, and return it.

        Raises:
            ClosedError: the connection is closed or broken.
            ProtocolError: the peer broke a rule of ZMTP.
        """
        while True:
            # Read `sealing` before the event. The last event of the handshake sets it, but kvbus's answer to that event
            # must not be encrypted yet.
            sealing = self.protocol.sealing
            try:
                event = self.protocol.next_event()
            finally:
                await self._flush(sealing)
            if event is not None:
                return event
            try:
                data = await self._loop.sock_recv(self._socket, _CHUNK)
            except OSError as error:
                raise ClosedError(error.strerror or str(error)) from error
            if not data:
                raise ClosedError("closed")
            self.first = (self.first + data)[:GREETING_BYTES]
            self.protocol.receive_data(data)

    async def receive(self) -> list[bytes]:
        """Wait for the peer's next message, and return its frames. Raises the errors of :meth:`next_event`."""
        while True:
            event = await self.next_event()
            if isinstance(event, Message):
                return event.frames

    async def receive_raw(self) -> bytes:
        """Return the next received bytes without decoding or answering them; empty at the end of the connection."""
        try:
            return await self._loop.sock_recv(self._socket, _CHUNK)
        except OSError:
            return b""

    async def subscribed(self) -> bytes:
        """Wait for the peer's next subscription, and return its topic. Raises the errors of :meth:`next_event`."""
        while True:
            event = await self.next_event()
            if isinstance(event, Subscribed):
                return event.topic

    async def send(self, *frames: bytes) -> None:
        """Send a message with these frames to the peer.

        Raises:
            ClosedError: the connection is closed or broken.
        """
        data = encode_message(frames)
        sealing = self.protocol.sealing
        await self.write(data if sealing is None else sealing.seal(data))

    async def write(self, data: bytes) -> None:
        """Send bytes to the peer without encoding them. Raises the errors of :meth:`send`."""
        try:
            await self._loop.sock_sendall(self._socket, data)
        except OSError as error:
            raise ClosedError(error.strerror or str(error)) from error

    async def _flush(self, sealing: Sealing | None) -> None:
        # With CURVE, the protocol's own answers after the handshake, such as a PONG, must be encrypted like messages.
        data = self.protocol.data_to_send()
        if data:
            with contextlib.suppress(ClosedError):
                await self.write(data if sealing is None else sealing.seal(data))


@dataclass(slots=True)
class Dialled:
    """The outcome of a dial, and the open connection if the ZMTP handshake has succeeded."""

    outcome: Outcome
    connection: Connection | None = None


@contextlib.asynccontextmanager
async def dial(
    endpoint: str, role: Role, *, seconds: float, curve: Curve | None = None, limits: Limits | None = None
) -> AsyncIterator[Dialled]:
    """Dial an endpoint and yield the outcome. The connection is closed at the end of the ``async with`` block.

    Args:
        endpoint: ``tcp://host:port`` or ``ipc://path``.
        role: the socket type that kvbus announces.
        seconds: maximum seconds for the connection and the handshake.
        curve: kvbus's keys and the peer's public key; None for a connection without CURVE.
        limits: limits for the data that the peer may send; None for the defaults.
    """
    every = role is not Role.DEALER  # kvbus sends requests with libzmq, which tries only the first address
    attempt = Attempt(endpoint, seconds, every=every)
    with contextlib.ExitStack() as opened:
        try:
            async with asyncio.timeout(seconds):
                dialled = await _dial(attempt, role, curve, limits or Limits(), opened)
                if dialled.outcome.stop in {Stop.CLOSED, Stop.KEYS} and dialled.outcome.mechanism:
                    # Some peers close without an ERROR if kvbus's socket type does not fit theirs. Such a peer names
                    # its own socket type only after it has accepted kvbus's type. So dial again with another type, to
                    # learn the peer's type.
                    with contextlib.ExitStack() as second:
                        other = await _dial(
                            Attempt(endpoint, seconds, every=every), _OTHER[role], curve, Limits(), second
                        )
                    if other.outcome.stop is Stop.OPEN:
                        dialled = Dialled(other.outcome)
        except TimeoutError:
            dialled = Dialled(attempt.outcome)
        yield dialled


async def _dial(
    attempt: Attempt, role: Role, curve: Curve | None, limits: Limits, opened: contextlib.ExitStack
) -> Dialled:
    connected = await attempt.run()
    if connected is None:
        return Dialled(attempt.outcome)
    opened.callback(connected.close)
    return await shake_hands(attempt.outcome, connected, role, curve, limits, attempt.address)


async def shake_hands(
    outcome: Outcome, connected: socket.socket, role: Role, curve: Curve | None, limits: Limits, address: Address | None
) -> Dialled:
    """Do the ZMTP handshake on a new connection, and return the outcome.

    Args:
        outcome: the outcome of the dial before the handshake. The result is a changed copy of it.
        connected: the connected socket.
        role: the socket type that kvbus announces.
        curve: kvbus's keys; None for a connection without CURVE.
        limits: limits for the data that the peer may send.
        address: the address that kvbus dialled; None if the peer dialled kvbus.
    """
    mechanism = _mechanism(role, curve, bind=address is None)
    connection = Connection(connected, role, limits, mechanism or _Listening(role))
    try:
        opened = await _opened(connection)
    except (ProtocolError, ClosedError, TimeoutError) as error:
        connected.close()  # some servers accept only one connection at a time, and identify() connects again
        failed = await _failed(outcome, connection.first, "NULL" if curve is None else "CURVE", address, str(error))
        lacks_curve = mechanism is None and failed.stop is Stop.KEYS
        return Dialled(replace(failed, stop=Stop.NO_CURVE, detail="") if lacks_curve else failed)
    answer = replace(
        outcome,
        stop=Stop.OPEN,
        mechanism=connection.mechanism.name.decode(),
        socket_type=opened.socket_type.decode("ascii", "replace"),
        version=opened.version,
    )
    if mechanism is None:
        answer = replace(answer, stop=Stop.MECHANISM, detail=_sides("NULL", "CURVE"))
    return Dialled(answer, connection)


def _mechanism(role: Role, curve: Curve | None, *, bind: bool) -> Mechanism | None:
    """Return kvbus's side of the handshake; None if it requires CURVE and PyNaCl is not installed."""
    if curve is None:
        return _Listening(role)
    try:
        factory = Keys(curve, bind=bind).mechanism
    except ImportError:
        return None
    return None if factory is None else factory(role)


async def _failed(outcome: Outcome, first: bytes, ours: str, address: Address | None, problem: str) -> Outcome:
    """Return the outcome of a failed handshake, with a reason that the peer's first bytes show.

    Args:
        outcome: the outcome before the handshake.
        first: the first bytes that the peer has sent.
        ours: the name of kvbus's security mechanism.
        address: the address that kvbus dialled; None if the peer dialled kvbus.
        problem: the error that ended the handshake.
    """
    if first.startswith(_OLD):
        return replace(outcome, stop=Stop.VERSION)
    if first[:1] != SIGNATURE[:1] or first[9:10] not in {b"", SIGNATURE[9:]}:
        name = name_of(first) if first else await identify(address) if address else ""
        return replace(outcome, stop=Stop.STRANGER, detail=name) if name else outcome
    theirs = first[12:32].rstrip(b"\0").decode("ascii", "replace") if len(first) >= 32 else ""
    if theirs and theirs != ours:
        return replace(outcome, stop=Stop.MECHANISM, detail=_sides(theirs, ours), mechanism=theirs)
    stop = Stop.CLOSED if ours == "NULL" else Stop.KEYS
    return replace(outcome, stop=stop, detail=problem, mechanism=theirs or ours)


def _sides(theirs: str, ours: str) -> str:
    return f"the peer uses {theirs}, kvbus uses {ours}"


async def _opened(connection: Connection) -> Opened:
    """Wait for the end of the handshake, and return the event that reports it.

    In the handshake, both sides send READY. kvbus waits up to :data:`READY_S` for the peer's READY before it sends its
    own.

    Raises:
        TimeoutError: the peer sends nothing, or stops during the handshake.
        ClosedError, ProtocolError: the handshake failed.
    """
    waiting = asyncio.ensure_future(_until_opened(connection))
    try:
        done, _ = await asyncio.wait((waiting,), timeout=READY_S)
        if not done and isinstance(connection.mechanism, _Listening) and connection.first:
            await connection.write(connection.mechanism.speak())
        async with asyncio.timeout(HANDSHAKE_S):
            return await waiting
    finally:
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await waiting


async def _until_opened(connection: Connection) -> Opened:
    while True:
        event = await connection.next_event()
        if isinstance(event, Opened):
            return event


# -- peers that dial kvbus ------------------------------------------------------------------------------------------

MAX_PEERS = 16
"""Maximum number of connections that :func:`accept` accepts."""


async def accept(endpoint: str, role: Role, curve: Curve | None, limits: Limits) -> AsyncIterator[Dialled]:
    """Bind an endpoint, and yield the outcome of the handshake for each ZMTP peer that dials the endpoint.

    All connections are closed when the caller closes the generator.

    Args:
        endpoint: ``tcp://host:port`` or ``ipc://path``.
        role: the socket type that kvbus announces.
        curve: kvbus's keys and the allow-list; None for an endpoint without CURVE.
        limits: limits for the data that a peer may send.

    Raises:
        BindError: the endpoint cannot be bound.
    """
    bound = bind(endpoint)
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as opened:
        opened.callback(bound.close)
        for _ in range(MAX_PEERS):
            connected, _ = await loop.sock_accept(bound.socket)
            opened.callback(connected.close)
            connected.setblocking(False)
            outcome = Outcome(endpoint, Stop.SILENT, addresses=(peer_address(connected),))
            dialled = await shake_hands(outcome, connected, role, curve, limits, None)
            if dialled.outcome.stop is Stop.OPEN or dialled.outcome.mechanism:
                yield Dialled(replace(dialled.outcome, addresses=outcome.addresses), dialled.connection)
        await asyncio.Future()


# -- servers that do not speak ZMTP ---------------------------------------------------------------------------------

ANSWER_S: Final = 0.7
"""Maximum seconds for connecting to a server, asking it by TLS or HTTP, and receiving its answer."""

_SHOWN: Final = 32
_BEGINNINGS: Final = (
    (b"HTTP/", "an HTTP server"),
    (b"SSH-", "an SSH server"),
    (b"\x15\x03", "a TLS server"),
    (b"\x16\x03", "a TLS server"),
    (b"-ERR", "a Redis server"),
    (b"\x00\x00", "an HTTP/2 or gRPC server"),
)


def name_of(first: bytes) -> str:
    """Return a description of the server that sends these first bytes, such as "a Redis server"."""
    for beginning, name in _BEGINNINGS:
        if first.startswith(beginning):
            return name
    text = first[:_SHOWN].decode("ascii", "replace")
    line = text.splitlines()[0] if text.strip() else ""
    return f"it says {line!r}" if line.isprintable() and line else f"it begins with {first[:_SHOWN].hex(' ')}"


async def identify(address: Address) -> str:
    """Find out which server listens at a port that sends nothing, by probing it with TLS and HTTP.

    Returns:
        A description of the server. It is empty if the server does not answer, or if kvbus does not recognize its
        answer.
    """
    for question in (_client_hello(), b"HEAD / HTTP/1.0\r\n\r\n"):
        answer = await _ask(address, question)
        name = name_of(answer) if answer else ""
        if name and not name.startswith("it "):
            return name
    return ""


async def _ask(address: Address, question: bytes) -> bytes:
    loop = asyncio.get_running_loop()
    with socket.socket(address[0], socket.SOCK_STREAM) as asking, contextlib.suppress(OSError, TimeoutError):
        asking.setblocking(False)
        async with asyncio.timeout(ANSWER_S):
            await loop.sock_connect(asking, address[1])
            await loop.sock_sendall(asking, question)
            return await loop.sock_recv(asking, 64)
    return b""


def _client_hello() -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing).do_handshake()
    return outgoing.read()
