"""What is wrong between an output that is a log and its servers."""

from __future__ import annotations

import asyncio
from typing import Final

from kvbus.config import OutputConfig
from kvbus.parts.log.contract import UNREACHABLE, UnavailableError
from kvbus.parts.log.place import place_of
from kvbus.tools.doctor.findings import Finding

DO: Final = {
    "authentication_failed": (".password_file", "give the user this password, or the file the user's"),
    "certificate_expired": ("endpoint", "renew the server's certificate"),
    "certificate_foreign": (".tls_ca_file", "name the authority that signed the servers' certificates"),
    "certificate_wrong_host": ("endpoint", "name the server as its certificate does"),
    "client_certificate_refused": (
        ".tls_certificate_file",
        "renew it, by an authority that the servers trust; a port for passwords wants none",
    ),
    "denied": (".username", "add the ACL of a writer, docs/LOG.md names it"),
    "key_file": ("", "correct the file"),
    "primary_unknown": (".sentinel", "name the primary as the Sentinels do"),
    "slot_elsewhere": ("endpoint", "name a server that is no cluster"),
    "stream_missing": (".stream", "create both streams, docs/LOG.md says how"),
    "tls_failed": (".tls_ca_file", "name a port that speaks TLS, or leave it out"),
    "topic_denied": (".topic", "add the ACLs of a writer, docs/LOG.md names them"),
    "topic_missing": (".topic", "create both topics, docs/LOG.md says how"),
    UNREACHABLE: ("endpoint", "name a server that runs, and tls_ca_file if that port speaks TLS"),
}
"""By reason: the key, of the log's own ones without their section, and what to do."""


async def broker(output: OutputConfig, at: str, timeout: float) -> tuple[list[Finding], str]:  # noqa: ASYNC109
    """Whether a server takes kvbus in, and shows it the streams. Nothing is written: that would fence a writer."""
    where = place_of(output).servers
    try:
        async with asyncio.timeout(timeout):
            return [], await LOOKS[output.type](output)
    except UnavailableError as error:
        cause, reason = f"the log at {where} is away: {error}", error.reason
    except TimeoutError:
        cause, reason = f"nothing takes kvbus in at {where}: no answer", UNREACHABLE
    return [Finding(cause, f"{at}.{finding_key(output.type, reason)}", DO[reason][1])], ""


def finding_key(kind: str, reason: str) -> str:
    """The key of an output of this type that a reason is about."""
    key = DO[reason][0]
    return key if key == "endpoint" else kind + key


async def _kafka(output: OutputConfig) -> str:
    from kvbus.parts.log.kafka import KafkaLog  # noqa: PLC0415 - an extra
    from kvbus.parts.log.kafka_errors import cause  # noqa: PLC0415 - an extra

    place = place_of(output)
    wrong = await cause(place)
    if wrong is not None:
        raise wrong
    return f"{place.servers} has both topics, and {len(await KafkaLog(place).pointers())} streams in {place.topic}"


async def _nats(output: OutputConfig) -> str:
    from kvbus.parts.log.nats import NatsLog  # noqa: PLC0415 - an extra

    place = place_of(output)
    log = NatsLog(place)
    await (await log.read({})).close()
    return f"{place.servers} has both streams, and {len(await log.pointers())} of kvbus's in {place.keys.stream}"


async def _redis(output: OutputConfig) -> str:
    from kvbus.parts.log.redis import RedisLog  # noqa: PLC0415 - an extra

    place = place_of(output)
    return f"{place.servers} has {len(await RedisLog(place).pointers())} streams under {place.keys.prefix}"


LOOKS: Final = {"kafka": _kafka, "nats": _nats, "redis": _redis}
"""By type: what is there, in a sentence."""
