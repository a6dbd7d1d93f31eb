"""Counters of sources and outputs, as plain integers: the relay increments them, and a scrape reads them."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from enum import StrEnum

import msgspec


class SourceStats(msgspec.Struct):
    """What one source has sent and what became of it.

    ``missing == recovered + lost + pending`` at every moment. ``pending`` is no counter: the sequencer knows which
    numbers are open.
    """

    # What has come on the live stream.
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
    """Requests that were not sent at once, because others went first."""
    held_overflow: int = 0
    stale_replies: int = 0
    timeouts: int = 0

    # Normalizing.
    rebuilds: int = 0
    reannounced: int = 0
    """Stores of several blocks from the root on that were all live: hits announced again, or real copies."""
    most_copies: int = 0
    """The most copies of one block beyond its first, ever."""

    # What was not taken, by reason.
    rejected: Counter[str] = msgspec.field(default_factory=Counter)
    filtered: Counter[str] = msgspec.field(default_factory=Counter)
    refused: Counter[str] = msgspec.field(default_factory=Counter)
    """Handshakes of the connection to the engine that failed, by reason."""

    def copy(self) -> SourceStats:
        """Return the counters as they are now."""
        rejected, filtered, refused = self.rejected.copy(), self.filtered.copy(), self.refused.copy()
        return msgspec.structs.replace(self, rejected=rejected, filtered=filtered, refused=refused)


class NumberingStats(msgspec.Struct):
    """What the relay counts of one output, before any driver gets it."""

    heartbeats: int = 0
    malformed: int = 0
    """Requests without even an identity: nobody can be answered."""
    other_group: int = 0
    """Events that are left out, because the output's routers take one group."""
    not_read: int = 0
    """Stores that are left out, because the output's routers may not read them."""
    undecided: int = 0
    """Stores that are left out, because their parents are unknown, and so whether the routers may read them."""


class OutputStats(msgspec.Struct):
    """What one output's driver has sent and what it could not send."""

    parts: frozenset[str] = frozenset()
    """The optional parts that the output has, of: log, dynamo, interpose, replay, keys."""

    # The live stream.
    batches: int = 0
    events: int = 0
    bytes: int = 0
    subscribers: int = 0
    routers: int = 0
    """Connected routers, whatever they have subscribed to."""
    router_disconnects: Counter[str] = msgspec.field(default_factory=Counter)
    """By reason, whoever ended the connection."""
    router_states: Counter[str] = msgspec.field(default_factory=Counter)
    """How often a router came into each state."""
    publishers: int = 0
    """Connected engines, at ports where they and routers both dial in."""
    publishers_limit: int = 0
    publishers_accepted: int = 0
    states_sent: Counter[str] = msgspec.field(default_factory=Counter)
    """By reason: subscribed, lost. One for each router."""
    state_bytes: int = 0
    """Bytes of the states that were appended to a log, as they stand there."""
    streams_written: int = 0
    """Streams that a log takes."""
    states_overdue: int = 0
    """Streams whose newest state in a log is late."""
    streams_fenced: int = 0
    """Streams of a log that this kvbus writes no more: another writer has them, or they were erased."""
    records_gone: int = 0
    """Records of Dynamo's discovery that somebody else took away or replaced, and that were put back."""
    queue_depth: int = 0
    queue_limit: int = 0
    router_queue_limit: int = 0
    """The most batches that may wait for one router."""
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
    """One router of an output, for people.

    Attributes:
        stream: the stream's slot.
        peer: address of the router's end.
        since: time of day at which the connection was opened, in seconds.
        topics: subscribed prefixes, the first few of them and the beginning of each.
        subscriptions: how many there are.
        state: the driver's word for where the router stands.
        states_sent: how often it got the state.
        state_sent_at: time of day of the last one.
        queued_batches: batches that wait for it.
        queued_bytes: bytes on their way that its kernel has not acknowledged.
        behind_seconds: how long the oldest batch that it has not got has been published.
        dropped_batches: batches that it did not get.
        dropped_events: events in those.
        left: why the connection ended; None while it stands.
        left_at: time of day at which it ended.
        name: of its key's owner; empty where it has none.
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


class Histogram:
    """Counts per bucket, as Prometheus wants them; observing costs one bisection."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Take in a value in the histogram's unit (seconds)."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class HttpRefusal(StrEnum):
    """Why an HTTP request was refused."""

    PEER = "peer"
    FORWARDED = "forwarded"
    HOST = "host"
    CROSS_SITE = "cross_site"
    TOKEN = "token"
    RIGHTS = "rights"
    BUSY = "busy"


class ProcessStats:
    """What concerns the process as a whole; histograms in seconds."""

    def __init__(self) -> None:
        self.state_writing: bool | None = None
        """Whether kvbus writes its state to ``state_dir``; None without one, False after writing failed."""
        self.state_refused = 0
        """Files of a saved state that could not be used and were moved aside."""
        self.http_connections = 0
        """HTTP connections that are open."""
        self.http_dumps = 0
        """Answers of ``/blocks`` under way."""
        self.http_listeners = 0
        """Clients of ``/events``."""
        self.http_closed: Counter[str] = Counter()
        """HTTP connections closed on the client, by reason: too_many, slow."""
        self.http_refused: Counter[HttpRefusal] = Counter()
        """Requests for content that were refused."""
        self.config_reloads: Counter[str] = Counter()
        """By outcome: applied, refused."""
        self.config_refused: list[str] = []
        """The keys for which the newest configuration was refused; none while it is in force."""
        self.key_reloads: Counter[str] = Counter()
        """Key files that changed beside the configuration, by outcome."""
        self.views_limit = 0
        """The most different rights that owners of keys may have."""
        self.slots_present = self.slots_gone = self.slots_limit = 0
        """Sources, all ranks counted, that have a slot; and the most of them."""
        self.slots_reused = 0
        """Sources that are gone and whose place another one needed."""
        self.batch_age = Histogram(
            (1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
        )
        self.relay_latency = Histogram((2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2, 0.25, 1.0))
        self.loop_lag = Histogram((1e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.5, 2.0))
