"""The sequencer's phases and what leads from one to another, as a table.

A phase says what is waited for, so also which request is open and how the source is shown. What happens is put into one
word, an :class:`Input`, before it gets here. A pair of phase and input that is not in :data:`TABLE` cannot happen, and
is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Final

from kvbus.core.sequencing.replay_requests import Purpose


class State(StrEnum):
    """What ``/sources`` and ``kvbus_source_state`` show."""

    CONNECTING = "connecting"
    SYNCING = "syncing"
    LIVE = "live"
    GAP = "gap"
    LOST = "lost"
    CONFLICT = "conflict"


class Phase(StrEnum):
    """What a sequencer waits for."""

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
    GAP = "gap"
    GAP_SNAPSHOT = "gap_snapshot"
    GRACE = "grace"
    CONFLICT = "conflict"


class Input(StrEnum):
    """What has happened to a sequencer, as far as its phase goes."""

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
    GRACE_OVER = "grace over"
    PAUSE_OVER = "pause over"


class Guard(StrEnum):
    """What decides between two targets of one input."""

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
    """An input that cannot come in this phase: a defect of the sequencer, whatever a peer has sent."""


MEANING: Final[dict[Phase, tuple[State, Purpose | None, str]]] = {
    Phase.AWAY: (State.CONNECTING, None, "there is no connection, or there never was"),
    Phase.LOST: (State.LOST, None, "there is none for `source_timeout`"),
    Phase.FRESH: (State.SYNCING, None, "an epoch begins of which nothing is known; passed through at once"),
    Phase.WAITING: (State.LIVE, None, "there is no replay: the epoch begins with the next batch"),
    Phase.SYNC: (State.SYNCING, Purpose.SYNC, "the history is replayed; live batches wait"),
    Phase.SNAPSHOT: (State.SYNCING, Purpose.SNAPSHOT, "the epoch begins with a snapshot; live batches wait"),
    Phase.VERIFY: (State.SYNCING, Purpose.VERIFY, "connected again: nothing is delivered before the epoch is known"),
    Phase.CATCH_UP: (State.SYNCING, None, "it is the same epoch, and the same answer brings what was missed"),
    Phase.LIVE: (State.LIVE, None, "everything known of is delivered"),
    Phase.PROBE: (State.LIVE, Purpose.PROBE, "the stream is silent: its last batches may be lost"),
    Phase.BACKFILL: (State.LIVE, Purpose.HISTORY, "history that nobody answered for is asked for again"),
    Phase.RECHECK: (State.LIVE, Purpose.VERIFY, "stale batches have come: is it still the same epoch?"),
    Phase.GAP: (State.GAP, Purpose.GAP, "a batch is missing; later ones wait"),
    Phase.GAP_SNAPSHOT: (State.GAP, Purpose.SNAPSHOT, "the replay does not have it: a snapshot would cover it"),
    Phase.GRACE: (State.GAP, None, "a batch is missing, and there is no replay: it may only be late"),
    Phase.CONFLICT: (State.CONFLICT, None, "several publishers are on one endpoint: nothing is taken in for a while"),
}
"""How a phase is shown, what is asked when it is entered, and what it means."""

SHOWN: Final = {phase: shown for phase, (shown, _, _) in MEANING.items()}
ASKS: Final = {phase: purpose for phase, (_, purpose, _) in MEANING.items() if purpose is not None}

SEPARATED: Final = (Phase.AWAY, Phase.LOST)
"""The phases without a connection."""

CONNECTED: Final = tuple(phase for phase in Phase if phase not in (*SEPARATED, Phase.FRESH))

UNHURRIED: Final = (Phase.LIVE, Phase.PROBE, Phase.BACKFILL)
"""Nothing waits for the open request, if there is one: a more urgent one takes its place."""

Targets = tuple[tuple[Guard, Phase], ...]


def to(phase: Phase) -> Targets:
    """The only target of an input."""
    return ((Guard.ALWAYS, phase),)


ROWS: Final[tuple[tuple[tuple[Phase, ...], tuple[Input, ...], Targets], ...]] = (
    # The connection.
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
    # The beginning of an epoch.
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
    # After a reconnection.
    ((Phase.VERIFY,), (Input.CONFIRMED,), to(Phase.CATCH_UP)),
    ((Phase.VERIFY,), (Input.ANSWERED,), to(Phase.LIVE)),
    (
        (Phase.VERIFY,),
        (Input.SILENT,),
        ((Guard.ONCE_MORE, Phase.VERIFY), (Guard.SPENT, Phase.SNAPSHOT), (Guard.ALWAYS, Phase.LIVE)),
    ),
    ((Phase.CATCH_UP,), (Input.ANSWERED,), to(Phase.LIVE)),
    ((Phase.CATCH_UP,), (Input.ABORTED,), ((Guard.SYNCED, Phase.GAP), (Guard.ALWAYS, Phase.SYNC))),
    # The stream runs.
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
    # A batch is missing.
    ((Phase.GAP,), (Input.ANSWERED, Input.SILENT, Input.CAUGHT_UP), to(Phase.LIVE)),
    ((Phase.GAP,), (Input.ABORTED,), to(Phase.GAP)),
    ((Phase.GAP_SNAPSHOT,), (Input.COVERED, Input.CAUGHT_UP, Input.UNAVAILABLE), to(Phase.LIVE)),
    ((Phase.GAP_SNAPSHOT,), (Input.SILENT,), to(Phase.GAP_SNAPSHOT)),
    ((Phase.GRACE,), (Input.FILLED, Input.GRACE_OVER), to(Phase.LIVE)),
)
"""Phases, inputs, and where these lead from those: the first target whose guard holds."""

TABLE: Final = {(phase, cause): targets for phases, causes, targets in ROWS for phase in phases for cause in causes}


def step(phase: Phase, cause: Input, holds: Callable[[Guard], bool]) -> Phase:
    """Where ``cause`` leads from ``phase``. ``holds`` says whether a guard holds.

    Raises:
        RefusedError: this input cannot come in this phase.
    """
    for guard, target in TABLE.get((phase, cause), ()):
        if guard is Guard.ALWAYS or holds(guard):
            return target
    raise RefusedError(f"the input {cause} cannot come in the phase {phase}")
