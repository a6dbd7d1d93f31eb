"""Log lines about the sources: each change of state, and what is missing of a partial one."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from kvbus.core.missing import missing
from kvbus.core.relay import Relay
from kvbus.core.remarks import remarks
from kvbus.core.source import Source

log = logging.getLogger("kvbus.daemon")


class SourceLog:
    """Compares each source with what it logged last."""

    def __init__(self) -> None:
        self._states: dict[int, str] = {}
        self._partial: dict[int, float | None] = {}
        self._remarks: dict[int, set[str]] = {}

    def look(self, relay: Relay, slots: Iterable[int]) -> None:
        """Log what has changed about the sources in these slots."""
        for slot in slots:
            source = relay.sources[slot]
            self._look_at_state(slot, source)
            self._look_at_partial(slot, source)
            self._look_at_remarks(slot, source)

    def _look_at_state(self, slot: int, source: Source) -> None:
        before = self._states.get(slot, "connecting")
        if source.state == before:
            return
        self._states[slot] = source.state
        log.info(
            "source %s: %s -> %s, epoch %d, next seq %d, %d blocks",
            source.spec.label,
            before,
            source.state,
            source.sequencer.epoch,
            source.sequencer.next,
            len(source.normalizer.index),
        )

    def _look_at_partial(self, slot: int, source: Source) -> None:
        since = source.partial_since
        if since == self._partial.get(slot):
            return
        self._partial[slot] = since
        why = missing(source)
        if why is None:
            log.info("source %s is no longer partial", source.spec.label)
        else:
            log.warning("source %s is partial: %s; until %s", source.spec.label, why.reason, why.heals)

    def _look_at_remarks(self, slot: int, source: Source) -> None:
        now = remarks(source)
        before = self._remarks.get(slot, set())
        if now.keys() == before:
            return
        self._remarks[slot] = set(now)
        for remark, text in now.items():
            if remark not in before:
                log.warning("source %s: %s", source.spec.label, text)
