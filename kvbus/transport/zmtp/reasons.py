"""The reasons why connections are refused or ended: a bounded set of names for counters and logs."""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class Reason(StrEnum):
    """The reason why a connection ended. A role may also end a connection with its own reason, a plain string."""

    # the handshake
    GREETING = "greeting"
    """The peer's first bytes are those of ZMTP 1.0 or of another protocol."""
    VERSION = "version"
    """The peer speaks a ZMTP version that kvbus does not support."""
    MECHANISM = "mechanism"
    """The peer uses another security mechanism."""
    CURVE = "curve"
    """The keys of a CURVE handshake do not match: the peer used another key for kvbus, or the handshake is forged."""
    KEY = "unknown_key"
    """The peer has proven that it owns its key, but the key is not on the allow-list."""
    SOCKET_TYPE = "socket_type"
    """The peer's socket type cannot talk to ours."""
    HANDSHAKE_BYTES = "handshake_bytes"
    """The handshake has more bytes than its limit."""
    HANDSHAKE_TIMEOUT = "handshake_timeout"
    """The handshake did not end in time."""
    HALF_OPEN = "half_open"
    """Too many connections were in their handshake, and this one was the oldest."""
    TOO_MANY_PEERS = "too_many_peers"
    """The endpoint has its maximum number of peers."""
    NO_DESCRIPTOR = "no_descriptor"
    """The process has no file descriptor left for another connection."""
    REFUSED = "refused"
    """The peer refused the connection with an ERROR."""

    # violations by the peer
    FRAME = "bad_frame"
    """A frame has flags that ZMTP does not define."""
    COMMAND = "bad_command"
    """A command is malformed, or came at the wrong time."""
    FRAME_BYTES = "frame_bytes"
    """A frame is too large."""
    MESSAGE_FRAMES = "message_frames"
    """A message has too many frames."""
    MESSAGE_BYTES = "message_bytes"
    """A message is too large."""
    SUBSCRIPTIONS = "subscriptions"
    """The peer has too many subscriptions."""
    SUBSCRIPTION_BYTES = "subscription_bytes"
    """The topics of the peer's subscriptions have too many bytes in total."""
    NONCE = "nonce"
    """A CURVE message was received before, or is out of order."""
    SEAL = "seal"
    """A CURVE message is forged."""
    UNREAD_PONGS = "unread_pongs"
    """The peer sends PINGs but does not read the answers."""

    # the end of the connection
    LEFT = "left"
    """The peer closed the connection."""
    BROKEN = "broken"
    """The connection broke: a reset, or unanswered keepalive probes."""
    GONE = "gone"
    """The peer's kernel has stopped acknowledging data."""
    REVOKED = "revoked"
    """The peer's key was removed from the allow-list."""
    CLOSED = "closed"
    """kvbus closed the endpoint."""
    INTERNAL = "internal"
    """An exception in kvbus, which the event loop reports."""


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
"""The reasons why a connection does not become a peer."""

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
"""The reasons why a peer's connection ends."""


class ProtocolError(Exception):
    """The peer broke a rule or a limit, so the connection must end.

    Args:
        reason: the reason, for counters.
        text: a description of the violation, for the log.
    """

    def __init__(self, reason: Reason, text: str) -> None:
        self.reason = reason
        super().__init__(text)
