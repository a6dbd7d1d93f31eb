"""The content of ``/sources`` and ``/blocks``, as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvbus.config import SourceStream
from kvbus.core.blocks.announce import group_of, out_parent
from kvbus.core.blocks.index import Chunk, Index, TableKey
from kvbus.core.missing import missing
from kvbus.core.relay import Relay
from kvbus.core.remarks import remarks
from kvbus.core.source import Source
from kvbus.core.types import Hash, printable
from kvbus.telemetry.table import queue_depth


def source_json(source: Source, endpoint: str, replay_endpoint: str | None) -> dict[str, Any]:
    """Return one entry of ``/sources``."""
    sequencer, stats = source.sequencer, source.stats
    media = {} if source.expired else source.normalizer.index.media()
    why = missing(source)
    return {
        "name": source.spec.label,
        "rank": source.rank,
        "endpoint": endpoint,
        "replay_endpoint": replay_endpoint,
        "state": source.state.value,
        "partial": source.partial,
        "partial_since": source.partial_since,
        "partial_reason": why.reason if why else None,
        "missing_before": why.before if why else None,
        "heals": why.heals if why else None,
        "remarks": list(remarks(source).values()),
        "epoch": sequencer.epoch,
        "last_seq": sequencer.next - 1,
        "dialect": source.dialect.name,
        "block_size": source.normalizer.block_size,
        "queue_depth": queue_depth(source),
        "unverified": len(sequencer.unverified),
        "counts": {
            "batches": stats.batches,
            "bytes": stats.bytes,
            "stored": stats.stored,
            "removed": stats.removed,
            "cleared": stats.cleared,
            "gaps": stats.gaps,
            "missing": stats.missing,
            "recovered": stats.recovered,
            "lost": stats.lost,
            "pending": sequencer.pending,
            "duplicates": stats.duplicates,
            "restarts": stats.restarts,
            "rejected": {str(reason): n for reason, n in stats.rejected.items()},
            "filtered": {str(reason): n for reason, n in stats.filtered.items()},
        },
        "blocks": {medium: count for medium, count in media.items() if count},
    }


def sources_json(relay: Relay, streams: Mapping[int, SourceStream]) -> list[dict[str, Any]]:
    """Return the body of ``/sources``, by slot."""
    return [
        source_json(relay.sources[slot], stream.endpoint, stream.replay_endpoint)
        for slot, stream in sorted(streams.items())
    ]


class LiveBlocks:
    """The live blocks of a source at one moment; later batches do not change them. It copies dictionaries only."""

    def __init__(self, source: Source) -> None:
        self.label = source.spec.label
        self.rank = source.rank
        # routers hold no block of an expired source
        self.index = Index() if source.expired else source.normalizer.index.copy()
        self._copies = {key: table.copies.copy() for key, table in source.normalizer.index.tables.items()}

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of ``/blocks``: one live block each, as routers know it, parents first on each medium."""
        seen: set[tuple[TableKey, Hash]] = set()
        for key, chunk, a, b in self.index.snapshot():
            copies = self._copies[key]
            tokens = chunk.token_list()
            names, pieces = chunk.reblocked() if chunk.derived is not None else (chunk.hashes, 1)
            size = chunk.block_size // pieces
            for at in range(a * pieces, b * pieces):
                if chunk.derived is not None:
                    if (key, names[at]) in seen:
                        continue  # two nodes may cover one page: routers know it by one hash, as one block
                    seen.add((key, names[at]))
                yield {
                    "source": self.label,
                    "rank": self.rank,
                    "hash": printable(names[at]),
                    "parent": printable(names[at - 1] if at else self._parent(chunk)),
                    "medium": chunk.meta.medium,
                    "group_idx": key[0],
                    "block_size": size,
                    "token_ids": tokens[at * size : (at + 1) * size],
                    "copies": 1 + copies.get(chunk.hashes[at // pieces], 0),
                }

    def _parent(self, chunk: Chunk) -> Hash | None:
        if chunk.derived is not None:
            return chunk.out_parent
        return out_parent(self.index, group_of(chunk), chunk.parent)
