"""A router without tokens: it reads many workers on one connection, and may go from one aggregator to the other."""

from __future__ import annotations

from kvbus.client.view import BlockView
from kvbus.core.types import Reason
from kvbus.core.wire import codec
from kvbus.core.wire.schema import AllBlocksCleared
from tests.doubles.topic_router import TopicRouter


class TopicReader(TopicRouter):
    """It keeps its numbers wherever it goes, and drops what is below them.

    Attributes:
        built: the blocks of each topic.
        messages, size: what came, with topics and numbers; in bytes.
        again: messages that were dropped.
    """

    def __init__(self, endpoint: str) -> None:
        self.built: dict[bytes, BlockView] = {}
        self.messages = self.size = self.again = 0
        super().__init__(endpoint)

    def go_to(self, endpoint: str) -> None:
        """Leave the one aggregator for another."""
        self.disconnect()
        self._endpoint = endpoint
        self.connect()

    def _take(self, topic: bytes, seq: int, payload: bytes) -> None:
        self.messages += 1
        self.size += len(topic) + 8 + len(payload)
        expected = self.next.get(topic)
        if expected is not None and seq < expected:
            self.again += 1
            return
        batch = codec.decode(payload, 1 << 20)
        if isinstance(batch, Reason):
            self.violations.append(f"{topic!r}: {seq} is {batch}")
            return
        begins = bool(batch.events) and isinstance(batch.events[0], AllBlocksCleared)
        if seq != expected and not begins and (expected is not None or batch.events):
            self.violations.append(f"{topic!r}: {seq} instead of {expected}, and no state")
        self.next[topic] = seq + 1
        self.built.setdefault(topic, BlockView()).apply_batch(batch)
