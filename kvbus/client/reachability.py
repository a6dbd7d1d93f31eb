"""Why there is no connection: libzmq dials and says nothing, so the client connects once by hand and finds out.

The client reports what it finds once, and again when that changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvbus.client.updates import Reachable, Unreachable
from kvbus.core.types import Refused
from kvbus.transport.reach import MissingConnection, Outcome, Stop, connectable

_SECONDS: Final = 3.0
"""For one look."""

_NO_PUBLISHER: Final = (
    "{} accepts connections, and no publisher answers: another port of it, another program's, or it stands still"
)

_STOPS: Final = {
    Refused.KEY: Stop.KEYS,
    Refused.MECHANISM: Stop.MECHANISM,
    Refused.PROTOCOL: Stop.STRANGER,
}


class Reachability(MissingConnection):
    """Watches one live connection.

    Args:
        bind: whether the publisher is to dial in.
        after: seconds without a connection before the first look.
        report: called with what is to be reported.
    """

    def __init__(self, *, bind: bool, after: float, report: Callable[[Reachable | Unreachable], None]) -> None:
        super().__init__(after, self._look)
        self._bind: Final = bind
        self._report: Final = report
        self._endpoint = ""
        self._why = ""
        self._refused: Refused | None = None

    def missing_at(self, endpoint: str, now: float) -> None:
        """There is no connection to an endpoint from now on."""
        self._endpoint = endpoint
        self._refused = None
        self.missing(now)

    def connected(self) -> None:
        """Take note that the connection stands."""
        super().connected()
        if self._why:
            self._why = ""
            self._report(Reachable(self._endpoint))

    def refused(self, reason: Refused) -> None:
        """A handshake has failed."""
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
        elif self._refused or not first:  # at first, the connection may be on its way
            self._say(_NO_PUBLISHER.format(self._endpoint))

    def _say(self, why: str) -> None:
        if why != self._why:
            self._why = why
            self._report(Unreachable(self._endpoint, why))
