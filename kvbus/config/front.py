"""The keys ``front`` and ``front_grpc``: proxies for clients that ask an engine's API for its event endpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import AfterValidator, BeforeValidator, model_validator

from kvbus.config import parts
from kvbus.config.endpoints import Address, parse_address
from kvbus.config.values import ApiUrl, HttpAddress, Int, Name, Section, Size, key

if TYPE_CHECKING:
    from collections.abc import Iterable


def _host(value: object) -> object:
    if value is not None:
        if not isinstance(value, str):
            raise ValueError("must be a host name or address")
        try:
            address = parse_address(f"{value}:1")
        except ValueError as error:
            raise ValueError("must be a host name or address, IPv6 in brackets, without scheme and port") from error
        if Address(address[0], 1).is_wildcard:
            raise ValueError(
                "is not an address that clients can connect to; write null for the address that the client used"
            )
    return value


def _grpc(value: str) -> str:
    host, port = parse_address(value)
    if port == 0 or Address(host, 1).is_wildcard:
        raise ValueError("must be the engine's address as host:port")
    return value


GrpcAddress = Annotated[str, AfterValidator(_grpc)]
"""The address of an engine's gRPC API, as ``host:port``."""


class Fronting(Section):
    """The keys that the HTTP proxy and the gRPC proxy have in common.

    Attributes:
        part: the name of the optional part that implements the proxy.
    """

    part: ClassVar[str]

    listen: HttpAddress = key(
        ...,
        "Address where kvbus listens instead of the engine. Routers and clients use it.",
        example="0.0.0.0:8000",
    )
    engine: str
    source: Name | None = key(
        None, "Name of the source that reads this engine. null: the only source.", example="engine"
    )
    output: Name | None = key(
        None, "Name of the output whose endpoints clients get. null: the first output.", example="routers"
    )
    host: Annotated[str | None, BeforeValidator(_host)] = key(
        None,
        "Host in the endpoints that clients get, if the output listens on every interface. null: the address that "
        "the client used.",
        example="10.0.0.3",
    )

    def number_of_output(self, names: Iterable[str]) -> int | None:
        """Return the position of the output whose endpoints clients get; None if no output has the configured name.

        Args:
            names: the names of the outputs, in order.
        """
        return next((i for i, name in enumerate(names) if self.output in (None, name)), None)

    @model_validator(mode="before")
    @classmethod
    def _installed(cls, data: Any) -> Any:
        if lacking := parts.missing(parts.FRONTS, cls.part):
            raise ValueError(lacking)
        return data


class Front(Fronting):
    """A proxy in front of an engine's HTTP API. In answers it replaces the engine's event endpoints by kvbus's."""

    part = "http"

    engine: ApiUrl = key(
        ...,
        "Base URL of the engine's HTTP API. Only kvbus should be able to reach it.",
        example="http://127.0.0.1:8001",
    )
    max_connections: Int = key(
        1024,
        "Maximum number of client connections. A further connection replaces an idle one, or is refused.",
        example=1024,
        unit="connections",
        ge=1,
        le=65_536,
    )


class FrontGrpc(Fronting):
    """A proxy in front of an engine's gRPC API. In answers it replaces the engine's event endpoints by kvbus's."""

    part = "grpc"

    listen: HttpAddress = key(
        ...,
        "Address where kvbus listens instead of the engine. Routers and workers use it.",
        example="0.0.0.0:50051",
    )
    engine: GrpcAddress = key(
        ..., "Address of the engine's gRPC API. Only kvbus should be able to reach it.", example="127.0.0.1:50052"
    )
    host: Annotated[str | None, BeforeValidator(_host)] = key(
        None,
        "Host in the endpoints that clients get, if the output listens on every interface. null: kvbus's address "
        "at which the client is connected.",
        example="10.0.0.3",
    )
    max_connections: Int = key(
        1024,
        "Maximum number of client connections. A further connection is closed.",
        example=1024,
        unit="connections",
        ge=1,
        le=65_536,
    )
    max_calls: Int = key(
        1024,
        "Maximum number of simultaneous calls. A further call is refused (RESOURCE_EXHAUSTED).",
        example=1024,
        unit="calls",
        ge=1,
        le=65_536,
    )
    max_message: Size = key(
        64 * 1024 * 1024,
        "Maximum size of a message, in both directions. A larger message ends its call (RESOURCE_EXHAUSTED).",
        example=64 * 1024 * 1024,
        unit="bytes",
        ge=4 * 1024 * 1024,
        le=2**31 - 1,
    )
