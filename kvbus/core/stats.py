"""Counters of sources and outputs, as plain integers: the relay increments them, and a scrape reads them."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from enum import StrEnum

import msgspec


class SourceStats(msgspec.Struct):
    """Counts of the batches and events of one source, and how they were handled.

    ``missing == recovered + lost + pending`` at every moment. ``pending`` is not a counter: the sequencer knows which
    numbers are open.
    """

    # The live stream.
    batches: int = 0
    bytes: int = 0
    stored: int = 0
    removed: int = 0
    cleared: int = 0
    last_batch: float = 0.0

    # Sequencing.
    gaps: int = 0
    missing: int = 0
    recovered: int = 0
    lost: int = 0
    duplicates: int = 0
    restarts: int = 0
    replays: int = 0
    replay_timeouts: int = 0
    requests_failed: int = 0
    """Attempts to send a request that failed in this process."""
    requests_waited: int = 0
    """Requests that were queued after other requests."""
    held_overflow: int = 0
    stale_replies: int = 0
    timeouts: int = 0

    # Normalizing.
    rebuilds: int = 0
    reannounced: int = 0
    """Stores of several blocks from the root on that were all live: announced cache hits, or real copies."""
    most_copies: int = 0
    """The highest number of copies that one block has had, not counting the first."""

    # Batches and events that were rejected or filtered, by reason.
    rejected: Counter[str] = msgspec.field(default_factory=Counter)
    filtered: Counter[str] = msgspec.field(default_factory=Counter)
    refused: Counter[str] = msgspec.field(default_factory=Counter)
    """Failed handshakes of the connection to the engine, by reason."""

    def copy(self) -> SourceStats:
        """Return a copy of the counters."""
        rejected, filtered, refused = self.rejected.copy(), self.filtered.copy(), self.refused.copy()
        return msgspec.structs.replace(self, rejected=rejected, filtered=filtered, refused=refused)


class NumberingStats(msgspec.Struct):
    """Counts of one output in the relay, before any driver gets the batches."""

    heartbeats: int = 0
    malformed: int = 0
    """Requests without even an identity: they cannot be answered."""
    other_group: int = 0
    """Events that are left out because the output's routers accept only one group."""
    not_read: int = 0
    """Stores that are left out because the output's routers may not read them."""
    undecided: int = 0
    """Stores that are left out because their parents are unknown, so kvbus cannot tell whether routers may read
    them."""


class OutputStats(msgspec.Struct):
    """Counts of what one output's driver has sent or failed to send."""

    parts: frozenset[str] = frozenset()
    """The optional parts that the output has, of: log, dynamo, interpose, replay, keys."""

    # The live stream.
    batches: int = 0
    events: int = 0
    bytes: int = 0
    subscribers: int = 0
    routers: int = 0
    """Connected routers, with or without subscriptions."""
    router_disconnects: Counter[str] = msgspec.field(default_factory=Counter)
    """By reason, whichever side ended the connection."""
    router_states: Counter[str] = msgspec.field(default_factory=Counter)
    """How often a router entered each state."""
    publishers: int = 0
    """Connected engines, at ports to which engines and routers both connect."""
    publishers_limit: int = 0
    publishers_accepted: int = 0
    states_sent: Counter[str] = msgspec.field(default_factory=Counter)
    """By reason: subscribed, lost. A state is counted once for each router."""
    state_bytes: int = 0
    """Bytes of the states that were appended to a log, as stored there."""
    streams_written: int = 0
    """Number of streams that are written to a log."""
    states_overdue: int = 0
    """Streams whose newest state in a log is overdue."""
    streams_fenced: int = 0
    """Streams of a log that this kvbus no longer writes: another writer has taken over, or they were erased."""
    records_gone: int = 0
    """Records of Dynamo's discovery that another process deleted or replaced, and that kvbus restored."""
    queue_depth: int = 0
    queue_limit: int = 0
    router_queue_limit: int = 0
    """Maximum number of batches that may wait for one router."""
    dropped_batches: Counter[str] = msgspec.field(default_factory=Counter)
    dropped_events: Counter[str] = msgspec.field(default_factory=Counter)
    refused: Counter[str] = msgspec.field(default_factory=Counter)

    # Replay answers.
    replay_requests: Counter[str] = msgspec.field(default_factory=Counter)
    replay_batches: int = 0
    replay_sessions: int = 0
    replay_sessions_limit: int = 0
    replay_waiting: int = 0
    replay_waiting_limit: int = 0


class RouterView(msgspec.Struct, frozen=True):
    """One router of an output, for display.

    Attributes:
        stream: the stream's slot.
        peer: address of the router's end.
        since: time of day at which the connection was opened, in seconds.
        topics: the first few subscribed prefixes, each shortened.
        subscriptions: number of subscriptions.
        state: the router's state, as the driver names it.
        states_sent: how often the router got the state of the stream.
        state_sent_at: time of day of the last time.
        queued_batches: batches that wait for the router.
        queued_bytes: bytes in transit that the router's kernel has not acknowledged.
        behind_seconds: age of the oldest batch that the router lacks.
        dropped_batches: batches that the router did not get.
        dropped_events: events in these batches.
        left: why the connection ended; None while it exists.
        left_at: time of day at which it ended.
        name: name of the key's owner; empty if there is none.
        dropped_at: time of day of the last drop; None if there was none.
    """

    stream: int
    peer: str
    since: float
    topics: list[str]
    subscriptions: int
    state: str
    states_sent: int
    state_sent_at: float | None
    queued_batches: int
    queued_bytes: int
    behind_seconds: float
    dropped_batches: int
    dropped_events: int
    left: str | None = None
    left_at: float | None = None
    name: str = ""
    dropped_at: float | None = None


class Histogram:
    """Counts per bucket, as Prometheus expects them. An observation costs one bisection."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value in the histogram's unit (seconds)."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class HttpRefusal(StrEnum):
    """The reason why an HTTP request was refused."""

    PEER = "peer"
    FORWARDED = "forwarded"
    HOST = "host"
    CROSS_SITE = "cross_site"
    TOKEN = "token"
    RIGHTS = "rights"
    BUSY = "busy"


class ProcessStats:
    """Counters of the process. Histograms are in seconds."""

    def __init__(self) -> None:
        self.state_writing: bool | None = None
        """Whether kvbus writes its state to ``state_dir``. None without a ``state_dir``, False after a failed write."""
        self.state_refused = 0
        """Files of a saved state that could not be used and were moved aside."""
        self.http_connections = 0
        """Open HTTP connections."""
        self.http_dumps = 0
        """Answers of ``/blocks`` in progress."""
        self.http_listeners = 0
        """Clients of ``/events``."""
        self.http_closed: Counter[str] = Counter()
        """HTTP connections that kvbus closed, by reason: too_many, slow."""
        self.http_refused: Counter[HttpRefusal] = Counter()
        """Refused requests for content."""
        self.config_reloads: Counter[str] = Counter()
        """By outcome: applied, refused."""
        self.config_refused: list[str] = []
        """The keys for which the newest configuration was refused; empty while it is in force."""
        self.key_reloads: Counter[str] = Counter()
        """Reloads of key files that changed independently of the configuration, by outcome."""
        self.views_limit = 0
        """Maximum number of different rights among owners of keys."""
        self.slots_present = self.slots_gone = self.slots_limit = 0
        """Sources with a slot (each rank counts), present and gone, and their maximum number."""
        self.slots_reused = 0
        """Sources that are gone and whose slot another source needed."""
        self.batch_age = Histogram(
            (1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
        )
        self.relay_latency = Histogram((2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2, 0.25, 1.0))
        self.loop_lag = Histogram((1e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.5, 2.0))
