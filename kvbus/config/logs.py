"""Outputs that write to a log, and sources that are read from a log: their keys, and the checks across keys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import AfterValidator

from kvbus.config.endpoints import parse_endpoint
from kvbus.config.values import Endpoint, Int, Seconds, Section, Text, key
from kvbus.core.wire.profiles import PROFILES

if TYPE_CHECKING:
    from kvbus.config.models import Config
    from kvbus.config.outputs import OutputConfig
    from kvbus.config.paths import Path as KeyPath
    from kvbus.config.problems import Findings
    from kvbus.config.sources import SourceConfig


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


def wrongs(config: Config, at: int) -> Iterator[Wrong]:
    """Yield the problems of an output that concern logs.

    Args:
        config: the configuration.
        at: the position of the output in ``outputs``.
    """
    output = config.outputs[at]
    for name in TYPES:
        if name != output.type and getattr(output, name) is not None:
            yield name, f"only type: {name} has these keys, but the type is {output.type}", None, f"type: {name}"
    if output.type not in TYPES:
        return
    called = TYPES[output.type]
    for name, wanted in (
        ("profile", "vllm"),
        ("topic", TOPIC),
        ("bind", False),
        ("layout", "per_source"),
        ("on_subscribe", "state"),
    ):
        if (given := getattr(output, name)) != wanted:
            text = str(wanted).lower() if isinstance(wanted, bool) else repr(wanted)
            yield name, f"type: {output.type} needs {name}: {text}", given, f"leave out {name}"
    for name in ("replay_endpoint", "snapshot_endpoint", "curve_secret_key_file", "curve_server_key_file"):
        if (given := getattr(output, name)) is not None:
            yield name, f"an output to {called} does not support this", given, f"leave out {name}"
    address = parse_endpoint(output.endpoint)
    if address.is_ipc or address.is_wildcard:
        wrong = f"type: {output.type} needs the address of a {called} server"
        yield "endpoint", wrong, output.endpoint, f"endpoint: tcp://{output.type}-0:{PORTS[output.type]}"
    given_keys = getattr(output, output.type)
    if given_keys is not None:
        yield from half(output.type, given_keys)


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


AS_WRITTEN: Final[dict[str, Any]] = {
    "block_size": "auto",
    "groups": "prefix",
    "orphans": "pass",
    "without_media": (),
    "expiring_media": (),
}
"""Keys that must have these values if sources are read from a log.

With other values, kvbus would change the events of the log before routers get them.
"""


def settings_of(source: SourceConfig) -> dict[str, Any] | None:
    """Return the ``discover`` settings of a source that is read from a log; None for every other source."""
    found = [settings for kind, settings in (source.discover or {}).items() if kind in TYPES]
    return found[0] if found else None


def numbered(config: Config) -> tuple[OutputConfig, ...]:
    """Return the outputs of a configuration. In each output, an absent key ``numbers`` gets its default.

    The default is ``log`` (the batches keep the seqs of the log) if a source is read from a log. Otherwise it is
    ``own`` (kvbus numbers the batches).
    """
    if not any(settings_of(source) is not None for source in config.sources):
        return config.outputs
    return tuple(
        output if "numbers" in output.model_fields_set else output.model_copy(update={"numbers": "log"})
        for output in config.outputs
    )


def sources_of_a_log(found: Findings) -> None:
    """Reject settings with which routers would get other seqs or other events than those in the log."""
    config = found.config
    read = [settings_of(source) for source in config.sources]
    logged = [settings for settings in read if settings is not None]
    for i, output in enumerate(config.outputs):
        at: KeyPath = ("outputs", i, "numbers")
        wanted = "log" if logged else "own"
        if output.numbers != wanted and config.sources and found.sound(("sources",)):
            wrong = f"must be {wanted}, because the sources are {'' if logged else 'not '}read from a log"
            found.report(at, wrong, value=output.numbers, example=f"numbers: {wanted}")
    if not logged or not found.sound(("sources",)):
        return
    for i, each in enumerate(read):
        if each is None:
            wrong = "other sources are read from a log: give this engine its own kvbus, which writes to the log"
            found.report(("sources", i), wrong)
    for name, wanted_value in AS_WRITTEN.items():
        given = getattr(config, name)
        if given != wanted_value:
            found.report(
                (name,), "must not be set, because routers must get the content of a log unchanged", value=given
            )
    if config.state_dir not in (None, "auto"):
        wrong = "the log already has the state of sources that are read from it"
        found.report(("state_dir",), wrong, value=config.state_dir, example="state_dir: null")
    tokens = all(settings.get("token_ids") == "keep" for settings in logged)
    for i, output in enumerate(config.outputs):
        _output_of_a_log(found, i, output, tokens=tokens)


def _output_of_a_log(found: Findings, i: int, output: OutputConfig, *, tokens: bool) -> None:
    def report(name: str, wrong: str, value: object, example: str) -> None:
        found.report(("outputs", i, name), wrong, value=value, example=example)

    if output.type != "zmq":
        report("type", "only an output of type zmq can keep the seqs of a log", output.type, "type: zmq")
        return
    if output.layout != "per_topic":
        wrong = "each stream keeps its own seqs from the log, so each needs its own topic"
        report("layout", wrong, output.layout, "layout: per_topic")
    if output.snapshot_endpoint is not None:
        wrong = "snapshots need a publisher id, which two kvbus that read the same log cannot share"
        report("snapshot_endpoint", wrong, output.snapshot_endpoint, "snapshot_endpoint: null")
    profile = PROFILES[output.profile]
    if not profile.as_it_comes:
        wrong = "its routers need batches made from several records, and these have no seq in the log"
        report("profile", wrong, output.profile, "profile: vllm")
    elif profile.hashes_tokens and not tokens:
        wrong = (
            f"routers of profile {output.profile} hash the token ids themselves: the writers of the log need "
            "token_ids: keep, and discover needs the same key"
        )
        report("profile", wrong, output.profile, "discover: {…: {token_ids: keep, …}}")
