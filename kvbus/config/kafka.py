"""The keys of ``outputs[].kafka``, and what else an output of ``type: kafka`` has to be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import AfterValidator

from kvbus.config.endpoints import parse_endpoint
from kvbus.config.section import Section, key
from kvbus.config.values import Endpoint, Seconds, Text

if TYPE_CHECKING:
    from kvbus.config.models import Config

TYPE: Final = "kafka"
SEPARATOR: Final = "\N{SYMBOL FOR UNIT SEPARATOR}"
TOPIC: Final = SEPARATOR.join(("{model}", "{worker}/{source}", "{rank}"))
"""How the driver hears whose stream it is. It is in no record."""

Wrong = tuple[str, str, object, str]
"""A key, what is wrong with it, its value, and a better one."""

MOST: Final = 240
"""Characters of a topic's name, with what the topic of pointers has behind it at most Kafka's 249."""


def _topic(value: str) -> str:
    plain = value.replace(".", "").replace("_", "").replace("-", "")
    if not (plain.isalnum() and plain.isascii()) or len(value) > MOST:
        raise ValueError(f"must be letters, digits, '.', '_' and '-', {MOST} at most")
    return value


TopicName = Annotated[str, AfterValidator(_topic)]


class KafkaTopic(Section):
    """Where in Kafka an output of ``type: kafka`` writes; ``endpoint`` is a broker."""

    topic: TopicName = key(
        "kvbus",
        "Of the records; the topic of the pointers has `-pointers` behind it and is compacted. Both have to be there.",
        example="kvbus",
    )
    cluster: Text = key("default", "First part of the streams' keys: who shares the topic.", example="eu-1")
    more_servers: tuple[Endpoint, ...] = key(
        (), "More brokers to begin with, besides `endpoint`.", example=["tcp://kafka-1:9092"]
    )
    state_every: Seconds = key(
        1800.0,
        "Seconds after which a stream's state is written again. The topic's retention has to be twice that or more.",
        example=1800.0,
        unit="s",
        ge=1,
    )


def defaults(data: dict[str, Any]) -> dict[str, Any]:
    """What follows from the type, where nothing else is said."""
    said = {"bind": False, "topic": TOPIC, "token_ids": "drop", "heartbeat": 0, "replay_endpoint": None}
    return {**said, **data}


def wrongs(config: Config, at: int) -> Iterator[Wrong]:
    """What cannot be with one output."""
    output = config.outputs[at]
    if output.type != TYPE:
        if output.kafka is not None:
            yield "kafka", f"only type: {TYPE} has these keys, and the type is {output.type}", None, f"type: {TYPE}"
        return
    for name, wanted in (
        ("profile", "vllm"),
        ("topic", TOPIC),
        ("bind", False),
        ("layout", "per_source"),
        ("on_subscribe", "state"),
    ):
        if (given := getattr(output, name)) != wanted:
            text = str(wanted).lower() if isinstance(wanted, bool) else repr(wanted)
            yield name, f"type: {TYPE} goes with {name}: {text} alone", given, f"leave out {name}"
    for name in ("replay_endpoint", "snapshot_endpoint", "curve_secret_key_file", "curve_server_key_file"):
        if (given := getattr(output, name)) is not None:
            yield name, "Kafka has no such thing", given, f"leave out {name}"
    if parse_endpoint(output.endpoint).is_ipc:
        yield "endpoint", "Kafka is reached over TCP alone", output.endpoint, "endpoint: tcp://kafka-0:9092"
