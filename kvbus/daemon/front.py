"""The proxies in front of the engine's HTTP API and gRPC API, if the configuration has such proxies."""

from __future__ import annotations

from typing import Protocol, TypeVar, cast

from kvbus.common.front_stats import CallStats, FrontStats
from kvbus.config import Config, SourceStream, parts
from kvbus.config.front import Fronting
from kvbus.core.findings import engine as catalogue
from kvbus.daemon.binding import explained

Stats_co = TypeVar("Stats_co", covariant=True)


class Front(Protocol[Stats_co]):
    """The methods that a proxy in front of the engine's API must have.

    The HTTP proxy and the gRPC proxy are optional parts.
    """

    address: tuple[str, int] | None

    @property
    def stats(self) -> Stats_co:
        """The counters of the proxy."""

    async def start(self) -> None:
        """Listen on the configured address.

        Raises:
            BindError: the address cannot be bound.
        """

    async def close(self) -> None:
        """Stop listening, and abort the unfinished requests."""


class BusState(Protocol):
    """The attributes of the daemon that the proxies read."""

    config: Config
    streams: dict[int, SourceStream]


class Fronts:
    """The proxies that a configuration has.

    Attributes:
        http: the proxy in front of the HTTP API; None if it is not configured.
        grpc: the proxy in front of the gRPC API; None if it is not configured.
    """

    def __init__(self, observed: BusState) -> None:
        config = observed.config
        self.http = cast("Front[FrontStats] | None", _made(observed, config.front))
        self.grpc = cast("Front[CallStats] | None", _made(observed, config.front_grpc))

    async def start(self) -> None:
        """Start the configured proxies.

        Raises:
            BindError: an address cannot be bound.
        """
        for section, each in (("front", self.http), ("front_grpc", self.grpc)):
            if each is not None:
                with explained(catalogue.CANNOT_LISTEN, section, "listen"):
                    await each.start()

    async def close(self) -> None:
        """Stop the proxies, and abort their unfinished requests."""
        for each in (self.http, self.grpc):
            if each is not None:
                await each.close()


def _made(observed: BusState, front: Fronting | None) -> object | None:
    return None if front is None else parts.load(parts.FRONTS, front.part)(observed, front)
