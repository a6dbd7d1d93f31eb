"""Tests for the log lines of sources: one line for each change of state, and none without a change."""

from __future__ import annotations

import asyncio
import logging

import pytest

from kvbus.core.events import BatchReceived, ReplayReceived, SourceDown, SourceUnreachable, SourceUp, Tick
from kvbus.core.findings.engine import NOT_ZEROMQ, NOTHING_LISTENS
from kvbus.core.findings.finding import Finding
from kvbus.core.findings.source import MIN_COPIES, MIN_LEFT_OUT, MIN_REANNOUNCED
from kvbus.core.relay import Relay
from kvbus.core.sequencing.phases import Phase
from kvbus.core.source_spec import SourceSpec
from kvbus.core.wire.frames import END_SEQ
from kvbus.daemon.source_log import AT_ONCE, CALLS, SourceLog
from tests.doubles.payloads import batch, payload, store


@pytest.fixture
def relay() -> Relay:
    return Relay([SourceSpec("engine", 0)], [])


def ignored(*_: str) -> None:
    """Ignore a transition of a source, in tests that check only log lines."""


def nothing_listens(detail: str = "") -> Finding:
    return NOTHING_LISTENS(at="sources[0]", name="endpoint", endpoint="tcp://127.0.0.1:5557", detail=detail)


class Wall:
    """A wall clock that the test sets."""

    now = 1.0
    """The present time in seconds, as in the ``ts`` of batches."""

    def __call__(self) -> float:
        return self.now


WALL = Wall()
REMEDY = "[sources[0].endpoint]: start the engine with its KV-cache events on, or correct host and port"


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return found


def test_each_change_of_a_sources_state_is_one_log_line(relay: Relay, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = SourceLog(ignored, WALL)
    log.look(relay, [0])
    assert lines(caplog) == []
    relay.handle(SourceUp(0), 1.0)
    log.look(relay, [0])
    log.look(relay, [0])
    assert lines(caplog) == ["source engine: connecting -> syncing, epoch 0, next seq 0, 0 blocks"]


async def test_the_source_log_checks_a_few_present_sources_per_iteration() -> None:
    names = [f"engine-{n}" for n in range(CALLS * AT_ONCE + 1)]
    relay = Relay([SourceSpec(name, 0) for name in names], [])
    for slot in range(len(names)):
        relay.handle(SourceUp(slot), 1.0)
    seen: list[str] = []
    log = SourceLog(lambda kind, name, led_to, text: seen.append(name), WALL)
    there = dict.fromkeys(range(len(names)))
    log.look_in_turns(relay, there)
    assert seen == names[:AT_ONCE]
    del there[AT_ONCE]
    del there[AT_ONCE + 3]
    await asyncio.sleep(0)
    assert seen == names[:AT_ONCE], "one more in the next turn, but it has gone"
    log.look_in_turns(relay, there)
    assert seen == [*names[:AT_ONCE], *names[AT_ONCE + 1 : AT_ONCE + 3], *names[AT_ONCE + 4 : 2 * AT_ONCE + 1]]
    for _ in range(CALLS - 1):
        log.look_in_turns(relay, there)
    assert len(seen) == len(names) - 2
    log.look_in_turns(relay, there)
    assert len(seen) == len(names) - 2, "nothing has changed about the first ones"


def test_a_finding_is_logged_once(relay: Relay, caplog: pytest.LogCaptureFixture) -> None:
    log = SourceLog(ignored, WALL)
    for seq in range(MIN_LEFT_OUT):
        window = store([seq], group=1, kv_cache_spec_kind="sliding_window")
        relay.handle(BatchReceived(0, batch(seq, window)), 1.0)
        log.look(relay, [0])
        log.look(relay, [0])
    (line,) = [line for line in lines(caplog) if "no group" in line]
    assert line.startswith("source engine: no group of this model has blocks that form prefixes")
    # Another finding begins, which gets its own line. The first finding is not logged again.
    stats = relay.sources[0].stats
    stats.reannounced, stats.most_copies = MIN_REANNOUNCED, MIN_COPIES
    log.look(relay, [0])
    (line,) = lines(caplog)
    assert f"kvbus counts {MIN_COPIES} copies of one block" in line


def test_a_finding_is_logged_again_only_if_more_than_its_count_changes(
    relay: Relay, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    log = SourceLog(ignored, WALL)
    relay.handle(SourceUnreachable(0, nothing_listens(" (connection refused)")), 1.0)
    log.look(relay, [0])
    log.look(relay, [0])
    (line,) = lines(caplog)
    assert line == f"source engine: nothing listens at tcp://127.0.0.1:5557 (connection refused) {REMEDY}"
    stranger = NOT_ZEROMQ(at="sources[0]", name="endpoint", endpoint="tcp://127.0.0.1:5557", detail="")
    relay.handle(SourceUnreachable(0, nothing_listens()), 1.5)
    log.look(relay, [0])
    (line,) = lines(caplog)
    assert line == f"source engine: nothing listens at tcp://127.0.0.1:5557 {REMEDY}"
    monkeypatch.setattr(Wall, "now", 91.0)
    relay.handle(SourceUnreachable(0, stranger), 2.0)
    log.look(relay, [0])
    over, line = lines(caplog)
    assert over == "source engine: ended after 2 min: nothing listens at tcp://127.0.0.1:5557"
    assert line.startswith("source engine: tcp://127.0.0.1:5557 does not speak ZeroMQ [sources[0].endpoint]: ")
    relay.handle(SourceUp(0), 3.0)
    log.look(relay, [0])
    assert "source engine: ended after 0 s: tcp://127.0.0.1:5557 does not speak ZeroMQ" in lines(caplog)
    relay.handle(ReplayReceived(0, 1, [b"", b"", END_SEQ, b""]), 3.0)
    for seq in range(3):
        relay.handle(BatchReceived(0, batch(seq, {"type": "Unheard"})), 4.0)
        log.look(relay, [0])
    said = [line for line in lines(caplog) if "left out" in line]
    (line,) = said
    assert line.startswith(
        "source engine: note: events left out (1), because this version of kvbus does not know their"
    )


def test_unknown_events_and_fields_are_logged_once(relay, caplog) -> None:
    log = SourceLog(ignored, WALL)
    events = [{"type": "Later"}, {"type": "Later"}, store([1], novelty="secret"), store([2], other=1)]
    for seq, event in enumerate(events):
        message = batch(seq, event)
        relay.handle(BatchReceived(0, message if seq else [*message, b"more"]), 4.0)
        log.look(relay, [0])
    said = [line for line in lines(caplog) if line.startswith("source engine sends")]
    assert said == [
        f"source engine sends events or fields that this version of kvbus does not know: {name}"
        for name in ("event Later, frame number 4", "field of BlockStored novelty", "field of BlockStored other")
    ]
    assert "secret" not in caplog.text


def test_a_log_record_has_its_fields_beside_the_sentence(relay, caplog) -> None:
    log = SourceLog(ignored, WALL)
    relay.handle(SourceUnreachable(0, nothing_listens()), 1.0)
    log.look(relay, [0])
    (record,) = caplog.records
    assert {name: vars(record)[name] for name in ("source", "rank", "state", "epoch", "reason")} == {
        "source": "engine",
        "rank": 0,
        "state": "connecting",
        "epoch": 0,
        "reason": "nothing_listens",
    }


def test_each_transition_is_reported_with_its_cause(relay: Relay) -> None:
    seen: list[tuple[str, ...]] = []
    log = SourceLog(lambda *said: seen.append(said), WALL)

    def looked() -> list[tuple[str, ...]]:
        log.look(relay, [0])
        found = seen.copy()
        seen.clear()
        return found

    def live(seq: int) -> None:
        relay.handle(BatchReceived(0, batch(seq, store([seq + 1]))), 1.0)

    def answer(request: int, *seqs: int) -> None:
        for seq in seqs:
            relay.handle(ReplayReceived(0, request, [b"", b"", seq.to_bytes(8, "big"), payload(store([seq + 1]))]), 1.0)
        relay.handle(ReplayReceived(0, request, [b"", b"", END_SEQ, b""]), 1.0)

    assert looked() == []
    relay.handle(SourceUp(0), 1.0)
    connected = "connecting → syncing: kvbus requests the engine's history"
    assert looked() == [("state", "engine", "syncing", connected)]
    answer(1)
    live(0)
    said = "syncing → live: in sync at seq 0 of epoch 0, 1 blocks"
    assert looked() == [("state", "engine", "live", said)]

    # This gap exists when the log checks the source, so it is logged.
    live(3)
    assert looked() == [("state", "engine", "gap", "live → gap: 2 batches missing from seq 1 on; later batches wait")]
    answer(2, 1, 2)
    said = "gap → live: 2 batches missing: 2 recovered by replay; in sync at seq 3 of epoch 0, 4 blocks"
    assert looked() == [("state", "engine", "live", said)]
    assert looked() == []

    # This gap begins and ends between two checks by the log, so no line may report it.
    live(5)
    answer(3, 4)
    assert looked() == [("repaired", "engine", "live", "1 batch missing: 1 recovered by replay")]

    relay.handle(SourceDown(0), 2.0)
    assert looked() == [("state", "engine", "connecting", "live → connecting: the connection has ended")]
    relay.handle(Tick(0.0), 2.0 + relay.sources[0].spec.source_timeout)
    lost = "connecting → lost: no connection for source_timeout; its blocks are cleared at routers"
    assert looked() == [("state", "engine", "lost", lost)]


def test_partial_and_findings_are_reported_from_beginning_to_end(relay: Relay) -> None:
    seen: list[tuple[str, ...]] = []
    log = SourceLog(lambda *said: seen.append(said), WALL)
    relay.handle(SourceUnreachable(0, nothing_listens()), 1.0)
    log.look(relay, [0])
    assert seen.pop() == ("finding", "engine", "problem", f"nothing listens at tcp://127.0.0.1:5557 {REMEDY}")
    relay.handle(SourceUp(0), 1.0)
    relay.handle(ReplayReceived(0, 1, [b"", b"", (5).to_bytes(8, "big"), payload(store([1]))]), 1.0)
    relay.handle(ReplayReceived(0, 1, [b"", b"", END_SEQ, b""]), 1.0)
    relay.handle(Tick(1000.0), 1.1)
    log.look(relay, [0])
    over, partial = seen[-2:]
    assert over == ("finding", "engine", "over", "ended after 0 s: nothing listens at tcp://127.0.0.1:5557")
    assert partial[:3] == ("finding", "engine", "problem")
    assert partial[3].startswith("partial: batches 0 to 4 were trimmed")
    relay.sources[0].sequencer.complete(certain=True)
    relay.handle(Tick(1001.0), 1.2)
    log.look(relay, [0])
    assert seen[-1][2] == "over"
    assert seen[-1][3].startswith("ended after 0 s: partial: batches 0 to 4 were trimmed")


def test_an_epoch_that_begins_between_two_checks_is_reported(relay: Relay) -> None:
    seen: list[tuple[str, ...]] = []
    log = SourceLog(lambda *said: seen.append(said), WALL)
    relay.handle(SourceUp(0), 1.0)
    relay.handle(ReplayReceived(0, 1, [b"", b"", END_SEQ, b""]), 1.0)
    relay.handle(BatchReceived(0, batch(0, store([1]))), 1.0)
    relay.handle(BatchReceived(0, batch(1, store([2]))), 1.0)
    log.look(relay, [0])
    seen.clear()
    # Seq 0 with other content means that the engine has restarted. kvbus gets its new history immediately.
    relay.handle(BatchReceived(0, batch(0, store([9]))), 1.1)
    relay.handle(ReplayReceived(0, 2, [b"", b"", (0).to_bytes(8, "big"), payload(store([9]))]), 1.1)
    relay.handle(ReplayReceived(0, 2, [b"", b"", END_SEQ, b""]), 1.1)
    relay.handle(ReplayReceived(0, 3, [b"", b"", (0).to_bytes(8, "big"), payload(store([9]))]), 1.1)
    relay.handle(ReplayReceived(0, 3, [b"", b"", END_SEQ, b""]), 1.1)
    log.look(relay, [0])
    said = "engine restarted, 2 blocks cleared, epoch 0 → 1"
    assert seen == [("epoch", "engine", "live", said)]


def test_a_conflict_is_reported_but_a_pending_batch_is_not(relay: Relay) -> None:
    said: list[tuple[str, ...]] = []
    log = SourceLog(lambda *what: said.append(tuple(map(str, what))), WALL)
    relay.handle(SourceUp(0), 1.0)
    log.look(relay, [0])
    source = relay.sources[0]
    source.sequencer.phase = Phase.CONFLICT
    log.look(relay, [0])
    assert "several publishers" in said[-1][-1]
    before = list(said)
    source.stats.missing += 1
    log.look(relay, [0])
    assert said == before
