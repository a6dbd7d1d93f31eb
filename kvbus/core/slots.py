"""Which sources there are. Each has a slot, which keeps its number when others go, and may be taken by another source.

Streams, ports and records of the write-ahead log go by the same number.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvbus.core.applying import Applier
from kvbus.core.events import SourcePlaced, SourceRemoved
from kvbus.core.numbered import Numbered
from kvbus.core.outgoing import Outgoing
from kvbus.core.source import Source
from kvbus.core.source_spec import SourceSpec


class Slots:
    """Puts sources into slots, and takes them out.

    Args:
        sources: the relay's, in their places.
        out: the relay's outgoing side.
        applier: clears what routers have of a source that goes.
        numbered: ends the streams of a source in a log.
    """

    def __init__(self, sources: list[Source], out: Outgoing, applier: Applier, numbered: Numbered) -> None:
        self._sources = sources
        self._out = out
        self._applier = applier
        self._numbered = numbered

    def begin(self, specs: Sequence[SourceSpec]) -> None:
        """Fill the slots of the configuration: outputs have their streams already."""
        self._sources.extend(map(self._source, specs))
        for slot, source in enumerate(self._sources):
            self._out.close(slot, closed=source.gone)

    def placed(self, event: SourcePlaced, now: float) -> None:
        """Put a source into a slot; one that is there goes first."""
        slot = event.source
        if slot < len(self._sources):
            self._remove(slot, now)
        while len(self._sources) <= slot:
            self._sources.append(self._source(SourceSpec()))
        self._sources[slot] = self._source(event.spec)
        self._out.welcome(slot, event.spec.rank, event.streams, now)
        if event.spec.numbered:
            self._numbered.placed(slot)

    def removed(self, event: SourceRemoved, now: float) -> None:
        """Free a slot: what routers have of its source is cleared."""
        self._remove(event.source, now)

    def _source(self, spec: SourceSpec) -> Source:
        source = Source(spec)
        source.normalizer.names_cleared = self._out.names_cleared
        source.needs_tokens = self._out.needs_tokens
        return source

    def _remove(self, slot: int, now: float) -> None:
        source = self._sources[slot]
        if not source.gone:
            self._applier.clear(slot, source, now)
        if source.spec.numbered:
            self._numbered.removed(slot, now)
        self._sources[slot] = self._source(SourceSpec(rank=source.rank))
        self._out.close(slot, closed=True)
