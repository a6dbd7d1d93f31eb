"""What stands before the engine's API, if the configuration asks for it."""

from __future__ import annotations

from typing import Protocol, TypeVar, cast

from kvbus.common.front_stats import CallStats, FrontStats
from kvbus.config import Config, SourceStream, parts
from kvbus.config.front import Fronting

Stats_co = TypeVar("Stats_co", covariant=True)


class Front(Protocol[Stats_co]):
    """A part, as far as the daemon knows it."""

    address: tuple[str, int] | None

    @property
    def stats(self) -> Stats_co:
        """What it counts."""

    async def start(self) -> None:
        """Listen.

        Raises:
            BindError: the address cannot be bound.
        """

    async def close(self) -> None:
        """Stop listening, and end what is under way."""


class Observed(Protocol):
    """What the parts ask of the daemon."""

    config: Config
    streams: dict[int, SourceStream]


class Fronts:
    """Those that the configuration asks for.

    Attributes:
        http: before the HTTP API; None without one.
        grpc: before the gRPC API; None without one.
    """

    def __init__(self, observed: Observed) -> None:
        config = observed.config
        self.http = cast("Front[FrontStats] | None", _made(observed, config.front))
        self.grpc = cast("Front[CallStats] | None", _made(observed, config.front_grpc))

    async def start(self) -> None:
        """Listen.

        Raises:
            BindError: an address cannot be bound.
        """
        for each in (self.http, self.grpc):
            if each is not None:
                await each.start()

    async def close(self) -> None:
        """Stop listening, and end what is under way."""
        for each in (self.http, self.grpc):
            if each is not None:
                await each.close()


def _made(observed: Observed, front: Fronting | None) -> object | None:
    return None if front is None else parts.load(parts.FRONTS, front.part)(observed, front)
