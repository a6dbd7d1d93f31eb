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
"""Seconds without a message after which `explained` checks the endpoint, and seconds between two checks."""

DIAL_S: Final = 1.0
"""Maximum duration of one check of the endpoint, in seconds."""


class UnreachableError(KvbusError):
    """There is no publisher at the endpoint that a command reads."""

    exit_code = ExitCode.UNAVAILABLE


async def obstacle(endpoint: str, curve: Curve | None) -> str:
    """Dial an endpoint, and return the reason why no publisher is there.

    Return an empty string if a publisher is there.
    """
    async with dial(endpoint, Role.SUB, seconds=DIAL_S, curve=curve) as dialled:
        found = dialled.outcome.no_publisher()
        return "" if found is None else found.text


@contextlib.asynccontextmanager
async def explained(endpoint: str, curve: Curve | None, heard: Callable[[], bool]) -> AsyncIterator[None]:
    """Check the endpoint while the block runs, and print on standard error why no message comes from it.

    A reason is printed once, until another reason replaces it. The checks end with the first message.

    Args:
        endpoint: the endpoint that the command connects to.
        curve: the CURVE keys; None without CURVE.
        heard: returns whether a message has come.

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
