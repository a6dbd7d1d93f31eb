"""Find out why a subscriber has no connection.

libzmq retries a failed connection and does not report the error. So kvbus opens one connection with its own code, to
see the error. The subscriber reports the reason once, and again if it changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvbus.client.updates import Reachable, Unreachable
from kvbus.core.types import Refused
from kvbus.transport.reach import MissingConnection, Outcome, Stop, connectable

_SECONDS: Final = 3.0
"""Maximum seconds for one connection attempt."""

_NO_PUBLISHER: Final = (
    "{} accepts connections, but no publisher answers: it is another port or program, or the engine hangs"
)

_STOPS: Final = {
    Refused.KEY: Stop.KEYS,
    Refused.MECHANISM: Stop.MECHANISM,
    Refused.PROTOCOL: Stop.STRANGER,
}


class Reachability(MissingConnection):
    """A watch of one live connection that reports why the connection is missing.

    Args:
        bind: whether the subscriber binds its endpoint, and the publisher connects to it.
        after: seconds without a connection before the first attempt to find the reason.
        report: called with an update when the reason is found or changes, and when the connection is back.
    """

    def __init__(self, *, bind: bool, after: float, report: Callable[[Reachable | Unreachable], None]) -> None:
        super().__init__(after, self._look)
        self._bind: Final = bind
        self._report: Final = report
        self._endpoint = ""
        self._why = ""
        self._refused: Refused | None = None

    def missing_at(self, endpoint: str, now: float) -> None:
        """Record that the connection to an endpoint has been missing since ``now``."""
        self._endpoint = endpoint
        self._refused = None
        self.missing(now)

    def connected(self) -> None:
        """Record that the connection is up. If it was reported as missing, report that it is back."""
        super().connected()
        if self._why:
            self._why = ""
            self._report(Reachable(self._endpoint))

    def refused(self, reason: Refused) -> None:
        """Record the reason of a failed handshake."""
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
        elif self._refused or not first:  # at the first attempt, report nothing, because libzmq may still be connecting
            self._say(_NO_PUBLISHER.format(self._endpoint))

    def _say(self, why: str) -> None:
        if why != self._why:
            self._why = why
            self._report(Unreachable(self._endpoint, why))
