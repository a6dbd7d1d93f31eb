"""The keys of outputs that write to a log, and of sources that are read from a log."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import AfterValidator

from kvbus.config.values import Endpoint, Int, Seconds, Section, Text, key

TYPES: Final = {"kafka": "Kafka", "nats": "NATS", "redis": "Redis"}
"""The types of outputs that write to a log, each with its display name.

The type is also the name of the section with the keys for this log, such as ``outputs[].kafka``.
"""

PORTS: Final = {"kafka": 9092, "nats": 4222, "redis": 6379}
"""The default port of the servers of each type of log."""

SEPARATOR: Final = "\N{SYMBOL FOR UNIT SEPARATOR}"
TOPIC: Final = SEPARATOR.join(("{model}", "{worker}/{source}", "{rank}"))
"""Topic template that passes a stream's model, worker, source and rank to the driver. No record contains this topic."""

Wrong = tuple[str, str, object, str]
"""A problem of an output: the key, a sentence about the problem, the key's value, and an example of a valid value."""


class LogAccess(Section):
    """The settings for TLS and authentication at the servers of a log."""

    tls_ca_file: Path | None = key(
        None,
        "Certificate authorities of the log's servers, PEM. This key turns on TLS. The servers' certificates must "
        "contain the names by which kvbus reaches the servers. null: no TLS.",
        example="/etc/kvbus/log/ca.crt",
    )
    tls_certificate_file: Path | None = key(
        None,
        "kvbus's own certificate and chain, PEM, for log servers that authenticate clients by certificate.",
        example="/etc/kvbus/log/tls.crt",
    )
    tls_key_file: Path | None = key(
        None, "Private key of `tls_certificate_file`, PEM, not encrypted.", example="/etc/kvbus/log/tls.key"
    )
    username: Text | None = key(
        None, "User name of kvbus at the log's servers. null: kvbus sends no password.", example="worker-a"
    )
    password_file: Path | None = key(
        None, "File with the password of `username` on one line.", example="/etc/kvbus/log/password"
    )


class LogKeys(LogAccess):
    """The settings of every output that writes to a log."""

    cluster: Text = key(
        "default",
        "Name of the cluster: the first part of the streams' keys in the log. Clusters that share a log need "
        "different names.",
        example="eu-1",
    )
    state_every: Seconds = key(
        1800.0,
        "Time after which kvbus writes a stream's state into the log again, unless it did so earlier for another "
        "reason.",
        example=1800.0,
        unit="s",
        ge=1,
    )


def defaults(data: dict[str, Any]) -> dict[str, Any]:
    """Return ``data``, the keys of an output that writes to a log, with defaults for the absent keys."""
    values = {"bind": False, "topic": TOPIC, "token_ids": "drop", "heartbeat": 0, "replay_endpoint": None}
    return {**values, **data}


NEEDED: Final = {
    "tls_ca_file": ("tls_certificate_file", "tls_key_file", "username", "password_file"),
    "tls_certificate_file": ("tls_key_file",),
    "tls_key_file": ("tls_certificate_file",),
    "username": ("password_file",),
    "password_file": ("username",),
    "sentinel": ("more_servers",),
}
"""Keys of a log that must be set if certain other keys are set. The value for a key names these other keys.

kvbus authenticates only over TLS, so a password needs ``tls_ca_file``. In Redis, the servers in ``more_servers`` are
Sentinels, so they need the name of the primary (``sentinel``).
"""


def half(section: str, keys: LogAccess) -> Iterator[Wrong]:
    """Yield a problem for each absent key that another key of the section requires.

    Args:
        section: the name of the section, for the problem.
        keys: the keys of the section and their values.
    """
    fields = type(keys).model_fields
    for name, others in NEEDED.items():
        given = [other for other in others if getattr(keys, other, None)]
        if given and name in fields and getattr(keys, name) is None:
            example = f"{name}: {fields[name].examples[0]}"  # type: ignore[index]
            yield f"{section}.{name}", f"needed if {given[0]} is set", None, example


def _name(marks: str, max_length: int | None = None) -> AfterValidator:
    """Return a validator for a name at a broker. It accepts ASCII letters, digits and the characters in ``marks``."""
    *first, last = (f"'{mark}'" for mark in marks)
    limit = "" if max_length is None else f", and at most {max_length} characters"

    def check(value: str) -> str:
        plain = value.translate({ord(mark): None for mark in marks})
        if not (plain.isalnum() and plain.isascii()) or len(value[:max_length]) < len(value):
            raise ValueError(f"may have only letters, digits, {', '.join(first)} and {last}{limit}")
        return value

    return AfterValidator(check)


MAX_TOPIC: Final = 240
"""Maximum length of the name of a Kafka topic, in characters.

Kafka's limit is 249. kvbus appends ``-pointers`` to the name for a second topic, which holds the entries from which
readers start.
"""
TopicName = Annotated[str, _name("._-", MAX_TOPIC)]
StreamName = Annotated[str, _name("_-")]
Prefix = Annotated[str, _name(".:_-")]


class KafkaServers(LogAccess):
    """The location of a log in Kafka. ``endpoint`` is the address of a broker."""

    topic: TopicName = key(
        "kvbus",
        "Topic of the records. The compacted topic `TOPIC-pointers` has the pointers. Both topics must exist. The "
        "records' retention must be at least twice `state_every`.",
        example="kvbus",
    )
    more_servers: tuple[Endpoint, ...] = key(
        (), "Further brokers that kvbus asks if it cannot connect to `endpoint`.", example=["tcp://kafka-1:9092"]
    )


class KafkaTopic(KafkaServers, LogKeys):
    """The keys of an output with ``type: kafka``."""


class NatsServers(LogAccess):
    """The location of a log in NATS JetStream. ``endpoint`` is the address of a server."""

    stream: StreamName = key(
        "kvbus",
        "NATS stream of the records, with the subjects `STREAM.>`. The NATS stream `STREAM-pointers` has the "
        "pointers, and keeps one message for each subject. Both must exist. The records' retention must be at least "
        "twice `state_every`.",
        example="kvbus",
    )
    more_servers: tuple[Endpoint, ...] = key(
        (), "Further servers that kvbus asks if it cannot connect to `endpoint`.", example=["tcp://nats-1:4222"]
    )


class NatsStream(NatsServers, LogKeys):
    """The keys of an output with ``type: nats``."""


class RedisServer(LogAccess):
    """The location of a log in Redis or Valkey. ``endpoint`` is the address of the primary or of a Sentinel."""

    prefix: Prefix = key(
        "kvbus", "Beginning of the names of all Redis keys. A stream has two keys, in one hash slot.", example="kvbus"
    )
    database: Int = key(0, "Number of the Redis database.", example=0, ge=0)
    sentinel: Text | None = key(
        None,
        "Name under which the Sentinels know the primary. `endpoint` and `more_servers` are then Sentinels. null: "
        "`endpoint` is the primary.",
        example="mymaster",
    )
    more_servers: tuple[Endpoint, ...] = key(
        (), "Further Sentinels that kvbus asks if it cannot connect to `endpoint`.", example=["tcp://sentinel-1:26379"]
    )


class RedisKeys(RedisServer, LogKeys):
    """The keys of an output with ``type: redis``."""

    retention: Seconds = key(
        300.0,
        "Time after which kvbus deletes records that are older than the newest state, and Redis deletes streams "
        "without a writer.",
        example=300.0,
        unit="s",
        ge=60,
    )
