"""Why there is no connection: libzmq dials and says nothing, so the client connects once by hand and finds out.

It does so when a connection has been missing for a while, then again and again with longer pauses. It reports what it
finds once, and again when that changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf
from typing import Final

from kvbus.client.updates import Reachable, Unreachable
from kvbus.core.types import Refused
from kvbus.transport.reach import Outcome, Stop, connectable

_SECONDS: Final = 3.0
"""For one look."""
_LONGEST_PAUSE: Final = 60.0

_NO_PUBLISHER: Final = (
    "{} accepts connections, and no publisher answers: another port of it, another program's, or it stands still"
)

_STOPS: Final = {
    Refused.KEY: Stop.KEYS,
    Refused.MECHANISM: Stop.MECHANISM,
    Refused.PROTOCOL: Stop.STRANGER,
}


class Reachability:
    """Watches one live connection.

    Args:
        bind: whether the publisher is to dial in.
        after: seconds without a connection before the first look.
        report: called with what is to be reported.
    """

    def __init__(self, *, bind: bool, after: float, report: Callable[[Reachable | Unreachable], None]) -> None:
        self._bind: Final = bind
        self._after: Final = after
        self._report: Final = report
        self._endpoint = ""
        self._pause = after
        self._why = ""
        self._refused: Refused | None = None
        self._looking: asyncio.Task[None] | None = None
        self.deadline = inf
        """The time at which to call `look`."""

    def missing(self, endpoint: str, now: float) -> None:
        """There is no connection from now on."""
        self._endpoint = endpoint
        self._pause = self._after
        self._refused = None
        self.deadline = now + self._pause

    def connected(self) -> None:
        """There is one."""
        self.deadline = inf
        if self._looking is not None:
            self._looking.cancel()
        if self._why:
            self._why = ""
            self._report(Reachable(self._endpoint))

    def refused(self, reason: Refused) -> None:
        """A handshake has failed."""
        self._refused = reason

    def look(self, now: float) -> None:
        """Find out what is wrong, if it is time."""
        if now < self.deadline:
            return
        first = self._pause == self._after
        self._pause = min(self._pause * 2, _LONGEST_PAUSE)
        self.deadline = now + self._pause
        if self._bind:
            self._say(f"no publisher has dialled in at {self._endpoint}")
        elif self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._look(first=first))

    async def aclose(self) -> None:
        """Stop looking."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait((self._looking,))

    async def _look(self, *, first: bool) -> None:
        outcome = await connectable(self._endpoint, seconds=_SECONDS)
        if outcome.stop is not Stop.SILENT:
            self._say(outcome.sentence)
        elif self._refused in _STOPS:
            self._say(Outcome(self._endpoint, _STOPS[self._refused]).sentence)
        elif self._refused or not first:  # at first, the connection may be on its way
            self._say(_NO_PUBLISHER.format(self._endpoint))

    def _say(self, why: str) -> None:
        if why != self._why:
            self._why = why
            self._report(Unreachable(self._endpoint, why))
