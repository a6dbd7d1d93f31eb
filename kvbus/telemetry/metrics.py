"""Prometheus: one collector, which reads the core's plain integers at each scrape and costs nothing otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.metadata import version
from typing import Final, Protocol

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from kvbus.core.relay import Relay
from kvbus.core.sequencing.settings import State
from kvbus.core.stats import Histogram, HttpRefusal, ProcessStats
from kvbus.core.types import DEVICE_MEDIUM, CacheReset, Filtered, Reason, Refused

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST

DROP_REASONS: Final = ("slow_router", "queue_full", "closed")
"""Those of the ZeroMQ driver, shown from the start; others show once a driver has counted them."""
REPLAY_OUTCOMES: Final = ("complete", "compacted", "late", "gone", "stalled", "refused", "malformed", "cut_off")
HTTP_REASONS: Final = ("too_many", "slow")
RELOAD_OUTCOMES: Final = ("applied", "refused")
EVENT_TYPES: Final = ("BlockStored", "BlockRemoved", "AllBlocksCleared")

disable_created_metrics()  # type: ignore[no-untyped-call]


class Observed(Protocol):
    """The state that the collector reads."""

    relay: Relay
    process: ProcessStats


_SOURCE_COUNTERS: Final = (
    ("source_batches_total", "batches", "Live messages received, valid or not."),
    ("source_bytes_total", "bytes", "Payload bytes of live batches."),
    ("source_gaps_total", "gaps", "Gaps found in the numbering."),
    ("source_missing_batches_total", "missing", "Batches found missing: recovered + lost + pending, always."),
    ("source_recovered_batches_total", "recovered", "Missing batches that arrived late or by replay."),
    ("source_lost_batches_total", "lost", "Missing batches that no replay brought."),
    ("source_duplicate_batches_total", "duplicates", "Batches that came again and were dropped."),
    ("source_restarts_total", "restarts", "New epochs of the engine's publisher that were proven by what it sent."),
    ("source_replays_total", "replays", "Replay requests sent to the engine."),
    ("source_replay_timeouts_total", "replay_timeouts", "Replay requests that failed for lack of progress."),
    ("source_stale_replies_total", "stale_replies", "Replay messages that answer no current request."),
    ("source_held_overflow_total", "held_overflow", "Batches dropped because the reorder buffer was full."),
    ("source_rebuilds_total", "rebuilds", "Times the live set was announced again in another block size."),
    ("source_timeouts_total", "timeouts", "Times the engine was gone for source_timeout and its blocks cleared."),
)


class RelayCollector(Collector):
    """Every ``kvbus_`` metric. Label values are bounded by the configuration, the core's enums and drivers' reasons."""

    def __init__(self, observed: Observed) -> None:
        self._observed = observed

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        yield _gauge("build_info", "Version of this kvbus.", ["version"], [([version("kvbus")], 1.0)])
        yield from self._sources()
        yield from self._events()
        yield from self._outputs()
        process = self._observed.process
        yield _gauge(
            "state_writing",
            "1 while the state is written to state_dir; 0 without one, and after writing failed.",
            [],
            [([], float(process.state_writing))],
        )
        yield _counter(
            "state_refused_total",
            "Files of a saved state that could not be used and were moved aside.",
            [],
            [([], process.state_refused)],
        )
        yield _gauge("http_connections", "HTTP connections that are open.", [], [([], process.http_connections)])
        yield _gauge("http_dumps", "Answers of /blocks under way.", [], [([], process.http_dumps)])
        yield _counter(
            "http_connections_closed_total",
            "HTTP connections that were closed on the client, by reason.",
            ["reason"],
            (([reason], process.http_closed[reason]) for reason in HTTP_REASONS),
        )
        yield _counter(
            "http_refused_total",
            "HTTP requests for token ids that were refused, by reason.",
            ["reason"],
            (([reason], process.http_refused[reason]) for reason in HttpRefusal),
        )
        for name, field, text in (
            ("config_reloads_total", "config_reloads", "Configurations read again at SIGHUP, by outcome."),
            ("key_reloads_total", "key_reloads", "CURVE keys that changed on disk, by outcome."),
        ):
            counts = getattr(process, field)
            yield _counter(name, text, ["outcome"], (([outcome], counts[outcome]) for outcome in RELOAD_OUTCOMES))
        yield _histogram(
            "kvbus_relay_latency_seconds", "From received to handed to the transport.", process.relay_latency
        )
        yield _histogram("kvbus_event_loop_lag_seconds", "How late the event loop was for its timer.", process.loop_lag)

    def _sources(self) -> Iterator[Metric]:
        sources = self._observed.relay.present
        for name, field, text in _SOURCE_COUNTERS:
            yield _counter(name, text, ["source"], (([s.spec.label], getattr(s.stats, field)) for s in sources))
        yield _gauge(
            "source_state",
            "1 for the state the source is in.",
            ["source", "state"],
            (([s.spec.label, state], float(s.state is state)) for s in sources for state in State),
        )
        yield _gauge(
            "source_partial",
            "1 while the engine may hold blocks kvbus cannot know of (trimmed history, lost batches, full index).",
            ["source"],
            (([s.spec.label], float(s.partial)) for s in sources),
        )
        yield _gauge(
            "source_epoch",
            "Epoch of the publisher, counted from 0.",
            ["source"],
            (([s.spec.label], s.sequencer.epoch) for s in sources),
        )
        yield _gauge(
            "source_last_sequence",
            "Newest batch delivered, -1 for none.",
            ["source"],
            (([s.spec.label], s.sequencer.next - 1) for s in sources),
        )
        yield _gauge(
            "source_last_batch_timestamp_seconds",
            "The engine's own time of the newest batch; 0 before the first.",
            ["source"],
            (([s.spec.label], s.stats.last_batch) for s in sources),
        )
        yield _gauge(
            "source_pending_batches",
            "Missing batches that are neither recovered nor lost yet.",
            ["source"],
            (([s.spec.label], s.stats.pending) for s in sources),
        )
        yield _gauge(
            "source_queue_depth",
            "Batches in the reorder buffer.",
            ["source"],
            (([s.spec.label], len(s.sequencer.held) + len(s.sequencer.actions)) for s in sources),
        )
        yield _gauge(
            "source_queue_limit",
            "Limit of batches in the reorder buffer.",
            ["source"],
            (([s.spec.label], s.spec.settings.reorder_batches) for s in sources),
        )
        yield _gauge(
            "source_queue_bytes",
            "Payload bytes in the reorder buffer.",
            ["source"],
            (([s.spec.label], s.sequencer.held.bytes) for s in sources),
        )
        yield _gauge(
            "source_queue_bytes_limit",
            "Limit of payload bytes in the reorder buffer.",
            ["source"],
            (([s.spec.label], s.spec.settings.reorder_bytes) for s in sources),
        )
        yield _gauge(
            "source_index_entries",
            "Blocks remembered: the live ones, and coarse ones and tails that are left out.",
            ["source"],
            (([s.spec.label], s.normalizer.entries) for s in sources),
        )
        yield _gauge(
            "source_index_limit",
            "Limit of blocks in the index.",
            ["source"],
            (([s.spec.label], s.spec.rules.max_blocks) for s in sources),
        )

    def _events(self) -> Iterator[Metric]:
        sources = self._observed.relay.present
        fields = ("stored", "removed", "cleared")
        yield _counter(
            "source_events_total",
            "Events received, by type.",
            ["source", "type"],
            (
                ([s.spec.label, name], getattr(s.stats, field))
                for s in sources
                for name, field in zip(EVENT_TYPES, fields, strict=True)
            ),
        )
        yield _counter(
            "events_rejected_total",
            "Batches and events refused, by reason.",
            ["source", "reason"],
            (([s.spec.label, reason], s.stats.rejected[reason]) for s in sources for reason in Reason),
        )
        yield _counter(
            "events_filtered_total",
            "Valid events and blocks counted on their way, by reason; all but orphan_passed and other_rank left out.",
            ["source", "reason"],
            (([s.spec.label, reason], s.stats.filtered[reason]) for s in sources for reason in Filtered),
        )
        yield _counter(
            "source_handshakes_failed_total",
            "Failed handshakes with engines, by reason.",
            ["source", "reason"],
            (([s.spec.label, reason], s.stats.refused[reason]) for s in sources for reason in Refused),
        )
        yield _counter(
            "source_cache_resets_total",
            "Times the engine was asked to reset its cache (on_partial: reset), by outcome.",
            ["source", "outcome"],
            (([s.spec.label, outcome], s.stats.cache_resets[outcome]) for s in sources for outcome in CacheReset),
        )
        yield _gauge(
            "blocks",
            "Live blocks, as announced to routers.",
            ["source", "medium"],
            (
                ([s.spec.label, medium], 0 if s.expired else count)
                for s in sources
                for medium, count in {DEVICE_MEDIUM: 0, **s.normalizer.index.media()}.items()
            ),
        )

    def _outputs(self) -> Iterator[Metric]:
        outputs = self._observed.relay.outputs
        for name, field, text in (
            ("output_batches_total", "batches", "Batches sent, heartbeats among them."),
            ("output_events_total", "events", "Events sent."),
            ("output_bytes_total", "bytes", "Payload bytes sent."),
            ("output_heartbeats_total", "heartbeats", "Empty batches sent on an idle stream."),
            ("replay_batches_total", "replay_batches", "Messages of replay answers sent, END among them."),
        ):
            yield _counter(name, text, ["output"], (([o.spec.name], getattr(o.stats, field)) for o in outputs))
        for name, field, text in (
            ("output_queue_depth", "queue_depth", "Batches waiting for the transport."),
            ("output_queue_limit", "queue_limit", "Most batches waiting for the transport, all streams together."),
            ("output_subscribers", "subscribers", "Subscriptions of routers."),
            ("replay_sessions", "replay_sessions", "Replay answers that take turns being sent."),
            ("replay_sessions_limit", "replay_sessions_limit", "Most replay answers that take turns."),
            ("replay_waiting", "replay_waiting", "Replay answers that wait for their turn or for a reader."),
            (
                "replay_waiting_limit",
                "replay_waiting_limit",
                "Most replay answers that wait; more are refused.",
            ),
        ):
            yield _gauge(name, text, ["output"], (([o.spec.name], getattr(o.stats, field)) for o in outputs))
        yield _gauge(
            "output_sequence",
            "Newest seq of each stream, -1 for none.",
            ["output", "stream"],
            (([o.spec.name, str(i)], stream.next_seq - 1) for o in outputs for i, stream in o.open_streams.items()),
        )
        yield _gauge(
            "output_journal_batches",
            "Batches kept for replay.",
            ["output"],
            (([o.spec.name], sum(len(stream.journal) for stream in o.streams)) for o in outputs),
        )
        yield _gauge(
            "output_journal_bytes",
            "Payload bytes kept for replay.",
            ["output"],
            (([o.spec.name], sum(stream.journal.bytes for stream in o.streams)) for o in outputs),
        )
        yield _gauge(
            "output_journal_batches_limit",
            "Most batches kept for replay, all streams together.",
            ["output"],
            (([o.spec.name], o.spec.journal_batches * len(o.open_streams)) for o in outputs),
        )
        yield _gauge(
            "output_journal_bytes_limit",
            "Most payload bytes kept for replay, all streams together.",
            ["output"],
            (([o.spec.name], o.spec.journal_bytes * len(o.open_streams)) for o in outputs),
        )
        for name, field, text in (
            (
                "output_dropped_batches_total",
                "dropped_batches",
                "Batches not every router got live, by reason; of a stretch that a router is full only the first.",
            ),
            ("output_dropped_events_total", "dropped_events", "Events in those batches."),
        ):
            yield _counter(
                name,
                text,
                ["output", "reason"],
                (
                    ([o.spec.name, reason], getattr(o.stats, field)[reason])
                    for o in outputs
                    for reason in dict.fromkeys((*DROP_REASONS, *getattr(o.stats, field)))
                ),
            )
        yield _counter(
            "output_handshakes_failed_total",
            "Failed or refused handshakes of routers, by reason.",
            ["output", "reason"],
            (([o.spec.name, reason], o.stats.refused[reason]) for o in outputs for reason in Refused),
        )
        yield _counter(
            "replay_requests_total",
            "Replay requests of routers, by outcome.",
            ["output", "outcome"],
            (
                ([o.spec.name, outcome], o.stats.replay_requests[outcome])
                for o in outputs
                for outcome in REPLAY_OUTCOMES
            ),
        )


Samples = Iterable[tuple[list[str], float]]


def _counter(name: str, text: str, labels: list[str], samples: Samples) -> Metric:
    family = CounterMetricFamily(f"kvbus_{name.removesuffix('_total')}", text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _gauge(name: str, text: str, labels: list[str], samples: Samples) -> Metric:
    family = GaugeMetricFamily(f"kvbus_{name}", text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    family = HistogramMetricFamily(name, text)
    buckets: list[tuple[str, float]] = []
    count = 0
    for bound, n in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        count += n
        buckets.append(("+Inf" if bound == float("inf") else repr(bound), count))
    family.add_metric([], buckets, histogram.total)
    return family


class Exposition:
    """Renders ``/metrics``."""

    def __init__(self, observed: Observed) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(RelayCollector(observed))
        PlatformCollector(registry=self._registry)
        ProcessCollector(registry=self._registry)

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)
