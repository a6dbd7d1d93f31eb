"""The relay's state as plain records: what a restart needs so that routers notice nothing.

Two kinds. A *dump* is the whole state at one moment, cut as a replay's compaction is and written out in slices. A *log*
is what has happened since, in the order it happened: batches delivered, new epochs, losses, withdrawals, heartbeats.
Loading a dump and handling the log again gives the same index, the same numbering and the same journal, because the
relay is deterministic. A record is on its way to the disk before anything that follows from it is sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType, structs

from kvbus.core.fingerprints import fingerprint, length
from kvbus.core.index import Chunk, Index, Meta, Rest, Table, TableKey, live_runs, set_of_chunks

if TYPE_CHECKING:
    from kvbus.core.parts import Source
    from kvbus.core.relay import Relay

DELIVERED: Final = 0
NEW_EPOCH: Final = 1
LOST: Final = 2
WITHDRAWN: Final = 3
RESTORED: Final = 4
HEARTBEAT: Final = 5
BEGUN: Final = 6
SNAPSHOT: Final = 7
TOLD: Final = 8

CHUNKS_PER_RECORD: Final = 256

Record = tuple[Any, ...]

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(list[Any]).decode


class StateError(ValueError):
    """Records that are not a state of this relay: another version's, or another configuration's."""


class Frame(NamedTuple):
    """What is written at a time; whoever reads it again has the payloads joined."""

    body: bytes
    payloads: list[bytes]


class Records:
    """What has happened since the last frame. Payloads are kept apart: they are written as they came."""

    __slots__ = ("heads", "payloads")

    def __init__(self) -> None:
        self.heads: list[Record] = []
        self.payloads: list[bytes] = []

    def delivered(self, i: int, seq: int, topic: bytes, payload: bytes, mark: int) -> None:
        """A batch of source ``i``; ``mark`` is its payload's :func:`~kvbus.core.fingerprints.fingerprint`."""
        self.heads.append((DELIVERED, i, seq, topic, mark))
        self.payloads.append(payload)

    def take(self) -> Frame:
        """All of them, as they are written; from now on there are none."""
        frame = Frame(_encode(self.heads), self.payloads)
        self.heads, self.payloads = [], []
        return frame


def decode_records(body: bytes, payloads: bytes) -> list[list[Any]] | None:
    """The records a frame was made of, payloads in place of their marks; None if one is not what it was.

    Raises:
        StateError: they are no records.
    """
    records = _decoded(body)
    at = 0
    for record in records:
        if not isinstance(record, list) or not record:
            raise StateError(f"no record: {record!r}")
        if record[0] == DELIVERED:
            mark = record[-1]
            end = at + length(mark)
            record[-1], at = payloads[at:end], end
            if fingerprint(record[-1]) != mark:
                return None
    return records


def _decoded(body: bytes) -> list[Any]:
    try:
        return _decode(body)
    except msgspec.DecodeError as error:
        raise StateError(str(error)) from error


def dump(relay: Relay) -> Iterator[bytes]:
    """The state as blobs: the cut is made when the first one is asked for, the rest may follow when there is time."""
    head = {
        "sources": [_source_head(source) for source in relay.sources],
        "outputs": [
            [output.spec.name, [[stream.next_seq, stream.topic, stream.publisher_id] for stream in output.streams]]
            for output in relay.outputs
        ],
    }
    cuts = [_tables(source.normalizer.index) for source in relay.sources]
    yield _encode(["head", head])
    for i, tables in enumerate(cuts):
        for key, table in tables:
            yield _encode(["table", i, key, list(table.copies.items())])
            yield from _chunks(i, key, table)
    yield _encode(["end"])


def _source_head(source: Source) -> dict[str, Any]:
    return {
        "label": source.spec.label,
        "rank": source.rank,
        "ranked": source.ranked,
        "ts": source.ts,
        "topic": source.topic,
        "told": source.told,
        "withdrawn": source.withdrawn,
        "publisher_id": source.publisher_id,
        "sequencer": source.sequencer.dump(),
        "normalizer": source.normalizer.dump(),
    }


def _tables(index: Index) -> list[tuple[TableKey, Table]]:
    cut = index.copy()
    for key, table in cut.tables.items():
        table.copies = index.tables[key].copies.copy()
    return list(cut.tables.items())


def _chunks(i: int, key: TableKey, table: Table) -> Iterator[bytes]:
    rows: list[Any] = []
    for chunk in set_of_chunks(table):
        rows.append(_chunk_row(table, chunk))
        if len(rows) == CHUNKS_PER_RECORD:
            yield _encode(["chunks", i, key, rows])
            rows = []
    if rows:
        yield _encode(["chunks", i, key, rows])


def _chunk_row(table: Table, chunk: Chunk) -> list[Any]:
    meta = [False if isinstance(value, UnsetType) else value for value in structs.astuple(chunk.meta)]
    return [
        chunk.hashes,
        chunk.parent,
        chunk.tokens,
        meta,
        chunk.extra_keys,
        chunk.extras,
        chunk.out,
        chunk.out_parent,
        list(live_runs(table, chunk)),
    ]


class Loader:
    """Puts a dump into a fresh relay, blob by blob; then the log, record by record."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._metas: dict[tuple[Any, ...], Meta] = {}
        self.complete = False
        """The dump's end was seen."""

    def feed(self, blob: bytes) -> None:
        """One blob of a dump.

        Raises:
            StateError: it belongs to another version or another configuration.
        """
        record = _decoded(blob)
        kind = record[0] if record else None
        try:
            if kind == "head":
                self._head(record[1])
            elif kind == "table":
                _, i, key, copies = record
                table = self._relay.sources[i].normalizer.index.table(*key)
                table.copies.update((block, count) for block, count in copies)
            elif kind == "chunks":
                _, i, key, rows = record
                table = self._relay.sources[i].normalizer.index.table(*key)
                for row in rows:
                    self._chunk(table, row)
            elif kind == "end":
                self.complete = True
            else:
                raise StateError(f"unknown record {kind!r}")
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise StateError(f"record {kind!r}: {error}") from error

    def _head(self, head: dict[str, Any]) -> None:
        relay = self._relay
        labels = [entry["label"] for entry in head["sources"]]
        shape = [(name, len(streams)) for name, streams in head["outputs"]]
        if labels != [source.spec.label for source in relay.sources]:
            raise StateError(f"it has the sources {labels}")
        if shape != [(output.spec.name, len(output.streams)) for output in relay.outputs]:
            raise StateError(f"it has the outputs {shape}")
        for source, entry in zip(relay.sources, head["sources"], strict=True):
            source.rank, source.ts, source.topic = entry["rank"], entry["ts"], entry["topic"]
            source.ranked = entry["ranked"]
            source.told, source.withdrawn = entry["told"], entry["withdrawn"]
            source.publisher_id = entry["publisher_id"]
            source.sequencer.load(entry["sequencer"])
            source.normalizer.load(entry["normalizer"])
        for output, (_, streams) in zip(relay.outputs, head["outputs"], strict=True):
            for stream, (next_seq, topic, publisher_id) in zip(output.streams, streams, strict=True):
                stream.next_seq = stream.first_seq = next_seq
                if stream.keeps_topic:
                    stream.topic = topic
                if stream.publisher_id and publisher_id:
                    stream.publisher_id = publisher_id

    def _chunk(self, table: Table, row: list[Any]) -> None:
        hashes, parent, tokens, meta, extra_keys, extras, out, out_parent, runs = row
        values: tuple[Any, ...] = tuple(UNSET if value is False else value for value in meta)
        shared = self._metas.setdefault(values, Meta(*values))
        chunk = Chunk(tuple(hashes), parent, tokens, shared, extra_keys)
        if extras is not None or out is not None:
            chunk.rest = Rest(extras, out, out_parent)
        for a, b in runs:
            table.blocks.update(dict.fromkeys(hashes[a:b], chunk))
            if chunk.out is not None:
                # counted anew: block sizes may have been learned while the dump was being written
                names, pieces = chunk.recut()
                for name in names[a * pieces : b * pieces]:
                    table.refs[name] = table.refs.get(name, 0) + 1
