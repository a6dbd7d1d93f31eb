"""Checks that explain to the user of a command why no messages come from the endpoint that the command reads."""

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
"""Number of seconds without a message after which `explained` checks the endpoint.

It is also the time between two checks.
"""

DIAL_S: Final = 1.0
"""Maximum seconds for one connection to the endpoint, which checks whether a publisher is there."""


class UnreachableError(KvbusError):
    """No publisher is at the endpoint that a command was to read."""

    exit_code = ExitCode.UNAVAILABLE


async def obstacle(endpoint: str, curve: Curve | None) -> str:
    """Connect to an endpoint once, and return the reason why no publisher is there; empty if a publisher is there."""
    async with dial(endpoint, Role.SUB, seconds=DIAL_S, curve=curve) as dialled:
        found = dialled.outcome.no_publisher()
        return "" if found is None else found.text


@contextlib.asynccontextmanager
async def explained(endpoint: str, curve: Curve | None, heard: Callable[[], bool]) -> AsyncIterator[None]:
    """While the block waits for messages, print on standard error why no message comes from the endpoint.

    The endpoint is checked again and again until the first message has come. A reason is printed only if it differs
    from the reason that was printed last.

    Args:
        endpoint: the endpoint that the command connects to.
        curve: the CURVE keys; None without CURVE.
        heard: function that returns whether a message has come.

    Raises:
        UnreachableError: at the end of the block no message has come, and no publisher is at the endpoint.
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
