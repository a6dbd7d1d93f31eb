"""What a peer's bytes mean: the events of :class:`~kvbus.transport.zmtp.protocol.Protocol`."""

from __future__ import annotations

from typing import NamedTuple


class Opened(NamedTuple):
    """The handshake is over."""

    socket_type: bytes
    identity: bytes
    version: tuple[int, int]
    key: bytes = b""
    """The public key that the peer has proven to own (CURVE)."""


class Subscribed(NamedTuple):
    """The peer wants messages whose topic begins so."""

    topic: bytes


class Cancelled(NamedTuple):
    """The peer does not want them any more."""

    topic: bytes


class Message(NamedTuple):
    """A whole message."""

    frames: list[bytes]


class Progress(NamedTuple):
    """Something was read that needs nobody's attention, such as a PING. It counts as work."""


Event = Opened | Subscribed | Cancelled | Message | Progress
