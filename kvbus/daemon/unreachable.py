"""Find out why there is no connection to an engine. libzmq retries silently, so kvbus dials once by hand.

kvbus also dials the port after the last rank of each connected engine: if the engine has more ranks than configured,
routers know nothing of the blocks of the further ranks. But the port may be another engine's, so this is only a note.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Final, Protocol

from kvbus.config import Config, SourceStream, further_ranks
from kvbus.core.events import FurtherRankFound, RelayEvent, SourceUnreachable
from kvbus.core.findings import engine as catalogue
from kvbus.core.findings.finding import Finding
from kvbus.core.relay import Relay
from kvbus.core.sequencing.phases import SEPARATED
from kvbus.core.types import Reason
from kvbus.core.wire.codec import decode_batch
from kvbus.core.wire.frames import ASKS_REPLAY, FrameLimits, parse_live
from kvbus.daemon.runtime import RUNTIME, Dial
from kvbus.transport.curve import Curve
from kvbus.transport.dialling import ClosedError, Connection
from kvbus.transport.reach import PUBLISHERS, MissingConnection, Outcome, Stop
from kvbus.transport.zmtp.mechanism import Role
from kvbus.transport.zmtp.reasons import ProtocolError

AFTER: Final = 3.0
"""Seconds without a connection before the first dial."""
FURTHER_AFTER: Final = 30.0
"""Seconds after a connection before the first search for a further rank. An engine's ranks start one after another."""
SECONDS: Final = 3.0
"""Timeout of one dial, in seconds. It is also the time to wait for a batch."""
AT_ONCE: Final = 16
"""Maximum number of dials under way; further ones wait."""


class Observed(Protocol):
    """The sources of the bus."""

    config: Config
    streams: dict[int, SourceStream]
    relay: Relay


class Unreachable:
    """A search for the reasons why sources have no connection, and for ranks of their engines that no source names.

    Args:
        observed: the sources.
        feed: called with each finding, as an event.
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
        self._searches: dict[tuple[int, bool], tuple[SourceStream, MissingConnection]] = {}
        """Each stream and its search, by the source's slot and whether the search is for a connected source."""
        self._further: tuple[Config | None, dict[int, SourceStream]] = None, {}

    def look(self) -> None:
        """Start dialling for sources that have been disconnected, or connected, for long enough."""
        now = self._loop.time()
        for (slot, connected), (stream, search) in list(self._searches.items()):
            if self._is(slot, stream, connected):
                search.look(now)
            else:
                search.connected()
                del self._searches[slot, connected]
        for slot, stream in self._observed.streams.items():
            source = self._observed.relay.sources[slot]
            connected = source.sequencer.phase not in SEPARATED
            if (slot, connected) not in self._searches and not source.spec.numbered:
                find = partial(self._find_further if connected else self._find, slot, stream)
                search = MissingConnection(FURTHER_AFTER if connected else AFTER, find)
                search.missing(now)
                self._searches[slot, connected] = stream, search

    def _is(self, slot: int, stream: SourceStream, connected: bool) -> bool:
        """Return whether this stream is still the source in its slot, and is connected or not.

        A source that is read from a log needs no connection.
        """
        source = self._observed.relay.sources[slot]
        here = self._observed.streams.get(slot) is stream
        return here and not source.spec.numbered and (source.sequencer.phase not in SEPARATED) is connected

    async def close(self) -> None:
        """Stop dialling."""
        for _, search in self._searches.values():
            await search.aclose()

    async def _find(self, slot: int, stream: SourceStream, _first: bool) -> None:
        at = self._observed.relay.sources[slot].place.section
        if stream.bind:
            why: Finding | None = catalogue.NO_ENGINE_DIALLED_IN(at=at, endpoint=stream.endpoint)
        else:
            async with self._room:
                live = await self._dialled(stream, stream.endpoint, Role.SUB)
                why = await self._of_both_ports(stream, live, at) or self._of_ranks(stream, live, at)
            why = why or live.no_publisher(at)
        if self._is(slot, stream, False):
            self._feed(SourceUnreachable(slot, why))

    async def _dialled(self, stream: SourceStream, endpoint: str, role: Role) -> Outcome:
        async with self._dial(endpoint, role, seconds=SECONDS, curve=self._curve(stream)) as dialled:
            return dialled.outcome

    async def _of_both_ports(self, stream: SourceStream, live: Outcome, at: str) -> Finding | None:
        """Return a finding about both ports, such as swapped ports; None if there is none."""
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

    async def _find_further(self, slot: int, stream: SourceStream, _first: bool) -> None:
        """Look for the next rank at the port after the last rank's, and go on while it is there."""
        if self._further[0] is not self._observed.config:
            self._further = self._observed.config, further_ranks(self._observed.config)
        further, search = self._further[1].get(stream.source_index), self._searches[slot, True][1]
        found = None
        if further is not None and stream.rank == further.rank - 1:
            try:
                rank = await self._rank_at(stream, further.endpoint)
            except (TimeoutError, ClosedError, ProtocolError):
                return  # a publisher that is silent says nothing new
            if rank == further.rank:
                at = self._observed.relay.sources[slot].place.section
                found = catalogue.MORE_RANKS_PERHAPS(at=at, endpoint=further.endpoint, rank=rank)
        if found is None:
            search.deadline = inf
        if self._is(slot, stream, True):
            self._feed(FurtherRankFound(slot, found))

    async def _rank_at(self, stream: SourceStream, endpoint: str) -> int | None:
        """Return the rank that a publisher at the endpoint sends; None without a publisher or without a rank."""
        dialling = self._dial(endpoint, Role.SUB, seconds=SECONDS, curve=self._curve(stream))
        async with self._room, dialling as dialled:
            if dialled.connection is None or dialled.outcome.socket_type not in PUBLISHERS:
                return None
            async with asyncio.timeout(SECONDS):
                return await _rank(dialled.connection)


async def _rank(connection: Connection) -> int | None:
    """Return the rank in the next batch of a publisher; None if the batch has none."""
    await connection.send(b"\x01" + ASKS_REPLAY)  # a publisher of kvbus sends such a subscriber no state
    await connection.send(b"\x01")
    message = parse_live(await connection.receive(), FrameLimits())
    batch = message if isinstance(message, Reason) else decode_batch(message.payload)
    return None if isinstance(batch, Reason) else batch.rank
