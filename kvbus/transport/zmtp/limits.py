"""What one peer may make kvbus keep."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds for one peer, checked before anything is kept.

    Attributes:
        frame_bytes: size of one frame.
        message_frames: frames of one message. Each costs an object of some 40 bytes, however short it is.
        kept_frames: frames kept of one message; the rest is read and dropped.
        message_bytes: size of one message.
        subscriptions: topics that a peer subscribes to.
        subscription_bytes: size of all of them together.
        handshake_bytes: size of the handshake behind the greeting.
    """

    frame_bytes: int = 65_536
    message_frames: int = 256
    kept_frames: int = 256
    message_bytes: int = 65_536
    subscriptions: int = 1_024
    subscription_bytes: int = 65_536
    handshake_bytes: int = 4_096


DEFAULT = Limits()
