"""One connection by hand, as far as TCP goes: the name, the route, the port. What the peer speaks is not looked at."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from dataclasses import replace

from kvbus.transport.reach.names import Address, Found, find, shown
from kvbus.transport.reach.outcome import Outcome, Stop


class Attempt:
    """A connection under way.

    Attributes:
        outcome: what it comes to if nothing more is heard; once connected, that the peer is silent.
        address: what was connected to.
    """

    def __init__(self, endpoint: str, seconds: float) -> None:
        self.outcome = Outcome(endpoint, Stop.NAME, f"no name server answers within {seconds:g} s")
        self.address: Address | None = None
        self._seconds = seconds

    async def run(self) -> socket.socket | None:
        """Connect; None if that is not possible."""
        endpoint = self.outcome.endpoint
        try:
            found = await find(endpoint)
        except OSError as error:
            self.outcome = Outcome(endpoint, Stop.NAME, (error.strerror or str(error)).lower())
            return None
        self.outcome = Outcome(endpoint, Stop.DROPPED, f"within {self._seconds:g} s", found.names)
        connected = await _connect(found)
        if isinstance(connected, tuple):
            stop, detail = connected
            self.outcome = replace(self.outcome, stop=stop, detail=detail)
            return None
        self.outcome = Outcome(endpoint, Stop.SILENT, "", found.names)
        self.address = found.first
        return connected


async def connectable(endpoint: str, *, seconds: float) -> Outcome:
    """Connect once within this time, and close; `Stop.SILENT` says that it was possible."""
    attempt = Attempt(endpoint, seconds)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            connected = await attempt.run()
            if connected is not None:
                connected.close()
    return attempt.outcome


async def _connect(found: Found) -> socket.socket | tuple[Stop, str]:
    first = await _try(found.first)
    if isinstance(first, socket.socket) or not found.others:
        return first
    tries = await asyncio.gather(*map(_try, found.others))
    answers = [shown(each) for each, one in zip(found.others, tries, strict=True) if isinstance(one, socket.socket)]
    for one in tries:
        if isinstance(one, socket.socket):
            one.close()
    if answers:
        return Stop.OTHER_ADDRESS, f"{shown(found.first)}; {answers[0]} accepts"
    return first


async def _try(address: Address) -> socket.socket | tuple[Stop, str]:
    try:
        connecting = socket.socket(address[0], socket.SOCK_STREAM)
    except OSError as error:
        return Stop.NO_ROUTE, error.strerror or str(error)
    connecting.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(connecting, address[1])
    except OSError as error:
        connecting.close()
        # uvloop names no error number for some
        reason = os.strerror(error.errno) if error.errno else str(error)
        if error.errno in {errno.ECONNREFUSED, errno.ENOENT}:
            return Stop.REFUSED, reason.lower()
        return (Stop.DROPPED if error.errno == errno.ETIMEDOUT else Stop.NO_ROUTE), reason.lower()
    except BaseException:
        connecting.close()
        raise
    if address[0] != socket.AF_UNIX and connecting.getsockname()[:2] == connecting.getpeername()[:2]:
        connecting.close()  # TCP may connect a port of its own to itself where nobody listens
        return Stop.REFUSED, "connection refused"
    return connecting
