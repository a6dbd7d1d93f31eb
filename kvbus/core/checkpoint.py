"""Write and load checkpoints. A checkpoint is the relay's complete state at one moment.

The indexes are frozen first (copy-on-write), as for a state snapshot. So the relay continues to work while the
checkpoint is written in slices. The write-ahead log has the changes after that moment
(:mod:`kvbus.core.write_ahead_log`). After a restart, the checkpoint is loaded into a new relay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw, UnsetType, structs

from kvbus.core.blocks.chunk import Chunk, Meta, Rest
from kvbus.core.blocks.index import Index, Table, TableKey, chunks_of
from kvbus.core.blocks.live_order import live_runs
from kvbus.core.outputs.stream import OutputStream
from kvbus.core.relay import Relay
from kvbus.core.source import Source
from kvbus.core.write_ahead_log import StateError

CHUNKS_PER_RECORD: Final = 256

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(list[Any]).decode


def dump(relay: Relay) -> Iterator[bytes]:
    """Freeze the relay's current state, and return an iterator of the blobs that make up a checkpoint of it.

    The caller may read the iterator later: the blobs describe the state at the time of the call.
    """
    head = {
        "sources": [_source_head(source) for source in relay.sources],
        "outputs": [[output.spec.name, list(map(_stream_head, output.streams))] for output in relay.outputs],
    }
    frozen = [
        ([slot, output, which, key], table)
        for slot, source in enumerate(relay.sources)
        for output, which, index in _indexes(relay, slot, source)
        for key, table in _tables(index)
    ]
    return _blobs(_encode(["head", head]), frozen)


def _blobs(head: bytes, frozen: Sequence[tuple[list[Any], Table]]) -> Iterator[bytes]:
    yield head
    for address, table in frozen:
        yield _encode(["table", *address, list(table.copies.items())])
        yield from _chunks(address, table)
    yield _encode(["end"])


def _indexes(relay: Relay, slot: int, source: Source) -> Iterator[tuple[int | None, int, Index]]:
    """Yield each index that has blocks of a source, with the output number and the position that identify the index.

    A normalizer's index belongs to no output, so its output number is None. Its position is 0 for live blocks and 1
    for tail blocks. An output with a view has an index of its own for the source, at position 0.
    """
    for which, index in enumerate(source.normalizer.indexes):
        yield None, which, index
    for number, output in enumerate(relay.outputs):
        if output.view is not None and slot in output.view.indexes:
            yield number, 0, output.view.index(slot)


def _stream_head(stream: OutputStream) -> list[Any]:
    return [stream.next_seq, stream.topic, stream.publisher_id]


def _source_head(source: Source) -> dict[str, Any]:
    return {
        "label": source.spec.label,
        "rank": source.rank,
        "ranked": source.ranked,
        "ranks_announced": source.ranks_announced,
        "ts": source.ts,
        "topic": source.topic,
        "announced": source.announced,
        "expired": source.expired,
        "lost": source.lost,
        "partial_since": source.partial_since,
        "publisher_id": source.publisher_id,
        "sequencer": source.sequencer.dump(),
        "normalizer": source.normalizer.dump(),
    }


def _tables(index: Index) -> list[tuple[TableKey, Table]]:
    frozen = index.copy()
    for key, table in frozen.tables.items():
        table.copies = index.tables[key].copies.copy()
    return list(frozen.tables.items())


def _chunks(address: list[Any], table: Table) -> Iterator[bytes]:
    rows: list[Any] = []
    last, meta = None, Raw()
    for chunk in chunks_of(table):
        if chunk.meta is not last:  # most chunks have the same meta as the chunk before them
            last = chunk.meta
            values = structs.astuple(last)
            meta = Raw(_encode([False if isinstance(value, UnsetType) else value for value in values]))
        rows.append(_chunk_row(table, chunk, meta))
        if len(rows) == CHUNKS_PER_RECORD:
            yield _encode(["chunks", *address, rows])
            rows = []
    if rows:
        yield _encode(["chunks", *address, rows])


def _chunk_row(table: Table, chunk: Chunk, meta: Raw) -> list[Any]:
    return [
        chunk.hashes,
        chunk.parent,
        chunk.tokens,
        meta,
        chunk.extra_keys,
        chunk.extras,
        chunk.derived,
        chunk.out_parent,
        list(live_runs(table, chunk)),
    ]


class Loader:
    """The loader of a checkpoint, which is a sequence of blobs (encoded records). It fills a new relay, blob by blob.

    The caller then applies the records of the write-ahead log with :meth:`Relay.apply_record`.
    """

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._metas: dict[tuple[Any, ...], Meta] = {}
        self.complete = False
        """Whether the last blob of the checkpoint was loaded."""

    def feed(self, blob: bytes) -> None:
        """Load the next blob of a checkpoint into the relay.

        Raises:
            StateError: the blob is damaged, or belongs to another version or another configuration.
        """
        try:
            record = _decode(blob)
        except msgspec.DecodeError as error:
            raise StateError(str(error)) from error
        kind = record[0] if record else None
        try:
            if kind == "head":
                self._head(record[1])
            elif kind == "table":
                _, *address, copies = record
                self._table(*address).copies.update((block, count) for block, count in copies)
            elif kind == "chunks":
                _, *address, rows = record
                table = self._table(*address)
                for row in rows:
                    self._chunk(table, row)
            elif kind == "end":
                for source in self._relay.sources:
                    source.normalizer.count()
                self.complete = True
            else:
                raise StateError(f"unknown record {kind!r}")
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise StateError(f"record {kind!r}: {error}") from error

    def _head(self, head: dict[str, Any]) -> None:
        relay = self._relay
        labels = [entry["label"] for entry in head["sources"]]
        shape = [(name, len(streams)) for name, streams in head["outputs"]]
        own_labels = [source.spec.label for source in relay.sources]
        if labels != own_labels:
            raise StateError(f"the saved state has the sources {labels}, and this bus has {own_labels}")
        own_shape = [(output.spec.name, len(output.streams)) for output in relay.outputs]
        if shape != own_shape:
            raise StateError(f"the saved state has the outputs {shape}, and this bus has {own_shape}")
        for source, entry in zip(relay.sources, head["sources"], strict=True):
            source.rank, source.ts, source.topic = entry["rank"], entry["ts"], entry["topic"]
            source.ranked, source.ranks_announced = entry["ranked"], entry["ranks_announced"]
            source.announced, source.expired = entry["announced"], entry["expired"]
            source.lost, source.partial_since = entry["lost"], entry["partial_since"]
            source.publisher_id = entry["publisher_id"]
            source.sequencer.load(entry["sequencer"])
            source.normalizer.load(entry["normalizer"])
        for output, (_, streams) in zip(relay.outputs, head["outputs"], strict=True):
            for stream, (next_seq, topic, publisher_id) in zip(output.streams, streams, strict=True):
                stream.next_seq = stream.first_seq = next_seq
                if stream.publisher_id and publisher_id:
                    stream.publisher_id = publisher_id
                if stream.keeps_topic:
                    stream.topic = topic

    def _table(self, slot: int, output: int | None, which: int, key: list[Any]) -> Table:
        if output is None:
            return self._relay.sources[slot].normalizer.indexes[which].table(*key)
        view = self._relay.outputs[output].view
        if view is None:
            raise StateError(f"output {output} has no view")
        return view.index(slot).table(*key)

    def _chunk(self, table: Table, row: list[Any]) -> None:
        hashes, parent, tokens, meta, extra_keys, extras, derived, out_parent, runs = row
        values: tuple[Any, ...] = tuple(UNSET if value is False else value for value in meta)
        shared = self._metas.setdefault(values, Meta(*values))
        chunk = Chunk(tuple(hashes), parent, tokens, shared, extra_keys)
        if extras is not None or derived is not None:
            chunk.rest = Rest(extras, derived, out_parent)
        for a, b in runs:
            table.blocks.update(dict.fromkeys(hashes[a:b], chunk))
            if chunk.derived is not None:
                # Count how many live blocks contain each sub-block. The checkpoint does not store these counts. If
                # kvbus learned another block size while it wrote the checkpoint, they would be of other sub-blocks.
                names, per_block = chunk.reblocked()
                for name in names[a * per_block : b * per_block]:
                    table.refs[name] = table.refs.get(name, 0) + 1
