"""Interfaces through which tests read the output of any driver. ``KINDS`` has one entry for each output type."""

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
"""A batch as a reader gets it: topic, seq and payload."""


class Reader(Protocol):
    """A reader of one stream of an output. It does not read while the test does not call :meth:`take`."""

    def take(self) -> list[Batch]:
        """Return the batches that have arrived since the last call, in order, without waiting."""

    def ask(self, start: int) -> None:
        """Request a replay from the seq ``start``.

        Tests call it only if the output type has replays (``Kind.asks``).
        """

    def answers(self) -> list[list[Batch]]:
        """Return all replay answers so far that are complete, that is, up to END.

        Tests call it only if ``Kind.asks``.
        """

    def close(self) -> None:
        """Disconnect the reader."""


class Kind(Protocol):
    """One output type as the tests read it.

    Attributes:
        asks: whether readers can request a replay.
        loses: whether a reader that stalls for long loses batches. Other output types keep the batches for it.
        seen: whether the driver knows each of its readers.
        sends_state: whether a reader gets the state when it subscribes and after it lost batches.
    """

    asks: bool
    loses: bool
    seen: bool
    sends_state: bool

    def settings(self, directory: Path) -> dict[str, Any]:
        """Return the configuration of an output at free addresses, with room for two streams."""

    def connect(self, config: OutputConfig, stream: int, *, slow: bool) -> Reader:
        """Return a reader of one stream. A slow reader has almost no buffer for batches that the test has not taken."""

    def joined(self, stats: OutputStats, readers: list[Any]) -> bool:
        """Return whether each of the readers will get every batch that is published from now on."""

    def payload(self, number: int, size: int) -> bytes:
        """Return a batch of about ``size`` bytes, with a content that depends on ``number``.

        The readers of this type must return the batch exactly as it was published.
        """

    def places(self, config: OutputConfig, stream: int) -> list[str]:
        """Return the names of all addresses or files that one stream opens, as error messages name them."""

    def occupied(self, place: str) -> AbstractContextManager[object]:
        """Occupy an address or file while a ``with`` block runs, so that the driver cannot open it."""


LOGS = {"kafka": LogKind(Kafka), "nats": LogKind(Nats), "redis": LogKind(Redis)}
KINDS: dict[str, Kind] = {"dynamo": DynamoKind(), "lines": LinesKind(), "zmq": ZmqKind(), **LOGS}
