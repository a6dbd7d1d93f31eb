"""What every output that is a log has: its keys in common, and what else such an output has to be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvbus.config.endpoints import parse_endpoint
from kvbus.config.section import Section, key
from kvbus.config.values import Seconds, Text

if TYPE_CHECKING:
    from kvbus.config.models import Config

TYPES: Final = {"kafka": "Kafka", "nats": "NATS", "redis": "Redis"}
"""The types of outputs that are a log, which are the names of their keys, too, and what each is called."""

SEPARATOR: Final = "\N{SYMBOL FOR UNIT SEPARATOR}"
TOPIC: Final = SEPARATOR.join(("{model}", "{worker}/{source}", "{rank}"))
"""How the driver hears whose stream it is. It is in no record."""

Wrong = tuple[str, str, object, str]
"""A key, what is wrong with it, its value, and a better one."""


class LogAccess(Section):
    """Who kvbus is to the servers of a log."""

    tls_ca_file: Path | None = key(
        None,
        "Authorities, PEM, for the servers' certificates, which have to hold the names that servers are reached by; "
        "turns TLS on. null: in clear.",
        example="/etc/kvbus/log/ca.crt",
    )
    tls_certificate_file: Path | None = key(
        None,
        "kvbus's own certificate and its chain, PEM, for servers that know clients by it.",
        example="/etc/kvbus/log/tls.crt",
    )
    tls_key_file: Path | None = key(
        None, "The secret key of that certificate, PEM, not encrypted.", example="/etc/kvbus/log/tls.key"
    )
    username: Text | None = key(
        None, "Who kvbus is to the servers, by a password; null: nobody, or by certificate.", example="worker-a"
    )
    password_file: Path | None = key(None, "That user's password, a line.", example="/etc/kvbus/log/password")


class LogKeys(LogAccess):
    """Whose streams are written, and how often their states."""

    cluster: Text = key("default", "First part of the streams' keys: who shares the log.", example="eu-1")
    state_every: Seconds = key(
        1800.0,
        "Seconds after which a stream's state is written again, if nothing else had it written sooner.",
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
    for name in TYPES:
        if name != output.type and getattr(output, name) is not None:
            yield name, f"only type: {name} has these keys, and the type is {output.type}", None, f"type: {name}"
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
            yield name, f"type: {output.type} goes with {name}: {text} alone", given, f"leave out {name}"
    for name in ("replay_endpoint", "snapshot_endpoint", "curve_secret_key_file", "curve_server_key_file"):
        if (given := getattr(output, name)) is not None:
            yield name, f"{called} has no such thing", given, f"leave out {name}"
    if parse_endpoint(output.endpoint).is_ipc:
        yield (
            "endpoint",
            f"{called} is reached over TCP alone",
            output.endpoint,
            f"endpoint: tcp://{output.type}-0:PORT",
        )
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
"""What has to be there where one of the others is, of the keys that a log has. Without TLS kvbus says to nobody who it
is; a Redis has one primary, and Sentinels know which."""


def half(section: str, keys: LogAccess) -> Iterator[Wrong]:
    """Keys that say nothing without others."""
    fields = type(keys).model_fields
    for name, others in NEEDED.items():
        given = [other for other in others if getattr(keys, other, None)]
        if given and name in fields and getattr(keys, name) is None:
            example = f"{name}: {fields[name].examples[0]}"  # type: ignore[index]
            yield f"{section}.{name}", f"needed with {given[0]}", None, example
