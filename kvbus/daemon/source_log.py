"""Log lines about the sources: each change of state, what is missing of a partial one, and what else is wrong."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable

from kvbus.core.missing import missing
from kvbus.core.relay import Relay
from kvbus.core.remarks import Remark, remarks
from kvbus.core.source import Source

log = logging.getLogger("kvbus.daemon")


class SourceLog:
    """Compares each source with what it logged last."""

    def __init__(self) -> None:
        self._states: dict[int, str] = {}
        self._partial: dict[int, float | None] = {}
        self._remarks: dict[int, dict[Remark, str]] = {}

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
            extra=_fields(source),
        )

    def _look_at_partial(self, slot: int, source: Source) -> None:
        since = source.partial_since
        if since == self._partial.get(slot):
            return
        self._partial[slot] = since
        why = missing(source)
        if why is None:
            log.info("source %s is no longer partial", source.spec.label, extra=_fields(source))
        else:
            text = "source %s is partial: %s; until %s"
            log.warning(text, source.spec.label, why.reason, why.heals, extra=_fields(source))

    def _look_at_remarks(self, slot: int, source: Source) -> None:
        found = remarks(source)
        before = self._remarks.get(slot, {})
        if not found and not before:
            return
        now = {remark: _without_numbers(text) for remark, text in found.items()}
        if now == before:
            return
        self._remarks[slot] = now
        for remark, text in found.items():
            if before.get(remark) != now[remark]:
                fields = {**_fields(source), "reason": str(remark)}
                log.warning("source %s: %s", source.spec.label, text, extra=fields)
        for remark in before.keys() - now.keys():
            log.info("source %s: no longer %s", source.spec.label, remark.value, extra=_fields(source))


def _without_numbers(text: str) -> str:
    """The sentence without its counts: one that only counts on is not said again."""
    return re.sub(r"\b\d[\d,]*\b", "", text)


def _fields(source: Source) -> dict[str, str | int]:
    """The structured fields of a line."""
    return {
        "source": source.spec.label,
        "rank": source.rank,
        "state": source.state.value,
        "epoch": source.sequencer.epoch,
    }
