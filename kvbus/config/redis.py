"""The keys of ``outputs[].redis``."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from kvbus.config.logs import LogAccess, LogKeys
from kvbus.config.section import key
from kvbus.config.values import Endpoint, Int, Seconds, Text


def _prefix(value: str) -> str:
    plain = value.replace(".", "").replace("_", "").replace("-", "").replace(":", "")
    if not (plain.isalnum() and plain.isascii()):
        raise ValueError("must be letters, digits, '.', ':', '_' and '-'")
    return value


Prefix = Annotated[str, AfterValidator(_prefix)]


class RedisServer(LogAccess):
    """Where in Redis or Valkey a log is; ``endpoint`` is the primary, or a Sentinel."""

    prefix: Prefix = key(
        "kvbus", "What the names of all keys begin with; a stream has two keys, in one slot.", example="kvbus"
    )
    database: Int = key(0, "Number of the database.", example=0, ge=0)
    sentinel: Text | None = key(
        None,
        "What Sentinels call the primary: `endpoint` and `more_servers` are Sentinels then. null: `endpoint` is the "
        "primary.",
        example="mymaster",
    )
    more_servers: tuple[Endpoint, ...] = key(
        (), "More Sentinels to begin with, besides `endpoint`.", example=["tcp://sentinel-1:26379"]
    )


class RedisKeys(RedisServer, LogKeys):
    """The keys of an output of ``type: redis``."""

    retention: Seconds = key(
        300.0,
        "Seconds after which a record goes that the newest state makes needless, and a stream that nobody writes.",
        example=300.0,
        unit="s",
        ge=60,
    )
