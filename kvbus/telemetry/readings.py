"""Readings of a running bus: the current values of its sources, outputs, routers and live blocks.

The HTTP port shows the readings at ``/metrics``, ``/sources``, ``/routers`` and ``/blocks``. Every reading holds the
values of one moment, and later events do not change it. The sources are read one by one, so that kvbus can handle
batches between two readings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, Protocol

import msgspec
from msgspec import structs

from kvbus.core.blocks.announce import group_of, out_parent, runs
from kvbus.core.blocks.chunk import Chunk
from kvbus.core.blocks.index import Index
from kvbus.core.findings import bus as catalogue
from kvbus.core.findings.finding import Finding
from kvbus.core.findings.source import shown
from kvbus.core.outputs.output import Output
from kvbus.core.relay import Relay
from kvbus.core.sequencing.phases import State
from kvbus.core.source import RECENT_S, Source
from kvbus.core.stats import OutputStats, RouterView, SourceStats
from kvbus.core.types import HASH_FORMS, Hash
from kvbus.core.wire.frames import ASKS_REPLAY

MAX_BEHIND_S: Final = 5.0
"""Number of seconds after which ``/routers`` reports a router as too slow.

It is compared with the age of the oldest batch that the router lacks.
"""


class DiscoveryStats:
    """The counters of one discovery entry of the configuration.

    Args:
        name: name of the entry.
        left_out: number of engines that the discovery lists but that are not sources at the moment, by reason. It has a
            key for every possible reason, even if the number is 0.
    """

    def __init__(self, name: str, left_out: dict[str, int]) -> None:
        self.name = name
        self.engines = 0
        """Number of engines that the discovery lists now."""
        self.left_out = left_out
        self.changes: Counter[str] = Counter()
        """Number of changes of the sources, by kind: joined, left, moved to another address, or refused by kvbus."""
        self.records: Counter[str] = Counter()
        """If the discovery reads a log: number of records that were read but not passed to the relay, by reason."""
        self.lag = 0.0
        """If the discovery reads a log: seconds since the log was last read to its end. Otherwise 0."""
        self.failures = 0
        """Number of failed requests for the list of engines, for example to the Kubernetes API.

        After a failure kvbus keeps the engines that it found before.
        """
        self.failing = ""
        """Why the newest request for the list of engines failed; empty if it succeeded."""


class Driver(Protocol):
    """The driver of an output: the object that sends the output's batches and knows the connected routers."""

    @property
    def routers(self) -> list[RouterView]:
        """The connected routers, and the most recently disconnected routers."""

    @property
    def queue_max(self) -> int:
        """Number of batches that wait for the router with the longest queue."""

    @property
    def behind_seconds(self) -> float:
        """Age of the oldest batch that some router lacks, in seconds."""


class SourceReading(msgspec.Struct, frozen=True):
    """The reading of one source: its state, counters, queue and index at one moment.

    Attributes:
        pending: number of missing batches that are neither recovered nor lost yet.
        queue_depth: number of batches in the reorder buffer.
        unverified: number of live batches that wait until a replay shows to which epoch they belong.
        index_entries: number of blocks in the index. It includes blocks that kvbus does not announce to routers: tail
            blocks, and coarse blocks, whose tokens are also announced in smaller blocks.
        index_bytes: estimated memory of these blocks.
        groups: number of KV-cache groups for which the engine has stored blocks in this epoch.
        owners: number of pairs of locality and owner for which the engine has stored blocks in this epoch.
        blocks: number of live blocks by medium, as announced to routers; zero if the source is expired.
        examples: description of the first batch, event or block that kvbus refused or left out, by reason.
    """

    name: str
    rank: int
    state: State
    partial: bool
    partial_since: float | None
    epoch: int
    last_seq: int
    dialect: str | None
    unknown: list[str]
    block_size: int | None
    pending: int
    queue_depth: int
    queue_limit: int
    queue_bytes: int
    queue_bytes_limit: int
    unverified: int
    index_entries: int
    index_limit: int
    index_bytes: int
    index_bytes_limit: int
    groups: int
    groups_limit: int
    owners: int
    owners_limit: int
    blocks: dict[str, int]
    examples: dict[str, str]
    stats: SourceStats


class OutputReading(msgspec.Struct, frozen=True):
    """The reading of one output at one moment.

    It has the newest seqs of the streams, the size of their journals (the batches that are kept for replays), and the
    counters of the driver.

    Attributes:
        sequences: newest seq of each open stream, by the stream's slot; -1 if the stream has no batch.
        views: number of views. A view is a separate stream for the routers whose keys have the same limited rights.
        withheld: number of stores that the views leave out, by reason.
        queue_max: number of batches that wait for the router with the longest queue.
        behind_seconds: age in seconds of the oldest batch that some router lacks.
        named: readings of the routers whose keys have a name, by this name.
        stats: the driver's counters, and two counters of the relay: malformed replay requests, and events that were
            dropped because they are of another KV-cache group than the output's.
    """

    name: str
    heartbeats: int
    sequences: dict[int, int]
    journal_batches: int
    journal_bytes: int
    journal_batches_limit: int
    journal_bytes_limit: int
    outgrown: int
    views: int
    withheld: Counter[str]
    queue_max: int
    behind_seconds: float
    named: dict[str, NamedRouter]
    stats: OutputStats


class NamedRouter(msgspec.Struct):
    """The reading of a router whose key has a name, over all its connections.

    Attributes:
        queued: number of batches that wait for the router.
        behind: age of the oldest batch that the router lacks, in seconds.
        dropped: number of batches that kvbus dropped for this router, because it reads too slowly.
    """

    queued: int = 0
    behind: float = 0.0
    dropped: int = 0


MAX_NAMED: Final = 100
"""Maximum number of routers of one output that are shown by name. The slowest routers are chosen."""


def read_sources(relay: Relay) -> Iterator[tuple[int, SourceReading]]:
    """Yield the slot and a reading of each source.

    The list of sources is copied at the first step, because sources may change between two steps. A source that is
    removed or replaced before it is read is skipped.
    """
    at_first = relay.sources.copy()
    for slot, source in enumerate(at_first):
        if source is relay.sources[slot] and not source.gone:
            yield slot, read_source(source)


def read_source(source: Source) -> SourceReading:
    """Return a reading of one source."""
    sequencer, normalizer, spec = source.sequencer, source.normalizer, source.spec
    media = normalizer.index.media()
    return SourceReading(
        name=spec.label,
        rank=source.rank,
        state=source.state,
        partial=source.partial,
        partial_since=source.partial_since,
        epoch=sequencer.epoch,
        last_seq=sequencer.next - 1,
        dialect=source.dialect.name,
        unknown=sorted(source.unknown),
        block_size=normalizer.block_size,
        pending=sequencer.pending,
        queue_depth=len(sequencer.reorder_buffer),
        queue_limit=spec.reorder_batches,
        queue_bytes=sequencer.reorder_buffer.bytes,
        queue_bytes_limit=spec.max_held_bytes,
        unverified=len(sequencer.current.unverified.stale),
        index_entries=normalizer.entries,
        index_limit=spec.max_blocks,
        index_bytes=normalizer.index_bytes,
        index_bytes_limit=spec.max_index_bytes,
        groups=normalizer.known_groups,
        groups_limit=spec.max_groups,
        owners=normalizer.known_owners,
        owners_limit=spec.max_owners,
        blocks=dict.fromkeys(media, 0) if source.expired else dict(media),
        examples=source.examples.copy(),
        stats=source.stats.copy(),
    )


def read_outputs(relay: Relay, drivers: Sequence[Driver], stats: Sequence[OutputStats]) -> list[OutputReading]:
    """Return a reading of each configured output.

    Args:
        relay: the relay.
        drivers: the driver of each configured output, in order.
        stats: the counters of these drivers, in the same order.
    """
    return [_read_output(*each) for each in zip(_with_views(relay), drivers, stats, strict=True)]


def _with_views(relay: Relay) -> list[tuple[Output, ...]]:
    """Return a tuple for each configured output: the output itself, and then its views.

    A view is a separate output of the relay, with only the blocks that router keys with certain rights may see.
    """
    own = [output for output in relay.outputs if output.spec.view_of is None]
    views = [output for output in relay.outputs if not output.spec.closed]
    return [(output, *(view for view in views if view.spec.view_of == at)) for at, output in enumerate(own)]


def _read_output(outputs: Sequence[Output], driver: Driver, stats: OutputStats) -> OutputReading:
    """Return a reading of a configured output, which is the first of ``outputs``.

    The rest of ``outputs`` are its views.

    The reading includes the counters and journals of the views, but not the seqs of their streams.
    """
    counted = _copied(stats)
    output, spec = outputs[0], outputs[0].spec
    counted.replay_requests["malformed"] += sum(each.stats.malformed for each in outputs)
    other_group = sum(each.stats.other_group for each in outputs)
    if other_group:
        counted.dropped_events["other_group"] += other_group
    streams = [stream for each in outputs for stream in each.streams]
    served = sum(len(each.open_streams) for each in outputs)
    return OutputReading(
        name=spec.name,
        heartbeats=sum(each.stats.heartbeats for each in outputs),
        sequences={slot: stream.next_seq - 1 for slot, stream in output.open_streams.items()},
        journal_batches=sum(len(stream.journal) for stream in streams),
        journal_bytes=sum(stream.journal.bytes for stream in streams),
        journal_batches_limit=spec.journal_batches * served,
        journal_bytes_limit=spec.journal_bytes * served,
        outgrown=sum(stream.outgrown for stream in streams),
        views=len(outputs) - 1,
        withheld=Counter(
            rights=sum(each.stats.not_read for each in outputs),
            unknown_parent=sum(each.stats.undecided for each in outputs),
        ),
        queue_max=driver.queue_max,
        behind_seconds=driver.behind_seconds,
        named=_named(driver.routers) if "keys" in stats.parts else {},
        stats=counted,
    )


def _named(routers: Sequence[RouterView]) -> dict[str, NamedRouter]:
    """Return a reading of each connected router whose key has a name, slowest first, up to `MAX_NAMED` routers."""
    found: dict[str, NamedRouter] = {}
    for router in routers:
        if router.name and router.left is None:
            reading = found.setdefault(router.name, NamedRouter())
            reading.queued += router.queued_batches
            reading.behind = max(reading.behind, router.behind_seconds)
            reading.dropped += router.dropped_batches
    slowest = sorted(found.items(), key=lambda each: (each[1].behind, each[1].queued), reverse=True)
    return dict(slowest[:MAX_NAMED])


RouterKey = tuple[str, int, str, float]
"""A tuple that identifies a router's connection: output name, slot of the stream, router's address, and start time."""


class RouterReading(NamedTuple):
    """The reading of one connection of a router: name of the output, state of the connection, and findings.

    A finding is a problem of the router, as kvbus shows it to the operator.
    """

    output: str
    router: RouterView
    findings: list[Finding]

    @property
    def key(self) -> RouterKey:
        """The key that identifies the connection."""
        return self.output, self.router.stream, self.router.peer, self.router.since


def read_routers(relay: Relay, drivers: Sequence[Driver], wall: float) -> list[RouterReading]:
    """Return a reading of each router's connection to any output.

    ``wall`` is the current time, in seconds since 1970.
    """
    return [
        RouterReading(output.spec.name, router, list(_router_findings(number, output, router, wall)))
        for number, (output, driver) in enumerate(zip(relay.outputs, drivers, strict=False))
        for router in driver.routers
    ]


def _router_findings(number: int, output: Output, router: RouterView, wall: float) -> Iterator[Finding]:
    if router.left is not None:
        return
    facts = {"at": f"outputs[{number}]", "who": f"router {router.name or router.peer} of output {output.spec.name}"}
    dropped, at = router.dropped_batches, router.state_sent_at
    # Leave out ASKS_REPLAY. A kvbus or a client of kvbus also subscribes to it, to show that it requests replays. No
    # batch has this topic, so it does not explain why the router gets nothing.
    topics = [topic for topic in router.topics if topic != ASKS_REPLAY.decode()]
    if router.state == "idle" and topics and router.stream in output.open_streams:
        topic = output.open_streams[router.stream].topic
        yield catalogue.ROUTER_TOPIC(**facts, topics=", ".join(map(repr, topics)), topic=shown(topic))
    elif router.state == "stalled":
        yield catalogue.ROUTER_STALLED(**facts, dropped=dropped)
    elif router.behind_seconds > MAX_BEHIND_S:
        yield catalogue.ROUTER_BEHIND(**facts, seconds=router.behind_seconds)
    elif router.dropped_at is not None and router.state == "live" and wall - router.dropped_at < RECENT_S:
        since = "it has to request them from the replay"
        if at is not None:
            since = f"it got the state again at {datetime.fromtimestamp(at, UTC):%H:%M:%S} UTC and is exact again"
        yield catalogue.ROUTER_LOST_BATCHES(**facts, dropped=dropped, since=since)


def _copied(stats: OutputStats) -> OutputStats:
    counters = {name: getattr(stats, name) for name in stats.__struct_fields__}
    return structs.replace(
        stats, **{name: value.copy() for name, value in counters.items() if isinstance(value, Counter)}
    )


class LiveBlocks:
    """A copy of a source's live blocks, from which ``/blocks`` is written.

    Making the copy is cheap, because it copies dictionaries and shares the blocks in them.
    """

    def __init__(self, source: Source) -> None:
        self._label = source.spec.label
        self._rank = source.rank
        # Show no blocks of an expired source, because kvbus has cleared them at the routers.
        self._index = Index() if source.expired else source.normalizer.index.copy()
        self._copies = {key: table.copies.copy() for key, table in source.normalizer.index.tables.items()}

    def lines(self, hashes: str = "number") -> Iterator[dict[str, Any]]:
        """Yield the lines of ``/blocks``. Each line describes one live block as kvbus announces it to routers.

        Of the blocks on one medium, a parent comes before its children. ``hashes`` says how integer hashes are written,
        as one of :data:`~kvbus.core.types.HASH_FORMS`.
        """
        written = HASH_FORMS[hashes]
        for key, chunk, first, end in runs(self._index):
            tokens = chunk.token_list()
            names, pieces = chunk.reblocked() if chunk.derived is not None else (chunk.hashes, 1)
            size = chunk.block_size // pieces
            residency = {name: text for name, text in (("locality", key[2]), ("ownership", key[3])) if text is not None}
            for at in range(first, end):
                yield {
                    "source": self._label,
                    "rank": self._rank,
                    "hash": written(names[at]),
                    "parent": written(names[at - 1] if at else self._parent(chunk)),
                    "medium": chunk.meta.medium,
                    "group_idx": key[0],
                    "block_size": size,
                    "token_ids": tokens[at * size : (at + 1) * size],
                    "copies": 1 + self._copies[key].get(chunk.hashes[at // pieces], 0),
                    **residency,
                }

    def _parent(self, chunk: Chunk) -> Hash | None:
        if chunk.derived is not None:
            return chunk.out_parent
        return out_parent(self._index, group_of(chunk), chunk.parent)
