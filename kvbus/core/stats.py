"""Counters of sources, outputs and the process. The relay and the daemon increment them, and metrics read them."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from enum import StrEnum

import msgspec


class SourceStats(msgspec.Struct):
    """Counters of the batches and events of one source, by how kvbus handled them.

    ``missing == recovered + lost + pending`` holds at every moment. ``pending``, the number of missing batches that may
    still come, is no field of this class: the sequencer knows it.
    """

    # Counters of the batches that arrived on the live stream, and of their events.
    batches: int = 0
    bytes: int = 0
    stored: int = 0
    removed: int = 0
    cleared: int = 0
    last_batch: float = 0.0

    # Counters of the sequencer: missing and repeated batches, and requests to the engine.
    gaps: int = 0
    missing: int = 0
    recovered: int = 0
    lost: int = 0
    duplicates: int = 0
    restarts: int = 0
    replays: int = 0
    replay_timeouts: int = 0
    requests_failed: int = 0
    """Number of attempts to send a request to the engine that failed inside this process."""
    requests_waited: int = 0
    """Number of requests to the engine that were queued after other requests before kvbus sent them."""
    held_overflow: int = 0
    stale_replies: int = 0
    timeouts: int = 0

    # Counters of the normalizer.
    rebuilds: int = 0
    reannounced: int = 0
    """Number of stores of at least two blocks, from a prompt's first block on, whose blocks were all live already.

    They are cache hits that the engine announces, or stores of real copies. kvbus cannot distinguish them.
    """
    most_copies: int = 0
    """Highest number of copies of one block at one time. The block's first store is not counted as a copy."""

    # Counters by reason: rejected batches and events (`Reason`), valid batches, events and blocks that are counted, and
    # mostly not sent to routers (`Filtered`), and failed handshakes (`Refused`).
    rejected: Counter[str] = msgspec.field(default_factory=Counter)
    filtered: Counter[str] = msgspec.field(default_factory=Counter)
    refused: Counter[str] = msgspec.field(default_factory=Counter)
    """Number of failed handshakes of connections to the engine, by reason."""

    def copy(self) -> SourceStats:
        """Return a copy of the counters. Its values stay the same when the originals change."""
        rejected, filtered, refused = self.rejected.copy(), self.filtered.copy(), self.refused.copy()
        return msgspec.structs.replace(self, rejected=rejected, filtered=filtered, refused=refused)


class NumberingStats(msgspec.Struct):
    """Counters that the relay keeps for one output. The counters of sent batches are in :class:`OutputStats`."""

    heartbeats: int = 0
    malformed: int = 0
    """Number of requests of routers that kvbus could not answer, because they lacked even the identity frame."""
    other_group: int = 0
    """Number of events left out because the output's routers accept only one KV-cache group of each source."""
    not_read: int = 0
    """Number of stores left out because the output's routers have no right to read the stored blocks."""
    undecided: int = 0
    """Number of stores left out because their parent is unknown: kvbus cannot determine whether routers may
    read them."""


class OutputStats(msgspec.Struct):
    """Counters of the batches, states and answers of one output.

    The output's driver, which has the sockets, counts them.
    """

    parts: frozenset[str] = frozenset()
    """The optional features of kvbus that the output uses: some of log, dynamo, interpose, replay and keys."""

    # Counters of the live stream to routers, or of the log that the output writes.
    batches: int = 0
    events: int = 0
    bytes: int = 0
    subscribers: int = 0
    routers: int = 0
    """Number of connected routers, with or without subscriptions."""
    router_disconnects: Counter[str] = msgspec.field(default_factory=Counter)
    """Number of ended connections of routers, by reason. Either side may have ended them."""
    router_states: Counter[str] = msgspec.field(default_factory=Counter)
    """For each state of a router, how often routers have entered it."""
    publishers: int = 0
    """Number of engines that are connected at this output. Engines connect to an output only if it interposes.

    An output interposes if it listens at the address to which both engines and routers connect.
    """
    publishers_limit: int = 0
    publishers_accepted: int = 0
    states_sent: Counter[str] = msgspec.field(default_factory=Counter)
    """Number of states sent to routers, by reason: ``subscribed``, or ``lost`` for a router that lost batches.

    A state is counted once for each router.
    """
    state_bytes: int = 0
    """Number of bytes of the states that kvbus has appended to a log.

    They are counted in the form that the log stores.
    """
    streams_written: int = 0
    """Number of streams that kvbus writes to a log."""
    states_overdue: int = 0
    """Number of streams of a log to which kvbus should have written a new state already."""
    streams_fenced: int = 0
    """Number of streams of a log that this kvbus no longer writes, because another writer took over or they were
    erased."""
    records_gone: int = 0
    """Number of records in Dynamo's discovery that another process deleted or replaced, and that kvbus wrote again."""
    queue_depth: int = 0
    queue_limit: int = 0
    router_queue_limit: int = 0
    """Maximum number of batches that may wait for one router."""
    dropped_batches: Counter[str] = msgspec.field(default_factory=Counter)
    dropped_events: Counter[str] = msgspec.field(default_factory=Counter)
    refused: Counter[str] = msgspec.field(default_factory=Counter)

    # Counters of answers to replay requests of routers.
    replay_requests: Counter[str] = msgspec.field(default_factory=Counter)
    replay_batches: int = 0
    replay_sessions: int = 0
    replay_sessions_limit: int = 0
    replay_waiting: int = 0
    replay_waiting_limit: int = 0


class RouterView(msgspec.Struct, frozen=True):
    """One router of an output, as ``/routers`` and the status page show it.

    Attributes:
        stream: slot of the stream that the router reads.
        peer: address of the router's end of the connection.
        since: time of day at which the connection was opened, in seconds.
        topics: the first few topic prefixes that the router has subscribed to. Long ones are shortened.
        subscriptions: number of the router's subscriptions.
        state: the router's state, as the output's driver names it.
        states_sent: how often kvbus has sent the router the state of the stream.
        state_sent_at: time of day at which the state was last sent, in seconds; None if it was never sent.
        queued_batches: number of batches that wait in kvbus for the router.
        queued_bytes: number of bytes that kvbus has written and that the router's kernel has not acknowledged.
        behind_seconds: age in seconds of the oldest batch that kvbus has not yet sent to the router.
        dropped_batches: number of batches that kvbus dropped for this router.
        dropped_events: number of events in the dropped batches.
        left: why the connection ended; None while it is open.
        left_at: time of day at which the connection ended, in seconds; None while it is open.
        name: name of the owner of the router's CURVE key; empty if the router has no key.
        dropped_at: time of day, in seconds, at which kvbus last dropped a batch for the router; None if it dropped
            none.
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
    """Counts of observed values per bucket, in the form that Prometheus expects.

    Counting a value costs one bisection.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value, in the unit of the histogram's bounds (seconds)."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class HttpRefusal(StrEnum):
    """The reason why the admin port refused an HTTP request."""

    PEER = "peer"
    FORWARDED = "forwarded"
    HOST = "host"
    CROSS_SITE = "cross_site"
    TOKEN = "token"
    RIGHTS = "rights"
    BUSY = "busy"


class ProcessStats:
    """Counters of the kvbus process. The histograms are in seconds."""

    def __init__(self) -> None:
        self.state_writing: bool | None = None
        """Whether kvbus writes its state to ``state_dir``. It is False after a write has failed.

        None if no ``state_dir`` is configured.
        """
        self.state_refused = 0
        """Number of files of a saved state that kvbus could not use and moved aside."""
        self.http_connections = 0
        """Number of open HTTP connections."""
        self.http_dumps = 0
        """Number of answers to HTTP requests for ``/blocks`` that kvbus is sending at this moment."""
        self.http_listeners = 0
        """Number of HTTP clients that follow ``/events``."""
        self.http_closed: Counter[str] = Counter()
        """Number of HTTP connections that kvbus closed, by reason: ``too_many`` connections, or a ``slow`` client."""
        self.http_refused: Counter[HttpRefusal] = Counter()
        """Number of HTTP requests that kvbus refused, by reason: the client has no right, or kvbus was busy."""
        self.config_reloads: Counter[str] = Counter()
        """How often kvbus read its changed configuration, by outcome: ``applied`` or ``refused``."""
        self.config_refused: list[str] = []
        """The keys because of which kvbus refused the newest configuration; empty if that one is in force."""
        self.key_reloads: Counter[str] = Counter()
        """How often kvbus read changed files with CURVE keys, HTTP tokens or certificates, by outcome.

        Changes of the configuration itself are not counted here.
        """
        self.measure_unsent: Callable[[], int] = lambda: 0
        """Returns the number of bytes that wait in kvbus for all routers together. Call it in the event loop."""
        self.unsent_bytes = 0
        """The result of the last call of :attr:`measure_unsent`."""
        self.unsent_limit = 0
        """Maximum of :attr:`unsent_bytes`, above which routers have to wait."""
        self.views_limit = 0
        """Maximum number of views, which are separate streams for router keys with different rights."""
        self.slots_present = self.slots_gone = self.slots_limit = 0
        """Three numbers: slots whose source is present, slots whose source is gone, and the maximum number of slots.

        Each rank of an engine has its own slot.
        """
        self.slots_reused = 0
        """How often kvbus gave another source the slot of a source that is gone, because no slot was free."""
        self.batch_age = Histogram(
            (1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
        )
        self.relay_latency = Histogram((2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2, 0.25, 1.0))
        self.loop_lag = Histogram((1e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.5, 2.0))
