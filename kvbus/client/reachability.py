"""Find out why there is no connection. libzmq retries silently, so the client connects once by hand to see the error.

The client reports the reason once, and again when it changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvbus.client.updates import Reachable, Unreachable
from kvbus.core.types import Refused
from kvbus.transport.reach import MissingConnection, Outcome, Stop, connectable

_SECONDS: Final = 3.0
"""Timeout of one connection attempt, in seconds."""

_NO_PUBLISHER: Final = (
    "{} accepts connections, and no publisher answers: another port of it, another program's, or it stands still"
)

_STOPS: Final = {
    Refused.KEY: Stop.KEYS,
    Refused.MECHANISM: Stop.MECHANISM,
    Refused.PROTOCOL: Stop.STRANGER,
}


class Reachability(MissingConnection):
    """A watch of one live connection, which reports why the connection is missing.

    Args:
        bind: whether the publisher connects to the subscriber.
        after: seconds without a connection before the first attempt to find the reason.
        report: called with each report.
    """

    def __init__(self, *, bind: bool, after: float, report: Callable[[Reachable | Unreachable], None]) -> None:
        super().__init__(after, self._look)
        self._bind: Final = bind
        self._report: Final = report
        self._endpoint = ""
        self._why = ""
        self._refused: Refused | None = None

    def missing_at(self, endpoint: str, now: float) -> None:
        """Record that the connection to an endpoint is missing since ``now``."""
        self._endpoint = endpoint
        self._refused = None
        self.missing(now)

    def connected(self) -> None:
        """Record that there is a connection, and report it if the endpoint was reported as unreachable."""
        super().connected()
        if self._why:
            self._why = ""
            self._report(Reachable(self._endpoint))

    def refused(self, reason: Refused) -> None:
        """Record why a handshake has failed."""
        self._refused = reason

    async def _look(self, first: bool) -> None:
        if self._bind:
            self._say(f"no publisher has dialled in at {self._endpoint}")
            return
        outcome = await connectable(self._endpoint, seconds=_SECONDS)
        if outcome.stop is not Stop.SILENT:
            self._say(outcome.sentence)
        elif self._refused in _STOPS:
            self._say(Outcome(self._endpoint, _STOPS[self._refused]).sentence)
        elif self._refused or not first:  # the first time, the connection may still be under way
            self._say(_NO_PUBLISHER.format(self._endpoint))

    def _say(self, why: str) -> None:
        if why != self._why:
            self._why = why
            self._report(Unreachable(self._endpoint, why))
