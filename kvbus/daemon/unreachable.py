"""Find out why there is no connection to an engine. libzmq retries silently, so kvbus dials once by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from kvbus.config import SourceStream
from kvbus.core.events import RelayEvent, SourceUnreachable
from kvbus.core.findings import engine as catalogue
from kvbus.core.findings.finding import Finding
from kvbus.core.relay import Relay
from kvbus.core.sequencing.phases import SEPARATED
from kvbus.daemon.runtime import RUNTIME, Dial
from kvbus.transport.curve import Curve
from kvbus.transport.reach import PUBLISHERS, MissingConnection, Outcome, Stop
from kvbus.transport.zmtp.mechanism import Role

AFTER: Final = 3.0
"""Seconds without a connection before the first dial."""
SECONDS: Final = 3.0
"""Timeout of one dial, in seconds."""
AT_ONCE: Final = 16
"""Maximum number of dials under way; further ones wait."""


class Observed(Protocol):
    """The sources of the bus."""

    streams: dict[int, SourceStream]
    relay: Relay


class Unreachable:
    """A search for the reasons why sources have no connection.

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
        self._dial = dial
        self._loop = asyncio.get_running_loop()
        self._room = asyncio.Semaphore(AT_ONCE)
        self._away: dict[int, tuple[SourceStream, MissingConnection]] = {}

    def look(self) -> None:
        """Start dialling for sources that have been disconnected for long enough."""
        now = self._loop.time()
        for slot, (stream, missing) in list(self._away.items()):
            if self._is_away(slot, stream):
                missing.look(now)
            else:
                missing.connected()
                del self._away[slot]
        for slot, stream in self._observed.streams.items():
            if slot not in self._away and self._is_away(slot, stream):
                missing = MissingConnection(AFTER, partial(self._find, slot, stream))
                missing.missing(now)
                self._away[slot] = stream, missing

    def _is_away(self, slot: int, stream: SourceStream) -> bool:
        """Return whether this stream is still the source in its slot, and has no connection.

        A source that is read from a log needs no connection.
        """
        source = self._observed.relay.sources[slot]
        here = self._observed.streams.get(slot) is stream
        return here and not source.spec.numbered and source.sequencer.phase in SEPARATED

    async def close(self) -> None:
        """Stop dialling."""
        for _, missing in self._away.values():
            await missing.aclose()

    async def _find(self, slot: int, stream: SourceStream, _first: bool) -> None:
        at = self._observed.relay.sources[slot].place.section
        if stream.bind:
            why: Finding | None = catalogue.NO_ENGINE_DIALLED_IN(at=at, endpoint=stream.endpoint)
        else:
            async with self._room:
                live = await self._dialled(stream, stream.endpoint, Role.SUB)
                why = await self._of_both_ports(stream, live, at) or self._of_ranks(stream, live, at)
            why = why or live.no_publisher(at)
        if self._is_away(slot, stream):
            self._feed(SourceUnreachable(slot, why))

    async def _dialled(self, stream: SourceStream, endpoint: str, role: Role) -> Outcome:
        async with self._dial(endpoint, role, seconds=SECONDS, curve=self._curve(stream)) as dialled:
            return dialled.outcome

    async def _of_both_ports(self, stream: SourceStream, live: Outcome, at: str) -> Finding | None:
        """Return a finding that only both ports together show, such as swapped ports; None if there is none."""
        is_replay = live.socket_type == "ROUTER"
        if stream.replay_endpoint is None or not (is_replay or live.stop is Stop.REFUSED):
            return None
        replay = await self._dialled(stream, stream.replay_endpoint, Role.DEALER)
        if is_replay and replay.socket_type in PUBLISHERS:
            return catalogue.SWAPPED_PORTS(at=at, endpoint=stream.endpoint, replay=stream.replay_endpoint)
        if not is_replay and replay.socket_type == "ROUTER":
            port = stream.endpoint.rpartition(":")[2]
            return catalogue.BOTH_DIAL(at=at, endpoint=stream.endpoint, port=port)
        return None

    def _of_ranks(self, stream: SourceStream, live: Outcome, at: str) -> Finding | None:
        """Return a finding if only some ranks of an engine are connected; None otherwise."""
        sources = self._observed.relay.sources
        ranks = [each for each in self._observed.streams.values() if each.source_index == stream.source_index]
        there = sum(sources[each.index].sequencer.phase not in SEPARATED for each in ranks)
        if live.stop is not Stop.REFUSED or not there:
            return None
        facts = {"ranks": stream.rank, "size": len(ranks), "endpoint": stream.endpoint, "there": there}
        return catalogue.RANKS_MISSING(at=at, **facts)
