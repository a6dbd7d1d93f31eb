"""How a test reads what a driver sends: one entry of ``KINDS`` for each output type."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from kvbus.config import OutputConfig
from kvbus.core.stats import OutputStats
from tests.log.kinds import Kafka, Nats, Redis
from tests.outputs.dynamo_reader import DynamoKind
from tests.outputs.lines_reader import LinesKind
from tests.outputs.log_reader import LogKind
from tests.outputs.zmq_reader import ZmqKind

Batch = tuple[bytes, int, bytes]
"""Topic, seq, payload."""


class Reader(Protocol):
    """Reads one stream. It stalls by not being told to read."""

    def take(self) -> list[Batch]:
        """What has come since the last call, in the order it came; never waits."""

    def ask(self, start: int) -> None:
        """Ask for a replay; only where ``Kind.asks``."""

    def answers(self) -> list[list[Batch]]:
        """All answers so far that came whole, which is up to their END; only where ``Kind.asks``."""

    def close(self) -> None:
        """Go away."""


class Kind(Protocol):
    """What is particular about the readers of one output type.

    Attributes:
        asks: readers can ask for a replay.
        loses: a reader that stalls for long loses batches; with others they are kept for it.
        seen: the driver knows each of its readers.
        sends_state: a reader gets the state when it subscribes, and when it has lost batches.
    """

    asks: bool
    loses: bool
    seen: bool
    sends_state: bool

    def settings(self, directory: Path) -> dict[str, Any]:
        """The keys of an output at free places, with room for two streams."""

    def connect(self, config: OutputConfig, stream: int, *, slow: bool) -> Reader:
        """A reader of one stream; a slow one has no room for what it has not taken."""

    def joined(self, stats: OutputStats, readers: list[Any]) -> bool:
        """Whether all readers there are will be sent what is published from now on."""

    def payload(self, number: int, size: int) -> bytes:
        """A batch of about this size, different for each number, that a reader can give back as it was."""

    def places(self, config: OutputConfig, stream: int) -> list[str]:
        """All that one stream opens, as an error names it."""

    def occupied(self, place: str) -> AbstractContextManager[object]:
        """Keep a place from being opened."""


LOGS = {"kafka": LogKind(Kafka), "nats": LogKind(Nats), "redis": LogKind(Redis)}
KINDS: dict[str, Kind] = {"dynamo": DynamoKind(), "lines": LinesKind(), "zmq": ZmqKind(), **LOGS}
