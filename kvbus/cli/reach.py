"""Why nothing comes from the endpoint that a command reads: silence has to have a reason."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

from kvbus.cli.until import say
from kvbus.common.errors import ExitCode, KvbusError
from kvbus.transport.dialling import dial
from kvbus.transport.zmtp.mechanism import Role

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from kvbus.transport.curve import Curve

LOOK_AFTER_S: Final = 1.0
"""Seconds of silence before the first look, and between two."""

DIAL_S: Final = 1.0
"""Seconds that a look may take."""


class UnreachableError(KvbusError):
    """Nobody publishes at an endpoint."""

    exit_code = ExitCode.UNAVAILABLE


async def obstacle(endpoint: str, curve: Curve | None) -> str:
    """Return why nobody publishes at an endpoint; empty if somebody does."""
    async with dial(endpoint, Role.SUB, seconds=DIAL_S, curve=curve) as dialled:
        found = dialled.outcome.no_publisher()
        return "" if found is None else found.text


@contextlib.asynccontextmanager
async def explained(endpoint: str, curve: Curve | None, heard: Callable[[], bool]) -> AsyncIterator[None]:
    """Say why nothing is heard, meanwhile and at the end.

    Args:
        endpoint: what the command connects to.
        curve: its keys.
        heard: whether anything has come.

    Raises:
        UnreachableError: nothing has come, and nobody publishes there.
    """

    async def look() -> None:
        last = ""
        while not heard():
            await asyncio.sleep(LOOK_AFTER_S)
            found = "" if heard() else await obstacle(endpoint, curve)
            if found and found != last:
                say(f"still trying: {found}")
            last = found

    looking = asyncio.ensure_future(look())
    try:
        yield
    finally:
        looking.cancel()
    if not heard() and (found := await obstacle(endpoint, curve)):
        raise UnreachableError(found)
