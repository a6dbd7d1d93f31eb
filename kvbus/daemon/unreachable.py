"""Why there is no connection to an engine: libzmq dials and says nothing, so kvbus dials once by hand and finds out.

It does so some seconds after a connection is missed, and again in growing intervals while it stays away: the reason may
change, from a name that does not resolve to a port where nothing listens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from kvbus.common.tasks import end_tasks
from kvbus.config import SourceStream
from kvbus.core.events import RelayEvent, SourceUnreachable
from kvbus.core.relay import Relay
from kvbus.core.sequencing.phases import SEPARATED
from kvbus.daemon.runtime import RUNTIME, Dial
from kvbus.transport.curve import Curve
from kvbus.transport.zmtp.mechanism import Role

PAUSES: Final = (3.0, 6.0, 12.0, 30.0, 60.0)
"""Seconds without a connection before each look; the last one is repeated."""
SECONDS: Final = 3.0
"""For one dial."""
AT_ONCE: Final = 16
"""Dials under way; further sources wait for the next tick."""


class Observed(Protocol):
    """The state that decides when to look."""

    streams: dict[int, SourceStream]
    relay: Relay


@dataclass(slots=True)
class _Away:
    """A source without a connection: when to look next, and how often that was done."""

    stream: SourceStream
    due: float
    looks: int = 0


class Unreachable:
    """Finds out why sources have no connection.

    Args:
        observed: the sources.
        feed: called with each reason, as an event.
        curve: returns the keys of a source.
        dial: dials an endpoint once.
    """

    def __init__(
        self,
        observed: Observed,
        feed: Callable[[RelayEvent], None],
        curve: Callable[[SourceStream], Curve | None],
        dial: Dial = RUNTIME.dial,
    ) -> None:
        self._observed = observed
        self._feed = feed
        self._curve = curve
        self._dial_once = dial
        self._loop = asyncio.get_running_loop()
        self._away: dict[int, _Away] = {}
        self._dials: dict[int, asyncio.Task[None]] = {}

    def look(self) -> None:
        """Begin to dial for sources that have been away for long enough."""
        now = self._loop.time()
        for slot, stream in self._observed.streams.items():
            source = self._observed.relay.sources[slot]
            if source.spec.numbered or source.sequencer.phase not in SEPARATED:
                self._away.pop(slot, None)
                continue
            away = self._away.get(slot)
            if away is None or away.stream is not stream:
                self._away[slot] = _Away(stream, now + PAUSES[0])
            elif now >= away.due and slot not in self._dials and len(self._dials) < AT_ONCE:
                away.looks += 1
                away.due = now + PAUSES[min(away.looks, len(PAUSES) - 1)]
                self._begin(slot, stream)

    async def close(self) -> None:
        """Stop dialling."""
        await end_tasks(self._dials.values())

    def _begin(self, slot: int, stream: SourceStream) -> None:
        if stream.bind:
            self._feed(SourceUnreachable(slot, f"no engine has dialled in at {stream.endpoint}"))
            return
        task = self._dials[slot] = self._loop.create_task(self._dial(slot, stream))
        task.add_done_callback(lambda _: self._dials.pop(slot, None))

    async def _dial(self, slot: int, stream: SourceStream) -> None:
        async with self._dial_once(stream.endpoint, Role.SUB, seconds=SECONDS, curve=self._curve(stream)) as dialled:
            why = dialled.outcome.no_publisher
        away = self._away.get(slot)
        if away is not None and away.stream is stream:
            self._feed(SourceUnreachable(slot, why))
