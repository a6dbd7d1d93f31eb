"""The reasons for refusing or ending a connection, as a fixed set of names for counters and log lines."""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class Reason(StrEnum):
    """The reason why a connection ended. The handler of a peer may also end the connection with a string of its own."""

    # reasons that end a connection during its handshake
    GREETING = "greeting"
    """The peer's first bytes are those of ZMTP 1.0 or of another protocol."""
    VERSION = "version"
    """The peer speaks a ZMTP version that kvbus does not support."""
    MECHANISM = "mechanism"
    """The peer uses another security mechanism than kvbus."""
    CURVE = "curve"
    """The keys of a CURVE handshake do not match: the peer used another key for kvbus, or the handshake is forged."""
    KEY = "unknown_key"
    """The peer has proven that it owns its key, but the key is not on the allow-list."""
    SOCKET_TYPE = "socket_type"
    """The peer's socket type cannot exchange messages with kvbus's socket type."""
    HANDSHAKE_BYTES = "handshake_bytes"
    """The peer sent more bytes during the handshake than the limit."""
    HANDSHAKE_TIMEOUT = "handshake_timeout"
    """The peer did not finish the handshake in time."""
    HALF_OPEN = "half_open"
    """Too many connections were in their handshake. This connection was the oldest of them, so kvbus closed it."""
    TOO_MANY_PEERS = "too_many_peers"
    """The endpoint has its maximum number of peers."""
    NO_DESCRIPTOR = "no_descriptor"
    """The process has no file descriptor left for another connection."""
    REFUSED = "refused"
    """The peer refused the connection with an ERROR."""

    # violations of ZMTP or of a limit by the peer
    FRAME = "bad_frame"
    """A frame has flags that ZMTP does not define."""
    COMMAND = "bad_command"
    """A ZMTP command is malformed, or was sent at the wrong time."""
    FRAME_BYTES = "frame_bytes"
    """The peer sent a frame with more bytes than the limit."""
    MESSAGE_FRAMES = "message_frames"
    """The peer sent a message with more frames than the limit."""
    MESSAGE_BYTES = "message_bytes"
    """The peer sent a message with more bytes than the limit."""
    SUBSCRIPTIONS = "subscriptions"
    """The peer has more subscriptions than the limit."""
    SUBSCRIPTION_BYTES = "subscription_bytes"
    """The topics that the peer has subscribed to have more bytes in total than the limit."""
    NONCE = "nonce"
    """An encrypted CURVE message was received before, or arrived in the wrong order."""
    SEAL = "seal"
    """An encrypted CURVE message is forged."""
    UNREAD_PONGS = "unread_pongs"
    """The peer sends PINGs, but does not read kvbus's PONGs."""

    # the end of a connection without a violation
    LEFT = "left"
    """The peer closed the connection."""
    BROKEN = "broken"
    """The connection broke: it was reset, or the peer did not answer TCP keepalive probes."""
    GONE = "gone"
    """The peer's kernel no longer acknowledges data."""
    REVOKED = "revoked"
    """The peer's key was removed from the allow-list."""
    CLOSED = "closed"
    """kvbus closed the endpoint of the connection."""
    INTERNAL = "internal"
    """kvbus raised an unexpected exception. The event loop's exception handler reports it."""


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
"""The reasons for which a connection can end before its handshake has succeeded."""

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
"""The reasons for the end of a connection whose handshake has succeeded."""


class ProtocolError(Exception):
    """The peer broke a rule of ZMTP or a limit, so kvbus must end the connection.

    Args:
        reason: the reason, for counters.
        text: a description of the violation, for the log.
    """

    def __init__(self, reason: Reason, text: str) -> None:
        self.reason = reason
        super().__init__(text)
