"""CURVE keys for tests of kvbus's own ZMTP, and functions that act as the other end of a connection without I/O."""

from __future__ import annotations

from typing import Any

import zmq
from nacl.bindings import crypto_box_keypair, crypto_scalarmult_base
from zmq.utils import z85

from kvbus.transport.zmtp.curve import Client, ClientKeys, Server, ServerKeys
from kvbus.transport.zmtp.mechanism import Role
from kvbus.transport.zmtp.protocol import DEFAULT, Progress, Protocol
from kvbus.transport.zmtp.wire import Frame, parse_command, take_frame
from tests.transport.zmtp.peers import greeting

SUB, DEALER = Role.SUB, Role.DEALER

HELLO = greeting(mechanism=b"CURVE")


class Pair:
    """A CURVE key pair. ``z85`` has the same two keys in libzmq's text form."""

    def __init__(self) -> None:
        self.public, self.secret = crypto_box_keypair()
        assert crypto_scalarmult_base(self.secret) == self.public

    @property
    def z85(self) -> tuple[bytes, bytes]:
        return z85.encode(self.public), z85.encode(self.secret)

    def accepts(self, *clients: Pair) -> ServerKeys:
        return ServerKeys(self.public, self.secret, frozenset(client.public for client in clients))

    def dials(self, server: Pair) -> ClientKeys:
        return ClientKeys(self.public, self.secret, server.public)

    def as_client(self, server: Pair) -> dict[str, bytes]:
        """Return the options with which a libzmq socket with these keys connects to ``server``."""
        public, secret = self.z85
        return {"CURVE_SERVERKEY": server.z85[0], "CURVE_PUBLICKEY": public, "CURVE_SECRETKEY": secret}

    def as_server(self, socket: zmq.Socket[bytes]) -> None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.z85[1])


def accepting(keys: ServerKeys, role: Role = Role.PUB, limits: Any = DEFAULT) -> Protocol:
    """Return kvbus's end of a connection that a peer opened, after both sides have sent their greetings."""
    protocol = Protocol(role, accepting=True, limits=limits, mechanism=Server(keys, role))
    feed(protocol, HELLO)
    assert protocol.data_to_send() == HELLO
    return protocol


def dialling(keys: ClientKeys) -> Protocol:
    """Return kvbus's end of a connection that kvbus opened, after both sides have sent their greetings.

    Its HELLO command is ready to be sent.
    """
    protocol = Protocol(Role.PUB, accepting=False, mechanism=Client(keys, Role.PUB))
    assert protocol.data_to_send() == HELLO[:11]
    protocol.receive_data(HELLO[:11])
    assert protocol.next_event() is None
    assert protocol.data_to_send() == HELLO[11:]
    feed(protocol, HELLO[11:])
    return protocol


def feed(protocol: Protocol, data: bytes) -> list[Any]:
    """Pass bytes to a protocol, and return its events without the Progress events."""
    protocol.receive_data(data)
    events = []
    while (event := protocol.next_event()) is not None:
        if not isinstance(event, Progress):
            events.append(event)
    return events


def frames_of(data: bytes) -> list[Frame]:
    """Return the ZMTP frames that the bytes of a connection contain."""
    buffer = bytearray(data)
    frames = []
    while (frame := take_frame(buffer, 2**30)) is not None:
        frames.append(frame)
    return frames


def take(mechanism: Client | Server, data: bytes) -> bytes:
    """Pass a command frame to the other end's CURVE mechanism, and return the answer."""
    (frame,) = frames_of(data)
    name, body = parse_command(frame.body)
    assert name == mechanism.expected
    return mechanism.receive(body)


def opened(server: Pair, client: Pair, role: Role = Role.PUB, limits: Any = DEFAULT) -> tuple[Protocol, Client]:
    """Return kvbus's end and a client's mechanism after a complete CURVE handshake."""
    protocol = accepting(server.accepts(client), role, limits)
    peer = Client(client.dials(server), SUB if role is Role.PUB else DEALER)
    feed(protocol, peer.start())
    feed(protocol, take(peer, protocol.data_to_send()))
    assert take(peer, protocol.data_to_send()) == b""
    assert protocol.sealing is not None
    assert peer.sealing is not None
    return protocol, peer


def sealed(peer: Client | Server, data: bytes) -> bytes:
    assert peer.sealing is not None
    return peer.sealing.seal(data)


def unsealed(peer: Client | Server, data: bytes) -> list[Frame]:
    assert peer.sealing is not None
    return [peer.sealing.unseal(frame) for frame in frames_of(data)]
