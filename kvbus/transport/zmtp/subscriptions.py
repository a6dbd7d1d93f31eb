"""The topics that one peer has subscribed to."""

from __future__ import annotations

from collections.abc import Iterator

from kvbus.transport.zmtp.limits import Limits
from kvbus.transport.zmtp.reasons import ProtocolError, Reason


class Subscriptions:
    """A bounded set of topic prefixes. As in libzmq, a repeated subscription changes nothing, and one CANCEL ends it.

    Args:
        limits: how many there may be, and how large.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._topics: dict[bytes, None] = {}
        self._prefixes: tuple[bytes, ...] = ()
        self._bytes = 0

    def add(self, topic: bytes) -> bool:
        """Add a topic; return False if it is there already.

        Raises:
            ProtocolError: there are too many of them.
        """
        if topic in self._topics:
            return False
        if len(self._topics) >= self._limits.subscriptions:
            raise ProtocolError(Reason.SUBSCRIPTIONS, f"more than {self._limits.subscriptions} subscriptions")
        if self._bytes + len(topic) > self._limits.subscription_bytes:
            raise ProtocolError(
                Reason.SUBSCRIPTION_BYTES, f"more than {self._limits.subscription_bytes} bytes of subscriptions"
            )
        self._topics[topic] = None
        self._bytes += len(topic)
        self._prefixes = ()
        return True

    def remove(self, topic: bytes) -> bool:
        """Remove a topic; return False if it is not there."""
        if topic not in self._topics:
            return False
        del self._topics[topic]
        self._bytes -= len(topic)
        self._prefixes = ()
        return True

    def match(self, topic: bytes) -> bool:
        """Return whether a message with this topic is subscribed to."""
        if not self._prefixes:
            self._prefixes = tuple(self._topics)
        return topic.startswith(self._prefixes)

    def __len__(self) -> int:
        return len(self._topics)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._topics)

    def __contains__(self, topic: object) -> bool:
        return topic in self._topics

    @property
    def bytes(self) -> int:
        """Size of all topics together."""
        return self._bytes
