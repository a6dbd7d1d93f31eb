"""Whether anything listens at the endpoint that a command reads from: silence has to have a reason."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from typing import TYPE_CHECKING, Final

from kvbus.cli.until import say
from kvbus.errors import BindError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

LOOK_AFTER_S: Final = 1.0
"""Seconds of silence before the first look, and between two."""

CONNECT_S: Final = 1.0
"""Seconds that a connection may take. A firewall that drops packets makes it take for ever."""


async def obstacle(endpoint: str) -> str | None:
    """Return why nobody can be reached at an endpoint; None if a connection is accepted there.

    The connection is closed at once, which ZeroMQ does not mind.
    """
    scheme, _, address = endpoint.partition("://")
    try:
        async with asyncio.timeout(CONNECT_S):
            if scheme == "ipc":
                _, writer = await asyncio.open_unix_connection(address)
            else:
                host, _, port = address.rpartition(":")
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except TimeoutError:
        return f"no answer within {CONNECT_S:g} s (a firewall that drops?)"
    except socket.gaierror as error:
        return f"the name does not resolve: {error.strerror}"
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)
    writer.close()
    return None


async def _look(endpoint: str, heard: Callable[[], bool]) -> None:
    """Look from time to time whether anybody is there, while nothing is heard; say each obstacle once."""
    last = None
    while not heard():
        await asyncio.sleep(LOOK_AFTER_S)
        found = None if heard() else await obstacle(endpoint)
        if found is not None and found != last:
            say(f"still trying {endpoint}: {found}")
        last = found


@contextlib.asynccontextmanager
async def explained(endpoint: str, heard: Callable[[], bool]) -> AsyncIterator[None]:
    """Say why nothing is heard, meanwhile and at the end.

    Args:
        endpoint: what the command connects to.
        heard: whether anything has come.

    Raises:
        BindError: nothing has come, and nobody can be reached.
    """
    looking = asyncio.ensure_future(_look(endpoint, heard))
    try:
        yield
    finally:
        looking.cancel()
    if not heard() and (found := await obstacle(endpoint)) is not None:
        raise BindError(endpoint, found, verb="connect to")
