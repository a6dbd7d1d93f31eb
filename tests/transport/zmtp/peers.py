"""Test helpers for kvbus's own ZMTP: a handler that records the events of its peers, and the bytes that peers send.

A peer has one of several ZMTP versions.
"""

from __future__ import annotations

from typing import Any

from kvbus.transport.zmtp.peer import Peer
from kvbus.transport.zmtp.wire import READY, command, encode_message, encode_metadata

SIGNATURE = b"\xff" + bytes(8) + b"\x7f"


def greeting(major: int = 3, minor: int = 1, mechanism: bytes = b"NULL") -> bytes:
    """Return the greeting that a ZMTP 3 peer sends, of this version and with this security mechanism."""
    return SIGNATURE + bytes([major, minor]) + mechanism.ljust(20, b"\0") + bytes(32)


def ready(socket_type: bytes, **more: bytes) -> bytes:
    """Return the READY command that a ZMTP 3 peer sends, with its socket type and other properties."""
    properties = {b"Socket-Type": socket_type, **{name.encode(): value for name, value in more.items()}}
    return command(READY, encode_metadata(properties))


def hello(socket_type: bytes, minor: int = 1, **more: bytes) -> bytes:
    """Return all bytes that a ZMTP 3 peer sends before its first message: greeting and READY."""
    return greeting(minor=minor) + ready(socket_type, **more)


def hello_2(socket_type: int, identity: bytes = b"") -> bytes:
    """Return the bytes that a ZMTP 2.0 peer sends before its first message. kvbus does not speak ZMTP 2.0.

    Socket types: PUB is 1, SUB 2, DEALER 5.
    """
    return SIGNATURE + bytes([1, socket_type]) + encode_message([identity])


class Recorder:
    """A handler of ZMTP peers that only records their events. With ``echo``, it sends every message back."""

    def __init__(self, *, echo: bool = False) -> None:
        self.echo = echo
        self.peers: list[Peer] = []
        self.topics: list[tuple[str, bytes]] = []
        self.messages: list[list[bytes]] = []
        self.drains = 0
        self.ends: list[str] = []
        self.refused: list[str] = []
        self.broken: Any = None
        """Exception that the handler raises at the next message, or None."""

    def opened(self, peer: Peer) -> None:
        self.peers.append(peer)

    def subscribed(self, peer: Peer, topic: bytes) -> None:
        self.topics.append(("+", topic))

    def cancelled(self, peer: Peer, topic: bytes) -> None:
        self.topics.append(("-", topic))

    def received(self, peer: Peer, frames: list[bytes]) -> None:
        if self.broken is not None:
            raise self.broken
        self.messages.append(frames)
        if self.echo:
            peer.write(encode_message(frames))

    def drained(self, peer: Peer) -> None:
        assert peer.writable
        self.drains += 1

    def closed(self, peer: Peer, reason: str) -> None:
        assert peer.closed
        self.peers.remove(peer)
        self.ends.append(reason)

    def refuse(self, reason: str, address: str, detail: str) -> None:
        self.refused.append(reason)

    def send(self, *frames: bytes) -> None:
        """Send a message to every peer that subscribed to its topic."""
        data = encode_message(frames)
        for peer in self.peers:
            if any(map(frames[0].startswith, peer.topics)):
                peer.write(data)
