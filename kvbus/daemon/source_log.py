"""What changes about the sources: each state with its cause, what is missing of a partial one, and what else is wrong.

It goes into the log, and to whoever shows transitions.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final, NamedTuple

from kvbus.core.missing import missing
from kvbus.core.relay import Relay
from kvbus.core.remarks import Remark, remarks
from kvbus.core.sequencing.phases import State
from kvbus.core.source import Source

log = logging.getLogger("kvbus.daemon")


AT_ONCE: Final = 16
"""Sources that are looked at in one turn of the loop: 0.06 ms."""

CALLS: Final = 10
"""Ticks in which all are looked at, at most: a second."""

Report = Callable[[str, str, str, str], None]
"""Takes the kind of a transition, the source's name, what it led to, and a sentence."""


class _Counted(NamedTuple):
    """What a source had counted when nothing was missing of it."""

    epoch: int = 0
    missing: int = 0
    recovered: int = 0
    lost: int = 0


_NOTHING: Final = _Counted()


class SourceLog:
    """Compares each source with what it saw last.

    Args:
        report: called for each transition.
    """

    def __init__(self, report: Report) -> None:
        self._report = report
        self._states: dict[int, State] = {}
        self._counted: dict[int, _Counted] = {}
        self._partial: dict[int, float | None] = {}
        self._remarks: dict[int, dict[Remark, str]] = {}
        self._unknown: dict[int, set[str]] = {}
        self._left: list[int] = []
        """Slots that are still to be looked at until all have been."""

    def look_in_turns(self, relay: Relay, there: Collection[int]) -> None:
        """Log what has changed about the next sources, a few of them in a turn of the event loop.

        Args:
            relay: has the sources.
            there: the slots of those that are there, whenever it is asked.
        """
        self._left = self._left or list(there)
        count = max(AT_ONCE, -(-len(there) // CALLS))
        some, self._left = self._left[:count], self._left[count:]
        self._look_at(relay, there, some)

    def _look_at(self, relay: Relay, there: Collection[int], some: Sequence[int]) -> None:
        self.look(relay, [slot for slot in some[:AT_ONCE] if slot in there])  # one may be gone by now
        if rest := some[AT_ONCE:]:
            asyncio.get_running_loop().call_soon(self._look_at, relay, there, rest)

    def look(self, relay: Relay, slots: Iterable[int]) -> None:
        """Log what has changed about the sources in these slots."""
        for slot in slots:
            source = relay.sources[slot]
            self._look_at_state(slot, source)
            self._look_at_partial(slot, source)
            self._look_at_remarks(slot, source)
            if len(source.unknown) != len(self._unknown.get(slot, ())):
                self._look_at_unknown(slot, source)

    def _look_at_state(self, slot: int, source: Source) -> None:
        before, state, label = self._states.get(slot, State.CONNECTING), source.state, source.spec.label
        stats, sequencer, counted = source.stats, source.sequencer, self._counted.get(slot, _NOTHING)
        if state is before and sequencer.epoch == counted.epoch and stats.missing == counted.missing:
            return
        now = _Counted(sequencer.epoch, stats.missing, stats.recovered, stats.lost)
        if state is before:
            if not sequencer.pending:
                self._counted[slot] = now
                if now.epoch != counted.epoch:
                    self._report("epoch", label, state, _cause(source, now, counted))
                elif repaired := _repaired(now, counted):
                    self._report("repaired", label, state, repaired)
            return
        self._states[slot] = state
        self._report("state", label, state, f"{before} → {state}: {_cause(source, now, counted)}")
        if not sequencer.pending:
            self._counted[slot] = now
        log.info(
            "source %s: %s -> %s, epoch %d, next seq %d, %d blocks",
            label,
            before,
            state,
            sequencer.epoch,
            sequencer.next,
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
            self._report("partial", source.spec.label, "whole", "no longer partial")
            log.info("source %s is no longer partial", source.spec.label, extra=_fields(source))
        else:
            self._report("partial", source.spec.label, "partial", f"partial: {why.reason}; until {why.heals}")
            text = "source %s is partial: %s; until %s"
            log.warning(text, source.spec.label, why.reason, why.heals, extra=_fields(source))

    def _look_at_unknown(self, slot: int, source: Source) -> None:
        new = sorted(source.unknown - self._unknown.get(slot, set()))
        self._unknown[slot] = source.unknown.copy()
        if new:
            text = "source %s sends what this version does not know: %s"
            log.warning(text, source.spec.label, ", ".join(new), extra=_fields(source))

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
                self._report("remark", source.spec.label, remark, text)
                fields = {**_fields(source), "reason": str(remark)}
                log.warning("source %s: %s", source.spec.label, text, extra=fields)
        for remark in before.keys() - now.keys():
            self._report("remark", source.spec.label, "over", f"no longer {remark.value}")
            log.info("source %s: no longer %s", source.spec.label, remark.value, extra=_fields(source))


def _repaired(now: _Counted, before: _Counted) -> str:
    """What became of batches that were missing; empty if none was."""
    recovered, lost = now.recovered - before.recovered, now.lost - before.lost
    if recovered + lost <= 0:
        return ""
    said = [f"{recovered:,} recovered by replay"] * (recovered > 0) + [f"{lost:,} lost"] * (lost > 0)
    return f"{_batches(recovered + lost)} missing: {', '.join(said)}"


def _batches(count: int) -> str:
    return "1 batch" if count == 1 else f"{count:,} batches"


def _cause(source: Source, now: _Counted, before: _Counted) -> str:
    """Why a source is in its state, as far as what it counts shows that."""
    sequencer, state = source.sequencer, source.state
    known = f"in sync at seq {sequencer.next - 1:,} of epoch {sequencer.epoch}, {len(source.normalizer.index):,} blocks"
    if state is State.CONNECTING:
        return source.unreachable or "the connection has ended"
    if state is State.LOST:
        return "no connection for source_timeout; its blocks are cleared at routers"
    if state is State.CONFLICT:
        return "several publishers send on one endpoint; nothing is taken in for a while"
    if now.epoch > before.epoch:
        return f"the engine has restarted: epoch {now.epoch} begins, and routers are cleared of the one before"
    if state is State.GAP:
        return f"{_batches(sequencer.pending)} missing from seq {sequencer.next:,} on; later ones wait"
    if state is State.SYNCING:
        return "the engine is asked for its history"
    return f"{repaired}; {known}" if (repaired := _repaired(now, before)) else known


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
