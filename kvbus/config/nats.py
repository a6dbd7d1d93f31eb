"""The keys of ``outputs[].nats``."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from kvbus.config.logs import LogAccess, LogKeys
from kvbus.config.section import key
from kvbus.config.values import Endpoint


def _name(value: str) -> str:
    plain = value.replace("_", "").replace("-", "")
    if not (plain.isalnum() and plain.isascii()):
        raise ValueError("must be letters, digits, '_' and '-'")
    return value


StreamName = Annotated[str, AfterValidator(_name)]


class NatsServers(LogAccess):
    """Where in NATS JetStream a log is; ``endpoint`` is a server."""

    stream: StreamName = key(
        "kvbus",
        "Of the records, with the subjects `STREAM.>`; the stream of the pointers has `-pointers` behind it and keeps "
        "one message a subject. Both have to be there; retention has to be twice `state_every` or more.",
        example="kvbus",
    )
    more_servers: tuple[Endpoint, ...] = key(
        (), "More servers to begin with, besides `endpoint`.", example=["tcp://nats-1:4222"]
    )


class NatsStream(NatsServers, LogKeys):
    """The keys of an output of ``type: nats``."""
