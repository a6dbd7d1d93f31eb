"""The keys of ``outputs[].kafka``."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import AfterValidator

from kvbus.config.logs import LogAccess, LogKeys
from kvbus.config.section import key
from kvbus.config.values import Endpoint

MOST: Final = 240
"""Characters of a topic's name, with what the topic of pointers has behind it at most Kafka's 249."""


def _topic(value: str) -> str:
    plain = value.replace(".", "").replace("_", "").replace("-", "")
    if not (plain.isalnum() and plain.isascii()) or len(value) > MOST:
        raise ValueError(f"must be letters, digits, '.', '_' and '-', {MOST} at most")
    return value


TopicName = Annotated[str, AfterValidator(_topic)]


class KafkaServers(LogAccess):
    """Where in Kafka a log is; ``endpoint`` is a broker."""

    topic: TopicName = key(
        "kvbus",
        "Of the records; the topic of the pointers has `-pointers` behind it and is compacted. Both have to be there; "
        "retention has to be twice `state_every` or more.",
        example="kvbus",
    )
    more_servers: tuple[Endpoint, ...] = key(
        (), "More brokers to begin with, besides `endpoint`.", example=["tcp://kafka-1:9092"]
    )


class KafkaTopic(KafkaServers, LogKeys):
    """The keys of an output of ``type: kafka``."""
