"""What stands before the engine's HTTP API, if the configuration asks for it."""

from __future__ import annotations

from typing import Protocol, cast

from kvbus.config import Config, SourceStream, parts
from kvbus.config.front import PART
from kvbus.telemetry.front import FrontStats


class Front(Protocol):
    """The part, as far as the daemon knows it."""

    stats: FrontStats
    address: tuple[str, int] | None

    async def start(self) -> None:
        """Listen.

        Raises:
            BindError: the address cannot be bound.
        """

    async def close(self) -> None:
        """Stop listening, and end what is under way."""


class Observed(Protocol):
    """What the part asks of the daemon."""

    config: Config
    streams: dict[int, SourceStream]


def make_front(observed: Observed) -> Front | None:
    """Make the part; None without one."""
    front = observed.config.front
    return None if front is None else cast("Front", parts.load(parts.FRONTS, PART)(observed, front))
