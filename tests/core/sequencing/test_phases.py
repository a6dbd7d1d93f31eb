"""Tests for the table of the sequencer's phases: each transition occurs once, and all other inputs are refused."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from kvbus.core.sequencing import phases
from kvbus.core.sequencing.answers import Requests
from kvbus.core.sequencing.epoch import FIRST_PAUSE
from kvbus.core.sequencing.fingerprints import RING
from kvbus.core.sequencing.phases import (
    CONNECTED,
    PHASES,
    REQUESTS,
    TABLE,
    Guard,
    Input,
    Phase,
    RefusedError,
    State,
    step,
)
from kvbus.core.sequencing.request import OVERLAP
from kvbus.core.source_spec import ATTEMPTS
from tests.core.dsl import Happens, down, live, replay_aborted, replay_end, replayed, snapshot, tick, up
from tests.core.sequencing.script import SequencerScript, in_sync
from tests.docs.phases import transitions

LONG = RING + 50
"""Number of batches after which the fingerprints of the first batches are gone."""

Act = Happens | Callable[[SequencerScript], Any]


def other_id(script: SequencerScript) -> None:
    """Let the publisher announce another publisher id, as after its restart."""
    script.sequencer.publisher_changed(script.now)
    script.after(tick(0.0))


def expire(script: SequencerScript) -> None:
    script.sequencer.expire()


def two_publishers(script: SequencerScript) -> None:
    while script.state is not State.CONFLICT:
        script.epoch += 1
        script.after(live(0))


def no_buffer(script: SequencerScript) -> None:
    """Let the publisher answer two replay requests with END only, although it sends a live batch after each answer.

    So the publisher seems to have no replay buffer. kvbus sends the requests because the publisher was silent.
    """
    for seq in (3, 4):
        script.after(tick(1.5), replay_end(), live(seq))


BACK: list[Act] = [down(), up()]
SILENCE: list[Act] = [tick(2.0)] * ATTEMPTS
LATE: list[Act] = [up(), replayed(0), replayed(1), replayed(2)]
NO_GAP_SNAPSHOT: list[Act] = [up(), snapshot(4), *map(live, range(5, 8)), live(10)]
TWO_ANSWERS: list[Act] = [happens for _ in range(ATTEMPTS) for happens in (*map(replayed, range(5, 8)), replay_end())]


def fresh(*acts: Act, **settings: Any) -> tuple[SequencerScript, list[Act]]:
    return SequencerScript(**({"probe_interval": 0.0} | settings)), list(acts)


def after(count: int, *acts: Act, **settings: Any) -> tuple[SequencerScript, list[Act]]:
    return in_sync(count, **({"probe_interval": 0.0} | settings)), list(acts)


def of_the_answers(script: SequencerScript) -> None:
    script.epoch = 0


def of_another(script: SequencerScript) -> None:
    script.epoch = 1


ONCE: list[Act] = [of_another, live(2), of_the_answers, *map(replayed, range(2))]
TWICE: list[Act] = [of_another, live(4), of_the_answers, *map(replayed, range(3))]
OF_ANOTHER: list[Act] = [*ONCE, *TWICE, of_another, live(5), live(6), tick(0.0), tick(2.5)]
"""The live stream has other batches than the answers, and kvbus compares them."""

Made = tuple[SequencerScript, list[Act]]

IN: dict[Phase, Callable[[], Made]] = {
    Phase.WAITING: lambda: fresh(up(), replay=False),
    Phase.SYNC: lambda: fresh(up()),
    Phase.SNAPSHOT: lambda: fresh(up(), snapshot=True),
    Phase.VERIFY: lambda: after(3, *BACK),
    Phase.CATCH_UP: lambda: after(3, *BACK, replayed(2)),
    Phase.LIVE: lambda: after(3),
    Phase.PROBE: lambda: after(3, tick(1.5), probe_interval=1.0),
    Phase.BACKFILL: lambda: after(3, live(5), *SILENCE),
    Phase.RECHECK: lambda: after(LONG, live(3)),
    Phase.COMPARE: lambda: after(3, *OF_ANOTHER),
    Phase.GAP: lambda: after(3, live(5)),
    Phase.GAP_SNAPSHOT: lambda: fresh(*NO_GAP_SNAPSHOT, *TWO_ANSWERS, snapshot=True),
    Phase.GRACE: lambda: after(3, live(5), replay=False),
    Phase.CONFLICT: lambda: after(1, two_publishers),
}
"""For each phase with a connection, a function that returns a new script in this phase."""

COMPACTED: dict[str, Any] = {"snapshot": True, "compacted": True, "on_lost": "keep"}
NO_REPLAY: dict[str, Any] = {"snapshot": True, "replay": False}
ONLY_COVERED: list[Act] = [up(), snapshot(4), replay_end(), down()]

Transition = tuple[Phase, Input, Phase]


def then(phase: Phase, *acts: Act) -> Callable[[], Made]:
    def make() -> Made:
        script, before = IN[phase]()
        return script, [*before, *acts]

    return make


GRACE_AWAY: list[Act] = [live(5), down()]

CASES: dict[Transition, Callable[[], Made]] = {
    (Phase.AWAY, Input.UP, Phase.FRESH): lambda: fresh(up()),
    (Phase.AWAY, Input.UP, Phase.VERIFY): lambda: after(3, *BACK),
    (Phase.AWAY, Input.UP, Phase.LIVE): lambda: after(3, *BACK, replay=False, on_lost="keep"),
    (Phase.AWAY, Input.UP, Phase.SNAPSHOT): lambda: fresh(*ONLY_COVERED, up(), **COMPACTED),
    (Phase.AWAY, Input.DOWN, Phase.AWAY): lambda: fresh(down()),
    (Phase.AWAY, Input.NEW_EPOCH, Phase.AWAY): lambda: after(3, down(), other_id),
    (Phase.AWAY, Input.GRACE_OVER, Phase.AWAY): lambda: after(3, *GRACE_AWAY, tick(0.3), replay=False),
    (Phase.AWAY, Input.EXPIRED, Phase.LOST): lambda: fresh(expire),
    (Phase.LOST, Input.UP, Phase.FRESH): lambda: fresh(expire, up()),
    (Phase.LOST, Input.UP, Phase.VERIFY): lambda: after(3, down(), expire, up()),
    (Phase.LOST, Input.UP, Phase.LIVE): lambda: after(3, down(), expire, up(), replay=False, on_lost="keep"),
    (Phase.LOST, Input.UP, Phase.SNAPSHOT): lambda: fresh(*ONLY_COVERED, expire, up(), **NO_REPLAY),
    (Phase.LOST, Input.DOWN, Phase.LOST): lambda: fresh(expire, down()),
    (Phase.LOST, Input.NEW_EPOCH, Phase.LOST): lambda: after(3, down(), expire, other_id),
    (Phase.LOST, Input.GRACE_OVER, Phase.LOST): lambda: after(3, *GRACE_AWAY, expire, tick(0.3), replay=False),
    (Phase.LOST, Input.EXPIRED, Phase.LOST): lambda: fresh(expire, expire),
    **{(phase, Input.DOWN, Phase.AWAY): then(phase, down()) for phase in CONNECTED},
    **{
        (phase, Input.NEW_EPOCH, Phase.FRESH): then(phase, other_id)
        for phase in CONNECTED
        if phase is not Phase.CONFLICT
    },
    (Phase.FRESH, Input.BEGIN, Phase.CONFLICT): IN[Phase.CONFLICT],
    (Phase.FRESH, Input.BEGIN, Phase.WAITING): IN[Phase.WAITING],
    (Phase.FRESH, Input.BEGIN, Phase.SNAPSHOT): IN[Phase.SNAPSHOT],
    (Phase.FRESH, Input.BEGIN, Phase.SYNC): IN[Phase.SYNC],
    (Phase.CONFLICT, Input.PAUSE_OVER, Phase.FRESH): then(Phase.CONFLICT, tick(FIRST_PAUSE)),
    (Phase.WAITING, Input.FIRST, Phase.LIVE): then(Phase.WAITING, live(7)),
    (Phase.SYNC, Input.FIRST, Phase.LIVE): then(Phase.SYNC, live(0)),
    (Phase.SNAPSHOT, Input.FIRST, Phase.LIVE): then(Phase.SNAPSHOT, live(0)),
    (Phase.SYNC, Input.ANSWERED, Phase.LIVE): then(Phase.SYNC, replay_end()),
    (Phase.SYNC, Input.CAUGHT_UP, Phase.LIVE): then(Phase.SYNC, live(1), replayed(0)),
    (Phase.SYNC, Input.SILENT, Phase.SYNC): then(Phase.SYNC, tick(2.0)),
    (Phase.SYNC, Input.SILENT, Phase.LIVE): then(Phase.SYNC, *SILENCE),
    (Phase.SYNC, Input.ABORTED, Phase.SYNC): then(Phase.SYNC, replay_aborted()),
    (Phase.SNAPSHOT, Input.COVERED, Phase.LIVE): then(Phase.SNAPSHOT, snapshot(41)),
    (Phase.SNAPSHOT, Input.UNAVAILABLE, Phase.SYNC): then(Phase.SNAPSHOT, snapshot(-2)),
    (Phase.SNAPSHOT, Input.COVERED, Phase.PROBE): lambda: fresh(up(), snapshot(4), **COMPACTED),
    (Phase.SNAPSHOT, Input.UNAVAILABLE, Phase.LIVE): lambda: fresh(up(), snapshot(-2), **NO_REPLAY),
    (Phase.SNAPSHOT, Input.SILENT, Phase.SNAPSHOT): lambda: fresh(up(), tick(10.0), **NO_REPLAY),
    (Phase.VERIFY, Input.CONFIRMED, Phase.CATCH_UP): then(Phase.VERIFY, replayed(2)),
    (Phase.VERIFY, Input.ANSWERED, Phase.LIVE): lambda: fresh(
        up(), live(0), live(1), live(2), no_buffer, *BACK, replay_end(), probe_interval=1.0
    ),
    (Phase.VERIFY, Input.SILENT, Phase.VERIFY): then(Phase.VERIFY, tick(2.0)),
    (Phase.VERIFY, Input.SILENT, Phase.LIVE): lambda: after(3, *BACK, *SILENCE, on_lost="keep"),
    (Phase.VERIFY, Input.SILENT, Phase.SNAPSHOT): lambda: fresh(
        up(), snapshot(-2), replayed(0), replay_end(), *BACK, *SILENCE, **COMPACTED
    ),
    (Phase.CATCH_UP, Input.ANSWERED, Phase.LIVE): then(Phase.CATCH_UP, replay_end()),
    (Phase.CATCH_UP, Input.ABORTED, Phase.GAP): then(Phase.CATCH_UP, replay_aborted()),
    (Phase.CATCH_UP, Input.ABORTED, Phase.SYNC): lambda: fresh(*LATE, *BACK, replayed(2), replay_aborted()),
    (Phase.LIVE, Input.PROBE_DUE, Phase.PROBE): IN[Phase.PROBE],
    (Phase.LIVE, Input.BACKFILL_DUE, Phase.BACKFILL): IN[Phase.BACKFILL],
    (Phase.LIVE, Input.STALE, Phase.RECHECK): IN[Phase.RECHECK],
    (Phase.LIVE, Input.HOLE, Phase.GAP): IN[Phase.GAP],
    (Phase.LIVE, Input.HOLE, Phase.GAP_SNAPSHOT): IN[Phase.GAP_SNAPSHOT],
    (Phase.LIVE, Input.HOLE, Phase.GRACE): IN[Phase.GRACE],
    (Phase.PROBE, Input.STALE, Phase.RECHECK): lambda: after(LONG, tick(1.5), live(3), probe_interval=1.0),
    (Phase.PROBE, Input.HOLE, Phase.GAP): then(Phase.PROBE, live(5)),
    (Phase.PROBE, Input.ABORTED, Phase.GAP): then(Phase.PROBE, *map(replayed, range(3)), replay_aborted()),
    (Phase.PROBE, Input.ANSWERED, Phase.LIVE): then(Phase.PROBE, *map(replayed, range(3)), replay_end()),
    (Phase.PROBE, Input.SILENT, Phase.LIVE): then(Phase.PROBE, tick(2.0)),
    (Phase.PROBE, Input.CAUGHT_UP, Phase.LIVE): lambda: after(
        3, tick(1.5), live(3), probe_interval=1.0, compacted=True
    ),
    (Phase.BACKFILL, Input.STALE, Phase.RECHECK): lambda: after(LONG, live(LONG + 2), *SILENCE, live(3)),
    (Phase.BACKFILL, Input.HOLE, Phase.GAP): then(Phase.BACKFILL, live(8)),
    (Phase.BACKFILL, Input.ABORTED, Phase.GAP): lambda: after(3, *BACK, *SILENCE, *SILENCE, replay_aborted()),
    (Phase.BACKFILL, Input.ANSWERED, Phase.LIVE): then(Phase.BACKFILL, replayed(5)),
    (Phase.BACKFILL, Input.SILENT, Phase.LIVE): then(Phase.BACKFILL, tick(2.0)),
    (Phase.RECHECK, Input.ANSWERED, Phase.LIVE): then(Phase.RECHECK, replayed(LONG - 1), replay_end()),
    (Phase.RECHECK, Input.SILENT, Phase.RECHECK): then(Phase.RECHECK, tick(2.0)),
    (Phase.RECHECK, Input.SILENT, Phase.LIVE): lambda: after(LONG, live(3), *SILENCE, on_lost="keep"),
    (Phase.RECHECK, Input.SILENT, Phase.SNAPSHOT): lambda: fresh(
        up(), snapshot(-1), replay_end(), *map(live, range(LONG)), live(3), *SILENCE, **COMPACTED
    ),
    (Phase.RECHECK, Input.ABORTED, Phase.GAP): then(
        Phase.RECHECK, *map(replayed, range(LONG - OVERLAP, LONG)), replay_aborted()
    ),
    (Phase.LIVE, Input.COMPARE_DUE, Phase.COMPARE): IN[Phase.COMPARE],
    (Phase.COMPARE, Input.ANSWERED, Phase.LIVE): then(Phase.COMPARE, replayed(5), replayed(6), replay_end()),
    (Phase.COMPARE, Input.SILENT, Phase.LIVE): then(Phase.COMPARE, tick(2.0)),
    (Phase.GAP, Input.ANSWERED, Phase.LIVE): then(Phase.GAP, *map(replayed, range(3)), replay_end()),
    (Phase.GAP, Input.SILENT, Phase.LIVE): then(Phase.GAP, tick(2.0)),
    (Phase.GAP, Input.CAUGHT_UP, Phase.LIVE): then(Phase.GAP, replayed(3), replayed(4)),
    (Phase.GAP, Input.ABORTED, Phase.GAP): then(Phase.GAP, *map(replayed, range(3)), replay_aborted()),
    (Phase.GAP_SNAPSHOT, Input.COVERED, Phase.LIVE): then(Phase.GAP_SNAPSHOT, snapshot(10)),
    (Phase.GAP_SNAPSHOT, Input.CAUGHT_UP, Phase.LIVE): then(Phase.GAP_SNAPSHOT, live(8), live(9)),
    (Phase.GAP_SNAPSHOT, Input.UNAVAILABLE, Phase.LIVE): then(Phase.GAP_SNAPSHOT, snapshot(-2)),
    (Phase.GAP_SNAPSHOT, Input.SILENT, Phase.GAP_SNAPSHOT): lambda: fresh(
        up(), snapshot(4), live(6), tick(10.0), **NO_REPLAY
    ),
    (Phase.GRACE, Input.FILLED, Phase.LIVE): then(Phase.GRACE, live(3), live(4)),
    (Phase.GRACE, Input.GRACE_OVER, Phase.LIVE): then(Phase.GRACE, tick(0.3)),
}


@pytest.fixture(name="taken")
def _taken(monkeypatch: pytest.MonkeyPatch) -> list[Transition]:
    """Return a list to which each transition that the sequencer makes in a test is added."""
    taken: list[Transition] = []

    def watched(phase: Phase, cause: Input, holds: Callable[[Guard], bool]) -> Phase:
        target = step(phase, cause, holds)
        taken.append((phase, cause, target))
        return target

    monkeypatch.setattr(phases, "step", watched)
    return taken


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_each_case_causes_its_transition(case: Transition, taken: list[Transition]) -> None:
    script, acts = CASES[case]()
    for act in acts:
        taken.clear()
        if isinstance(act, Happens):
            script.after(act)
        else:
            act(script)
    assert case in taken, script.sequencer.phase


def test_the_cases_are_exactly_the_transitions_of_the_table() -> None:
    assert set(CASES) == {(phase, cause, target) for phase, cause, _, target in transitions()}


def test_an_input_that_a_phase_does_not_expect_is_refused() -> None:
    refused = [(phase, cause) for phase, cause in product(Phase, Input) if (phase, cause) not in TABLE]
    assert len(refused) > 200
    for phase, cause in refused:
        with pytest.raises(RefusedError, match=f"the input {cause} cannot come in the phase {phase}$"):
            step(phase, cause, lambda _: True)


def test_the_last_target_of_an_input_has_no_condition() -> None:
    for phase, cause in TABLE:
        assert step(phase, cause, lambda _: False) is TABLE[phase, cause][-1][1]


@pytest.mark.parametrize("phase", Phase)
def test_each_phase_with_an_open_request_has_handlers_for_its_answer(phase: Phase) -> None:
    about = PHASES[phase]
    assert bool(about.batch) == bool(about.at_end) == (phase in REQUESTS or phase is Phase.CATCH_UP)
    assert all(hasattr(Requests, name) for name in (about.batch, about.at_end) if name)


@pytest.mark.parametrize(("snapshots", "phase"), [(True, Phase.GAP_SNAPSHOT), (False, Phase.BACKFILL)])
def test_the_sequencer_continues_after_an_interrupted_unconfirmed_answer(snapshots: bool, phase: Phase) -> None:
    script, _ = fresh(**COMPACTED | {"snapshot": snapshots})
    script.after(up())
    if snapshots:
        script.after(snapshot(-2))
    script.after(replayed(0), *[tick(2.0)] * (1 + 2 * ATTEMPTS))
    assert script.sequencer.phase is phase


def test_a_subscriber_without_history_waits_for_the_first_batch() -> None:
    script, _ = fresh(from_now=True)
    script.after(up())
    assert script.sequencer.phase is Phase.WAITING
