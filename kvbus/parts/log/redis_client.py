"""Connect to Redis or Valkey, explain why a server refuses kvbus, and compose the key names of a stream."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Final

from redis import exceptions
from redis.asyncio import ConnectionPool, Redis, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from kvbus.common.tasks import close_within
from kvbus.parts.log.contract import FOREIGN_KEY, UNREACHABLE, WRONG_TYPE, Refused, UnavailableError
from kvbus.parts.log.location import REQUEST, RedisLocation, probed, reason_of
from kvbus.transport.tls_files import TlsFileError

SENTINEL: Final = 2.0
"""Timeout in seconds of a request to one Sentinel."""

STOP: Final = 2.0
"""Maximum time in seconds to wait until a connection is closed."""

MOST_KEYS: Final = 500
"""Number of keys that the server examines for each SCAN command. It limits the time in which the server is blocked."""

DENIED: Final = ("denied", "no ACL allows this")
IN_SCRIPT: Final = "The user executing the script can't"
"""Text in the error of a Lua script whose user lacks a permission (ACL).

kvbus recognizes the error by this text, because the error has no code.
"""

CODES: Final = {
    "OOM": ("memory_full", "the server's memory is full"),
    "READONLY": ("read_only", "the server is a replica"),
    "MISCONF": ("not_saved", "the server cannot save its data, and accepts no writes"),
    "MOVED": ("slot_elsewhere", "the server is one of a cluster, and another server has this stream"),
    "WRONGTYPE": (WRONG_TYPE, "a key of the stream holds another type of value: delete that key"),
    "NOREPLICAS": ("too_few_replicas", "fewer replicas are connected than min-replicas-to-write requires"),
    "NOPERM": DENIED,
    "NOAUTH": ("authentication_failed", "the server requires a password"),
    "WRONGPASS": ("authentication_failed", "authentication failed: no such user, or its password"),
}
"""By the code of a server's error: the reason for kvbus's counters, and a sentence for the operator."""


class _Tls(SSLConnection):
    """A TLS connection that uses the TLS context of kvbus. redis-py's own context would also trust the system's CAs."""

    def __init__(self, *, context: ssl.SSLContext, **options: Any) -> None:
        super().__init__(**options)
        self.ssl_context.context = context


async def connected(location: RedisLocation) -> Redis:
    """Return a client of the primary, with a single connection.

    The TLS and password files are read again for it. If Sentinels name the primary, the client stays connected to the
    server that they name now, even if another server becomes the primary later.

    Raises:
        TlsFileError: a file cannot be used.
        UnavailableError, RedisError, OSError, TimeoutError: no Sentinel names the primary.
    """
    if location.keys.sentinel is None:
        ((host, port),) = location.addresses
    else:
        host, port = await _primary(location, location.keys.sentinel)
    return _client(location, host, port, location.keys.database)


def _client(location: RedisLocation, host: str, port: int, database: int) -> Redis:
    context = location.tls()
    options: dict[str, Any] = {} if context is None else {"connection_class": _Tls, "context": context}
    return Redis.from_pool(
        ConnectionPool(
            host=host,
            port=port,
            db=database,
            username=location.keys.username,
            password=location.password(),
            protocol=2,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=None,
            socket_connect_timeout=REQUEST,
            max_connections=1,
            **options,
        )
    )


async def _primary(location: RedisLocation, name: str) -> tuple[str, int]:
    """Return the address of the primary, from the first Sentinel that knows it.

    ``name`` is the name under which the Sentinels know the primary.
    """
    unknown: Exception | None = None
    wrong: Exception | None = None
    for host, port in location.addresses:
        client = _client(location, host, port, 0)
        try:
            async with asyncio.timeout(SENTINEL):
                found: Any = await client.sentinel_get_master_addr_by_name(name)
            if found is not None:
                return found[0].decode(), found[1]
            unknown = UnavailableError(f"no Sentinel knows a primary {name}", "primary_unknown")
        except (exceptions.RedisError, OSError, TimeoutError) as error:
            wrong = error
        finally:
            await stop(client)
    raise unknown or wrong or AssertionError("there is a server")


async def stop(client: Redis) -> None:
    """Close a client's connection. Errors are ignored, because the connection is not needed any more."""
    await close_within(client.aclose(), STOP)


def _named(error: BaseException) -> UnavailableError:
    """Return an UnavailableError for an error of redis-py, with a reason if the error is known."""
    return reason_of(error, "redis", _known) or UnavailableError(f"{type(error).__name__}: {error}")


def _known(error: BaseException) -> tuple[str, str] | None:
    if not isinstance(error, exceptions.RedisError):
        return None
    code = getattr(error, "status_code", None) or str(error).partition(" ")[0]
    return DENIED if IN_SCRIPT in str(error) else CODES.get(code)


@contextlib.asynccontextmanager
async def translated_errors(location: RedisLocation, seconds: float = REQUEST) -> AsyncIterator[None]:
    """Run the body of an ``async with`` statement for up to ``seconds``, and convert errors of redis-py.

    Each error becomes the UnavailableError of kvbus's logs.

    Raises:
        UnavailableError: the server refuses a request, has failed, or has not answered within ``seconds``; or a TLS or
            password file cannot be used.
    """
    try:
        async with asyncio.timeout(seconds):
            yield
    except (exceptions.RedisError, TlsFileError, OSError, TimeoutError) as error:
        found = _named(error)
        if found.reason == UNREACHABLE:
            found = await probed(location, "redis") or found
        raise found from error


def is_of_wrong_type(answer: object) -> bool:
    """Return whether the server refused a command because the key holds a value of the wrong type."""
    return isinstance(answer, exceptions.ResponseError) and str(answer).startswith("WRONGTYPE")


def names(location: RedisLocation, key: str) -> list[str]:
    """Return the names of the two keys of a stream: the Redis stream with its records, and the hash with its pointer.

    The braces in the names make a Redis cluster keep the two keys on one server.
    """
    records = f"{location.keys.prefix}:{{{key}}}"
    return [records, f"{records}:pointer"]


async def seen(location: RedisLocation, client: Redis, refused: Refused) -> AsyncGenerator[list[str], None]:
    """Scan the database, and yield the keys of kvbus's streams that have a pointer, in groups.

    The same key may be yielded twice.

    Args:
        location: the prefix of the key names.
        client: the connection.
        refused: a list to which the names are added that are not the key of a stream.
    """
    before, behind = names(location, "*")[1].split("*")
    cursor: int | None = None
    while cursor != 0:
        async with translated_errors(location):
            scanned: Any = await client.scan(cursor or 0, f"{before}*{behind}", MOST_KEYS, "hash")
        cursor, found = scanned
        keys = [name.decode(errors="backslashreplace").removeprefix(before).removesuffix(behind) for name in found]
        refused.extend((FOREIGN_KEY, key) for key in keys if not key.isascii() or "\\" in key)
        yield [key for key in keys if key.isascii() and "\\" not in key]
