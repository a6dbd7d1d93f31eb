"""Log what changes about the sources: their states with the causes, and findings that begin, change or end.

Each change is also added to the timeline of the status page.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from kvbus.core.findings.engine import ENGINE_RESTARTED, READ_AGAIN
from kvbus.core.findings.finding import Change, Findings, Reported, Severity
from kvbus.core.findings.source import source_findings
from kvbus.core.relay import Relay
from kvbus.core.sequencing.phases import State
from kvbus.core.source import Source

log = logging.getLogger("kvbus.daemon")


AT_ONCE: Final = 16
"""Maximum number of sources checked in one iteration of the event loop; 16 checks take 0.06 ms."""

CALLS: Final = 10
"""Number of calls of :meth:`SourceLog.look_in_turns` in which every source is checked for changes.

The daemon calls it ten times a second.
"""

Report = Callable[[str, str, str, str], None]
"""A function that records a change in the timeline.

Its arguments are the kind of the change, the source's name, the new state or severity, and a sentence.
"""


class _Counted(NamedTuple):
    """The counters of a source at the last check that found no pending batch."""

    epoch: int = 0
    missing: int = 0
    recovered: int = 0
    lost: int = 0
    restarts: int = 0


class SourceLog:
    """A regular check of all sources that logs how each source has changed since its previous check.

    Args:
        report: called for each change.
        wall_clock: returns the time of day, in seconds.
        written: returns a configuration key as the operator has written it.
    """

    def __init__(self, report: Report, wall_clock: Callable[[], float], written: Callable[[str], str] = str) -> None:
        self._report = report
        self._wall_clock = wall_clock
        self._written = written
        self._states: dict[int, State] = {}
        self._counted: dict[int, _Counted] = {}
        self._blocks: dict[int, int] = {}
        self._standing: dict[int, Findings] = {}
        self._unknown: dict[int, set[str]] = {}
        self._left: list[int] = []
        """The slots that :meth:`look_in_turns` has still to check before it begins again with all slots."""

    def look_in_turns(self, relay: Relay, slots: Collection[int]) -> None:
        """Check some of the sources, and log their changes. Ten calls check all sources.

        Args:
            relay: the relay with the sources.
            slots: the slots of the present sources. The collection may change after the call.
        """
        self._left = self._left or list(slots)
        count = max(AT_ONCE, -(-len(slots) // CALLS))
        some, self._left = self._left[:count], self._left[count:]
        self._look_at(relay, slots, some)

    def _look_at(self, relay: Relay, slots: Collection[int], some: Sequence[int]) -> None:
        self.look(relay, [slot for slot in some[:AT_ONCE] if slot in slots])  # a source may have been removed
        if rest := some[AT_ONCE:]:
            asyncio.get_running_loop().call_soon(self._look_at, relay, slots, rest)

    def look(self, relay: Relay, slots: Iterable[int]) -> None:
        """Check the sources in these slots, and log their changes."""
        for slot in slots:
            source = relay.sources[slot]
            self._look_at_state(slot, source)
            self._look_at_findings(slot, source)
            if len(source.unknown) != len(self._unknown.get(slot, ())):
                self._look_at_unknown(slot, source)

    def _look_at_state(self, slot: int, source: Source) -> None:
        before, state, label = self._states.get(slot, State.CONNECTING), source.state, source.spec.label
        stats, sequencer = source.stats, source.sequencer
        counted = self._counted.setdefault(slot, _Counted(sequencer.epoch, restarts=stats.restarts))
        blocks, self._blocks[slot] = self._blocks.get(slot, 0), len(source.normalizer.index)
        if state is before and sequencer.epoch == counted.epoch and stats.missing == counted.missing:
            return
        now = _Counted(sequencer.epoch, stats.missing, stats.recovered, stats.lost, stats.restarts)
        if now.epoch > counted.epoch:
            self._new_epoch(source, blocks, counted.epoch, restarted=now.restarts > counted.restarts)
            self._counted[slot] = counted = counted._replace(epoch=now.epoch, restarts=now.restarts)
        if state is before:
            if not sequencer.pending:
                self._counted[slot] = now
                if repaired := _repaired(now, counted):
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

    def _look_at_unknown(self, slot: int, source: Source) -> None:
        new = sorted(source.unknown - self._unknown.get(slot, set()))
        self._unknown[slot] = source.unknown.copy()
        if new:
            text = "source %s sends events or fields that this version of kvbus does not know: %s"
            log.warning(text, source.spec.label, ", ".join(new), extra=_fields(source))

    def findings(self, relay: Relay, slots: Iterable[int]) -> Iterator[Reported]:
        """Yield the current findings about the sources in these slots."""
        for slot in slots:
            yield from self._of(slot).reported(kind="source", name=relay.sources[slot].spec.label)

    def _of(self, slot: int) -> Findings:
        return self._standing.setdefault(slot, Findings(self._written))

    def _look_at_findings(self, slot: int, source: Source) -> None:
        now, label = self._wall_clock(), source.spec.label
        changes = self._of(slot).update(source_findings(source), now)
        log_changes(changes, f"source {label}", label, _fields(source), self._report)

    def _new_epoch(self, source: Source, blocks: int, before: int, *, restarted: bool) -> None:
        facts = {"at": source.location.section, "blocks": blocks, "before": before, "epoch": source.sequencer.epoch}
        row = ENGINE_RESTARTED if restarted else READ_AGAIN
        text, label = row(**facts).text, source.spec.label
        self._report("epoch", label, source.state, text)
        level = logging.WARNING if restarted else logging.INFO
        log.log(level, "source %s: %s", label, text, extra={**_fields(source), "reason": row.id})


def log_changes(
    changes: Iterable[Change], who: str, name: str, fields: Mapping[str, str | int], report: Report
) -> None:
    """Log each finding that has begun, changed or ended, and add it to the timeline.

    Args:
        changes: the findings that have begun, changed or ended.
        who: the subject of the findings, which begins each log line.
        name: the subject's name in the timeline.
        fields: the structured fields of the log lines.
        report: adds a change to the timeline.
    """
    for word, finding, seconds in changes:
        if word == "ends":
            level, after, text = logging.INFO, "over", f"ended after {span(seconds)}: {finding.text}"
        else:
            level = logging.INFO if finding.severity is Severity.NOTE else logging.WARNING
            after, text = str(finding.severity), str(finding)
        report("finding", name, after, text)
        log.log(level, "%s: %s", who, text, extra={**fields, "reason": finding.id})


def span(seconds: float) -> str:
    """Format a duration, such as ``12 s``, ``5 min`` or ``3 h``."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.0f} h"


def _repaired(now: _Counted, before: _Counted) -> str:
    """Return a sentence about the batches that were recovered or lost since ``before``; empty if there are none."""
    recovered, lost = now.recovered - before.recovered, now.lost - before.lost
    if recovered + lost <= 0:
        return ""
    repaired = [f"{recovered:,} recovered by replay"] * (recovered > 0) + [f"{lost:,} lost"] * (lost > 0)
    return f"{_batches(recovered + lost)} missing: {', '.join(repaired)}"


def _batches(count: int) -> str:
    return "1 batch" if count == 1 else f"{count:,} batches"


def _cause(source: Source, now: _Counted, before: _Counted) -> str:
    """Return a sentence that explains why a source is in its current state."""
    sequencer, state = source.sequencer, source.state
    known = f"in sync at seq {sequencer.next - 1:,} of epoch {sequencer.epoch}, {len(source.normalizer.index):,} blocks"
    if state is State.CONNECTING:
        return source.unreachable.text if source.unreachable else "the connection has ended"
    if state is State.LOST:
        return "no connection for source_timeout; its blocks are cleared at routers"
    if state is State.CONFLICT:
        return "several publishers send on one endpoint; kvbus accepts no batches for a while"
    if state is State.GAP:
        return f"{_batches(sequencer.pending)} missing from seq {sequencer.next:,} on; later batches wait"
    if state is State.SYNCING:
        return "kvbus requests the engine's history"
    return f"{repaired}; {known}" if (repaired := _repaired(now, before)) else known


def _fields(source: Source) -> dict[str, str | int]:
    """Return the structured fields of each log line about a source."""
    return {
        "source": source.spec.label,
        "rank": source.rank,
        "state": source.state.value,
        "epoch": source.sequencer.epoch,
    }
