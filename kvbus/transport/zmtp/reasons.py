"""Why a connection was refused or ended: a bounded set of names, for counters and logs."""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class Reason(StrEnum):
    """Why a connection is over. Roles may end one for a reason of their own, a plain string."""

    # the handshake
    GREETING = "greeting"
    """The first bytes are those of ZMTP 1.0, or of another protocol."""
    VERSION = "version"
    """ZMTP, of a version that kvbus does not speak."""
    MECHANISM = "mechanism"
    """The peer wants another security mechanism."""
    CURVE = "curve"
    """The keys of a CURVE handshake do not fit: it was made for another key of ours, or it is forged."""
    KEY = "unknown_key"
    """The peer has proven who it is, and its key is not on the allow-list."""
    SOCKET_TYPE = "socket_type"
    """The peer's socket type cannot talk to ours."""
    HANDSHAKE_BYTES = "handshake_bytes"
    """The handshake is too large."""
    HANDSHAKE_TIMEOUT = "handshake_timeout"
    """The handshake took too long."""
    HALF_OPEN = "half_open"
    """Too many connections were in their handshake; the oldest of them had to go."""
    TOO_MANY_PEERS = "too_many_peers"
    """There is no room for another peer."""
    NO_DESCRIPTOR = "no_descriptor"
    """The process has no file descriptor left for another connection."""
    REFUSED = "refused"
    """The peer sent ERROR: it does not want this connection."""

    # what the peer sends
    FRAME = "bad_frame"
    """A frame that ZMTP does not know."""
    COMMAND = "bad_command"
    """A malformed command, or one at the wrong time."""
    FRAME_BYTES = "frame_bytes"
    """A frame is too large."""
    MESSAGE_FRAMES = "message_frames"
    """A message has too many frames."""
    MESSAGE_BYTES = "message_bytes"
    """A message is too large."""
    SUBSCRIPTIONS = "subscriptions"
    """The peer has too many subscriptions."""
    SUBSCRIPTION_BYTES = "subscription_bytes"
    """The peer's subscriptions are too large together."""
    NONCE = "nonce"
    """A message of CURVE that was received before, or in another order."""
    SEAL = "seal"
    """A message of CURVE that is forged."""
    UNREAD_PONGS = "unread_pongs"
    """The peer sends PINGs, and does not read the answers."""

    # the end
    LEFT = "left"
    """The peer closed the connection."""
    BROKEN = "broken"
    """The connection broke: a reset, or keepalive without an answer."""
    GONE = "gone"
    """The peer's kernel acknowledges nothing any more."""
    REVOKED = "revoked"
    """The peer's key is not on the allow-list any more."""
    CLOSED = "closed"
    """kvbus closes the endpoint."""
    INTERNAL = "internal"
    """An error of kvbus itself, which the event loop reports."""


REFUSALS: Final = (
    Reason.GREETING,
    Reason.VERSION,
    Reason.MECHANISM,
    Reason.SOCKET_TYPE,
    Reason.HANDSHAKE_BYTES,
    Reason.HANDSHAKE_TIMEOUT,
    Reason.HALF_OPEN,
    Reason.TOO_MANY_PEERS,
    Reason.NO_DESCRIPTOR,
    Reason.REFUSED,
    Reason.CURVE,
    Reason.KEY,
    Reason.NONCE,
    Reason.FRAME,
    Reason.COMMAND,
    Reason.LEFT,
    Reason.BROKEN,
)
"""Why a connection does not become a peer."""

DISCONNECTS: Final = (
    Reason.FRAME,
    Reason.COMMAND,
    Reason.FRAME_BYTES,
    Reason.MESSAGE_FRAMES,
    Reason.MESSAGE_BYTES,
    Reason.SUBSCRIPTIONS,
    Reason.SUBSCRIPTION_BYTES,
    Reason.UNREAD_PONGS,
    Reason.NONCE,
    Reason.SEAL,
    Reason.REVOKED,
    Reason.LEFT,
    Reason.BROKEN,
    Reason.GONE,
    Reason.CLOSED,
    Reason.INTERNAL,
)
"""Why a peer's connection ends."""


class ProtocolError(Exception):
    """The peer broke a rule or a limit, so the connection must end.

    Args:
        reason: the name to count it under.
        text: what happened, for the log.
    """

    def __init__(self, reason: Reason, text: str) -> None:
        self.reason = reason
        super().__init__(text)
