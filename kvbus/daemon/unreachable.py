"""Find out why a source has no connection.

A live stream repeats a failed connection without an error message, so kvbus connects once more to find the reason.

If a source is connected, kvbus also connects to the port after the engine's last configured rank. If a publisher there
sends batches of the next rank, the engine may have more ranks than configured. Then routers get no events of the
further ranks. But the publisher may belong to another engine, so the finding is only a note.
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
"""Seconds for which a source must be disconnected before kvbus dials its engine to find out why."""
FURTHER_AFTER: Final = 30.0
"""Seconds for which a source must be connected before kvbus searches for a further rank.

The delay is long because the ranks of an engine start one after another.
"""
SECONDS: Final = 3.0
"""Maximum seconds for one connection attempt. It is also the maximum time to wait for a batch."""
AT_ONCE: Final = 16
"""Maximum number of simultaneous connection attempts. Further attempts wait."""


class BusState(Protocol):
    """The attributes of the daemon that :class:`Unreachable` reads: its configuration, its sources and its relay."""

    config: Config
    streams: dict[int, SourceStream]
    relay: Relay


class Unreachable:
    """A search for the reason why a source has no connection, and for unconfigured ranks of connected engines.

    Args:
        observed: the daemon with the sources.
        feed: called with an event for each finding.
        curve: returns the CURVE keys of a source.
        dial: connects to an endpoint once.
    """

    def __init__(
        self,
        observed: BusState,
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
        """The running searches for the reason of a missing connection, or for further ranks of a connected engine.

        The key is the source's slot, and whether the source was connected when the search began. The value is the
        stream that had this slot at that time, and the search.
        """
        self._further: tuple[Config | None, dict[int, SourceStream]] = None, {}

    def look(self) -> None:
        """Search for the reasons why sources have no connection, and for unconfigured ranks of connected engines.

        Start the searches that are due. End a search if its source has connected or disconnected since it began.
        """
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
        """Return whether a search is still needed: the slot has the same stream, and the connection has not changed.

        A source that is read from a log needs no search, because it needs no connection.

        Args:
            slot: the slot of the source.
            stream: the stream for which the search began.
            connected: whether the source was connected when the search began.
        """
        source = self._observed.relay.sources[slot]
        here = self._observed.streams.get(slot) is stream
        return here and not source.spec.numbered and (source.sequencer.phase not in SEPARATED) is connected

    async def close(self) -> None:
        """Abort all searches, both for the reason of a missing connection and for unconfigured ranks."""
        for _, search in self._searches.values():
            await search.aclose()

    async def _find(self, slot: int, stream: SourceStream, _first: bool) -> None:
        at = self._observed.relay.sources[slot].location.section
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
        """Return a finding about the event port and the replay port, such as swapped ports; None if there is none.

        Args:
            stream: the disconnected stream.
            live: the outcome of dialling the event port.
            at: the section of the configuration.
        """
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
        """Return a finding if only some ranks of the engine are connected; None otherwise."""
        sources = self._observed.relay.sources
        ranks = [each for each in self._observed.streams.values() if each.source_index == stream.source_index]
        connected = sum(sources[each.index].sequencer.phase not in SEPARATED for each in ranks)
        if live.stop is not Stop.REFUSED or not connected:
            return None
        facts = {"ranks": stream.rank, "size": len(ranks), "endpoint": stream.endpoint, "there": connected}
        return catalogue.RANKS_MISSING(at=at, **facts)

    async def _find_further(self, slot: int, stream: SourceStream, _first: bool) -> None:
        """Look for an unconfigured rank at the port after that of the engine's last configured rank.

        If a rank is found there, repeat the search later, because the finding must end when the rank is gone.
        """
        if self._further[0] is not self._observed.config:
            self._further = self._observed.config, further_ranks(self._observed.config)
        further, search = self._further[1].get(stream.source_index), self._searches[slot, True][1]
        found = None
        if further is not None and stream.rank == further.rank - 1:
            try:
                rank = await self._rank_at(stream, further.endpoint)
            except (TimeoutError, ClosedError, ProtocolError):
                return  # no batch has arrived, so the rank is unknown
            if rank == further.rank:
                at = self._observed.relay.sources[slot].location.section
                found = catalogue.MORE_RANKS_PERHAPS(at=at, endpoint=further.endpoint, rank=rank)
        if found is None:
            search.deadline = inf
        if self._is(slot, stream, True):
            self._feed(FurtherRankFound(slot, found))

    async def _rank_at(self, stream: SourceStream, endpoint: str) -> int | None:
        """Return the rank in the next batch of the publisher at an endpoint.

        Return None if no publisher answers there, or if the batch has no rank.
        """
        dialling = self._dial(endpoint, Role.SUB, seconds=SECONDS, curve=self._curve(stream))
        async with self._room, dialling as dialled:
            if dialled.connection is None or dialled.outcome.socket_type not in PUBLISHERS:
                return None
            async with asyncio.timeout(SECONDS):
                return await _rank(dialled.connection)


async def _rank(connection: Connection) -> int | None:
    """Return the rank in the next batch of a publisher; None if the batch has no rank."""
    # This subscription announces a reader that requests replays. If the publisher is a kvbus, it then sends no state.
    await connection.send(b"\x01" + ASKS_REPLAY)
    await connection.send(b"\x01")
    message = parse_live(await connection.receive(), FrameLimits())
    batch = message if isinstance(message, Reason) else decode_batch(message.payload)
    return None if isinstance(batch, Reason) else batch.rank
