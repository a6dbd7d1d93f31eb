"""The sequencer's phases, the transitions between them, and the handlers of answers in each phase, as tables.

A phase determines what the sequencer waits for, which request is open, and which state of the source the operator sees.
Every occurrence becomes an :class:`Input`. :data:`TABLE` has every pair of phase and input that can occur. Any other
pair is a defect of the code, and raises an error. :data:`PHASES` names the method that evaluates an answer in each
phase.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Final, NamedTuple


class State(StrEnum):
    """The state of a source, as ``/sources`` and the metric ``kvbus_source_state`` show it."""

    CONNECTING = "connecting"
    SYNCING = "syncing"
    LIVE = "live"
    GAP = "gap"
    LOST = "lost"
    CONFLICT = "conflict"


class Purpose(StrEnum):
    """The purpose of a request that kvbus sends to a publisher."""

    SYNC = "sync"
    SNAPSHOT = "snapshot"
    GAP = "gap"
    PROBE = "probe"
    VERIFY = "verify"
    HISTORY = "history"
    COMPARE = "compare"


class Phase(StrEnum):
    """The phase of a sequencer, which says what it waits for. :data:`PHASES` has the meaning of each phase."""

    AWAY = "away"
    LOST = "lost"
    FRESH = "fresh"
    WAITING = "waiting"
    SYNC = "sync"
    SNAPSHOT = "snapshot"
    VERIFY = "verify"
    CATCH_UP = "catch_up"
    LIVE = "live"
    PROBE = "probe"
    BACKFILL = "backfill"
    RECHECK = "recheck"
    COMPARE = "compare"
    GAP = "gap"
    GAP_SNAPSHOT = "gap_snapshot"
    GRACE = "grace"
    CONFLICT = "conflict"


class Input(StrEnum):
    """An occurrence that may change the phase of a sequencer."""

    UP = "up"
    DOWN = "down"
    EXPIRED = "expired"
    NEW_EPOCH = "new epoch"
    BEGIN = "begin"
    FIRST = "first batch"
    CONFIRMED = "confirmed"
    ANSWERED = "answered"
    SILENT = "silent"
    ABORTED = "aborted"
    CAUGHT_UP = "caught up"
    COVERED = "covered"
    UNAVAILABLE = "unavailable"
    HOLE = "hole"
    FILLED = "filled"
    STALE = "stale"
    PROBE_DUE = "probe due"
    BACKFILL_DUE = "backfill due"
    COMPARE_DUE = "compare due"
    GRACE_OVER = "grace over"
    PAUSE_OVER = "pause over"


class Guard(StrEnum):
    """A condition that decides which phase follows, if an input may lead to several phases."""

    ALWAYS = ""
    TRUSTED = "trusted"
    DELIVERED = "delivered"
    CROWDED = "crowded"
    NO_REPLAY = "no replay"
    FROM_NOW = "from now"
    UNKNOWN = "unknown"
    TAIL = "tail"
    SNAPSHOTS = "snapshots"
    ONCE_MORE = "once more"
    SYNCED = "synced"
    SPENT = "spent"


class RefusedError(AssertionError):
    """The error that is raised when an input comes which cannot occur in the sequencer's phase.

    It is a defect of the sequencer. No message of a peer may cause it.
    """


class PhaseInfo(NamedTuple):
    """The description of a phase of the sequencer.

    Attributes:
        shown: the state in which the source is shown to the operator.
        meaning: what the sequencer waits for in this phase, as a text for people.
        purpose: the purpose of the request that kvbus sends when the phase begins; None if it sends no request.
        batch: the name of the :class:`~kvbus.core.sequencing.answers.Requests` method that handles a batch of the
            answer.
        at_end: the name of the method of the same class that handles the end of the answer, or the lack of an answer.
    """

    shown: State
    meaning: str
    purpose: Purpose | None = None
    batch: str = ""
    at_end: str = ""


PHASES: Final[dict[Phase, PhaseInfo]] = {
    Phase.AWAY: PhaseInfo(State.CONNECTING, "there is no connection to the publisher"),
    Phase.LOST: PhaseInfo(State.LOST, "there has been no connection to the publisher for `source_timeout`"),
    Phase.FRESH: PhaseInfo(State.SYNCING, "a new epoch begins; the sequencer enters another phase immediately"),
    Phase.WAITING: PhaseInfo(State.LIVE, "there is no replay endpoint, so the epoch begins with the next live batch"),
    Phase.SYNC: PhaseInfo(
        State.SYNCING,
        "kvbus reads a replay of the epoch's history; live batches wait",
        Purpose.SYNC,
        "_take_batch",
        "_sync_over",
    ),
    Phase.SNAPSHOT: PhaseInfo(
        State.SYNCING,
        "kvbus reads a snapshot of the live blocks, with which the epoch begins; live batches wait",
        Purpose.SNAPSHOT,
        "_take_batch",
        "_snapshot_over",
    ),
    Phase.VERIFY: PhaseInfo(
        State.SYNCING,
        "after a reconnection, kvbus asks whether the epoch is the same; until it knows, it delivers no batch",
        Purpose.VERIFY,
        "_take_batch",
        "_verify_over",
    ),
    Phase.CATCH_UP: PhaseInfo(
        State.SYNCING,
        "the answer has shown that the epoch is the same; kvbus reads the missed batches in the rest of the answer",
        None,
        "_take_batch",
        "_verify_over",
    ),
    Phase.LIVE: PhaseInfo(State.LIVE, "every known batch is delivered"),
    Phase.PROBE: PhaseInfo(
        State.LIVE,
        "the stream is silent: kvbus asks whether its last batches were lost",
        Purpose.PROBE,
        "_take_batch",
        "_stream_over",
    ),
    Phase.BACKFILL: PhaseInfo(
        State.LIVE,
        "kvbus requests older batches again, because its first request got no answer",
        Purpose.HISTORY,
        "_take_first_of_history",
        "_history_over",
    ),
    Phase.RECHECK: PhaseInfo(
        State.LIVE,
        "live batches with very old seqs have come: kvbus asks whether the epoch is the same",
        Purpose.VERIFY,
        "_take_batch",
        "_verify_over",
    ),
    Phase.COMPARE: PhaseInfo(
        State.LIVE,
        "another publisher has the replay endpoint: kvbus compares its newest batches with the live stream",
        Purpose.COMPARE,
        "_compare",
        "_compared",
    ),
    Phase.GAP: PhaseInfo(
        State.GAP,
        "a batch is missing, and kvbus asks for it; later batches wait",
        Purpose.GAP,
        "_take_batch",
        "_stream_over",
    ),
    Phase.GAP_SNAPSHOT: PhaseInfo(
        State.GAP,
        "the replay lacks the missing batch: kvbus requests a snapshot that includes its effect",
        Purpose.SNAPSHOT,
        "_take_batch",
        "_snapshot_over",
    ),
    Phase.GRACE: PhaseInfo(
        State.GAP, "a batch is missing, and there is no replay endpoint: kvbus waits, because the batch may be late"
    ),
    Phase.CONFLICT: PhaseInfo(
        State.CONFLICT, "several publishers are on one endpoint: kvbus temporarily applies no batch"
    ),
}

REQUESTS: Final = {phase: about.purpose for phase, about in PHASES.items() if about.purpose is not None}

SEPARATED: Final = (Phase.AWAY, Phase.LOST)
"""The phases in which kvbus has no connection to the publisher."""

CONNECTED: Final = tuple(phase for phase in Phase if phase not in (*SEPARATED, Phase.FRESH))

UNHURRIED: Final = (Phase.LIVE, Phase.PROBE, Phase.BACKFILL)
"""Phases in which kvbus may close the open request to send a more urgent one. No received batch needs its answer."""

Targets = tuple[tuple[Guard, Phase], ...]


def to(phase: Phase) -> Targets:
    """Return the targets for a row of :data:`ROWS` whose inputs lead to one phase, without a condition."""
    return ((Guard.ALWAYS, phase),)


ROWS: Final[tuple[tuple[tuple[Phase, ...], tuple[Input, ...], Targets], ...]] = (
    # transitions when the connection to the publisher is lost or established
    (
        SEPARATED,
        (Input.UP,),
        (
            (Guard.TRUSTED, Phase.LIVE),
            (Guard.UNKNOWN, Phase.SNAPSHOT),
            (Guard.DELIVERED, Phase.VERIFY),
            (Guard.ALWAYS, Phase.FRESH),
        ),
    ),
    ((Phase.AWAY,), (Input.DOWN, Input.NEW_EPOCH, Input.GRACE_OVER), to(Phase.AWAY)),
    ((Phase.LOST,), (Input.DOWN, Input.NEW_EPOCH, Input.GRACE_OVER), to(Phase.LOST)),
    (SEPARATED, (Input.EXPIRED,), to(Phase.LOST)),
    (CONNECTED, (Input.DOWN,), to(Phase.AWAY)),
    # transitions at the beginning of an epoch
    (tuple(phase for phase in CONNECTED if phase is not Phase.CONFLICT), (Input.NEW_EPOCH,), to(Phase.FRESH)),
    ((Phase.CONFLICT,), (Input.PAUSE_OVER,), to(Phase.FRESH)),
    (
        (Phase.FRESH,),
        (Input.BEGIN,),
        (
            (Guard.CROWDED, Phase.CONFLICT),
            (Guard.FROM_NOW, Phase.WAITING),
            (Guard.SNAPSHOTS, Phase.SNAPSHOT),
            (Guard.NO_REPLAY, Phase.WAITING),
            (Guard.ALWAYS, Phase.SYNC),
        ),
    ),
    ((Phase.WAITING, Phase.SYNC, Phase.SNAPSHOT), (Input.FIRST,), to(Phase.LIVE)),
    ((Phase.SYNC,), (Input.ANSWERED, Input.CAUGHT_UP), to(Phase.LIVE)),
    ((Phase.SYNC,), (Input.SILENT,), ((Guard.ONCE_MORE, Phase.SYNC), (Guard.ALWAYS, Phase.LIVE))),
    ((Phase.SYNC,), (Input.ABORTED,), to(Phase.SYNC)),
    ((Phase.SNAPSHOT,), (Input.COVERED,), ((Guard.TAIL, Phase.PROBE), (Guard.ALWAYS, Phase.LIVE))),
    (
        (Phase.SNAPSHOT,),
        (Input.UNAVAILABLE,),
        ((Guard.NO_REPLAY, Phase.LIVE), (Guard.SYNCED, Phase.LIVE), (Guard.ALWAYS, Phase.SYNC)),
    ),
    ((Phase.SNAPSHOT,), (Input.SILENT,), to(Phase.SNAPSHOT)),
    # transitions after a reconnection, while kvbus asks whether the epoch is the same
    ((Phase.VERIFY,), (Input.CONFIRMED,), to(Phase.CATCH_UP)),
    ((Phase.VERIFY,), (Input.ANSWERED,), to(Phase.LIVE)),
    (
        (Phase.VERIFY,),
        (Input.SILENT,),
        ((Guard.ONCE_MORE, Phase.VERIFY), (Guard.SPENT, Phase.SNAPSHOT), (Guard.ALWAYS, Phase.LIVE)),
    ),
    ((Phase.CATCH_UP,), (Input.ANSWERED,), to(Phase.LIVE)),
    ((Phase.CATCH_UP,), (Input.ABORTED,), ((Guard.SYNCED, Phase.GAP), (Guard.ALWAYS, Phase.SYNC))),
    # transitions while all known batches are delivered
    ((Phase.LIVE,), (Input.PROBE_DUE,), to(Phase.PROBE)),
    ((Phase.LIVE,), (Input.BACKFILL_DUE,), to(Phase.BACKFILL)),
    (UNHURRIED, (Input.STALE,), to(Phase.RECHECK)),
    (
        (Phase.LIVE,),
        (Input.HOLE,),
        ((Guard.SPENT, Phase.GAP_SNAPSHOT), (Guard.NO_REPLAY, Phase.GRACE), (Guard.ALWAYS, Phase.GAP)),
    ),
    ((Phase.PROBE, Phase.BACKFILL), (Input.HOLE, Input.ABORTED), to(Phase.GAP)),
    ((Phase.PROBE, Phase.BACKFILL), (Input.ANSWERED, Input.SILENT), to(Phase.LIVE)),
    ((Phase.PROBE,), (Input.CAUGHT_UP,), to(Phase.LIVE)),
    ((Phase.RECHECK,), (Input.ANSWERED,), to(Phase.LIVE)),
    (
        (Phase.RECHECK,),
        (Input.SILENT,),
        ((Guard.ONCE_MORE, Phase.RECHECK), (Guard.SPENT, Phase.SNAPSHOT), (Guard.ALWAYS, Phase.LIVE)),
    ),
    ((Phase.RECHECK,), (Input.ABORTED,), to(Phase.GAP)),
    ((Phase.LIVE,), (Input.COMPARE_DUE,), to(Phase.COMPARE)),
    ((Phase.COMPARE,), (Input.ANSWERED, Input.SILENT), to(Phase.LIVE)),
    # transitions while a batch is missing
    ((Phase.GAP,), (Input.ANSWERED, Input.SILENT, Input.CAUGHT_UP), to(Phase.LIVE)),
    ((Phase.GAP,), (Input.ABORTED,), to(Phase.GAP)),
    ((Phase.GAP_SNAPSHOT,), (Input.COVERED, Input.CAUGHT_UP, Input.UNAVAILABLE), to(Phase.LIVE)),
    ((Phase.GAP_SNAPSHOT,), (Input.SILENT,), to(Phase.GAP_SNAPSHOT)),
    ((Phase.GRACE,), (Input.FILLED, Input.GRACE_OVER), to(Phase.LIVE)),
)
"""The transitions. Each row has phases, inputs, and the possible next phases, each with a condition (guard).

The sequencer enters the first next phase whose guard holds.
"""

TABLE: Final = {(phase, cause): targets for phases, causes, targets in ROWS for phase in phases for cause in causes}


def step(phase: Phase, cause: Input, holds: Callable[[Guard], bool]) -> Phase:
    """Return the phase that follows after the input ``cause`` in ``phase``.

    ``holds`` is a function that evaluates a guard.

    Raises:
        RefusedError: this input cannot occur in this phase.
    """
    for guard, target in TABLE.get((phase, cause), ()):
        if guard is Guard.ALWAYS or holds(guard):
            return target
    raise RefusedError(f"the input {cause} cannot come in the phase {phase}")
