"""The proxies in front of the engine's HTTP and gRPC API, if the configuration has them."""

from __future__ import annotations

from typing import Protocol, TypeVar, cast

from kvbus.common.front_stats import CallStats, FrontStats
from kvbus.config import Config, SourceStream, parts
from kvbus.config.front import Fronting
from kvbus.core.findings import engine as catalogue
from kvbus.daemon.binding import explained

Stats_co = TypeVar("Stats_co", covariant=True)


class Front(Protocol[Stats_co]):
    """The interface of a proxy, which is an optional part."""

    address: tuple[str, int] | None

    @property
    def stats(self) -> Stats_co:
        """The proxy's counters."""

    async def start(self) -> None:
        """Listen on the configured address.

        Raises:
            BindError: the address cannot be bound.
        """

    async def close(self) -> None:
        """Stop listening, and end the requests under way."""


class Observed(Protocol):
    """The data of the daemon that the proxies use."""

    config: Config
    streams: dict[int, SourceStream]


class Fronts:
    """The proxies of a configuration.

    Attributes:
        http: the proxy of the HTTP API; None without one.
        grpc: the proxy of the gRPC API; None without one.
    """

    def __init__(self, observed: Observed) -> None:
        config = observed.config
        self.http = cast("Front[FrontStats] | None", _made(observed, config.front))
        self.grpc = cast("Front[CallStats] | None", _made(observed, config.front_grpc))

    async def start(self) -> None:
        """Start all proxies.

        Raises:
            BindError: an address cannot be bound.
        """
        for section, each in (("front", self.http), ("front_grpc", self.grpc)):
            if each is not None:
                with explained(catalogue.CANNOT_LISTEN, section, "listen"):
                    await each.start()

    async def close(self) -> None:
        """Stop listening, and end the requests under way."""
        for each in (self.http, self.grpc):
            if each is not None:
                await each.close()


def _made(observed: Observed, front: Fronting | None) -> object | None:
    return None if front is None else parts.load(parts.FRONTS, front.part)(observed, front)
