"""Prometheus: one collector, which reads the core's plain integers at each scrape and costs nothing otherwise."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Final, Protocol, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from kvbus.common.front_stats import CallStats, FrontStats
from kvbus.core.relay import Relay
from kvbus.core.stats import Histogram, OutputStats, ProcessStats
from kvbus.telemetry.discovery import DiscoveryStats
from kvbus.telemetry.output_rows import OUTPUTS
from kvbus.telemetry.process_rows import DISCOVERY, FRONT, FRONT_GRPC, PROCESS
from kvbus.telemetry.readings import Driver, SourceReading, read_outputs, read_sources
from kvbus.telemetry.row import Row
from kvbus.telemetry.source_rows import SOURCES

T = TypeVar("T")

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST

PIECE: Final = 32
"""Lines that are rendered in one go: 0.3 ms."""

AT_ONCE: Final = 4
"""Sources of which a metric, or an entry of ``/sources``, is made in one go."""

disable_created_metrics()  # type: ignore[no-untyped-call]


class Observed(Protocol):
    """The state that the collector reads."""

    relay: Relay
    process: ProcessStats

    @property
    def drivers(self) -> Sequence[Driver]:
        """Of each output, what knows its routers."""

    @property
    def output_stats(self) -> Sequence[OutputStats]:
        """What each driver counts."""

    @property
    def discoveries(self) -> Sequence[DiscoveryStats]:
        """What each entry counts that finds engines."""

    @property
    def front_stats(self) -> FrontStats | None:
        """What stands before the engine's API counts; None without it."""

    @property
    def front_grpc_stats(self) -> CallStats | None:
        """Likewise for its gRPC API."""


class RelayCollector:
    """Every ``kvbus_`` metric. Label values are bounded by the configuration, the core's enums and drivers' reasons.

    One of many sources comes in parts, one behind the other.
    """

    def __init__(self, observed: Observed) -> None:
        self._observed = observed

    def collect(self) -> Iterator[Metric | None]:
        """Yield every metric. First the sources are read, with a None after some of them."""
        observed = self._observed
        relay, process = observed.relay, observed.process
        sources = list[tuple[tuple[str, ...], SourceReading]]()
        for _, source in read_sources(relay):
            sources.append(((source.name,), source))
            if not len(sources) % AT_ONCE:
                yield None
        readings = read_outputs(relay, observed.drivers, observed.output_stats)
        outputs = [((output.name,), output) for output in readings]
        yield from _of_sources(SOURCES, sources)
        yield from (_family(row, ("output",), outputs) for row in OUTPUTS)
        discoveries = [((discovery.name,), discovery) for discovery in observed.discoveries]
        yield from (_family(row, ("discovery",), discoveries) for row in DISCOVERY)
        if (front := observed.front_stats) is not None:
            yield from (_family(row, (), [((), front)]) for row in FRONT)
        if (calls := observed.front_grpc_stats) is not None:
            yield from (_family(row, (), [((), calls)]) for row in FRONT_GRPC)
        yield from (_family(row, (), [((), process)]) for row in PROCESS)
        yield _histogram(
            "relay_latency_seconds", "From a batch received to handed to the transport.", process.relay_latency
        )
        yield _histogram("event_loop_lag_seconds", "How late the event loop was for its timer.", process.loop_lag)


def _of_sources(rows: Iterable[Row[T]], observed: Sequence[tuple[tuple[str, ...], T]]) -> Iterator[Metric]:
    for row in rows:
        for at in range(0, max(1, len(observed)), AT_ONCE):
            yield _family(row, ("source",), observed[at : at + AT_ONCE])


def _family(row: Row[T], labels: tuple[str, ...], observed: Iterable[tuple[tuple[str, ...], T]]) -> Metric:
    """Read one metric of all sources, all outputs or the process; ``labels`` name which of them a value is of."""
    kind = CounterMetricFamily if row.name.endswith("_total") else GaugeMetricFamily
    family = kind(f"kvbus_{row.name.removesuffix('_total')}", row.text, labels=(*labels, *row.labels))
    for name, of in observed:
        for values, value in row.read(of):
            family.add_metric((*name, *values), value)
    return family


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    family = HistogramMetricFamily(f"kvbus_{name}", text, labels=())
    buckets: list[tuple[str, float]] = []
    count = 0
    for bound, n in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        count += n
        buckets.append(("+Inf" if bound == float("inf") else repr(bound), count))
    family.add_metric((), buckets, histogram.total)
    return family


class _Only(Collector):
    """One metric, for what renders all of a collector."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return (self._metric,)


class Exposition:
    """Renders ``/metrics``."""

    def __init__(self, observed: Observed) -> None:
        self._collector = RelayCollector(observed)
        self._registry = CollectorRegistry()
        PlatformCollector(registry=self._registry)
        ProcessCollector(registry=self._registry)

    def render(self) -> Generator[None, None, list[bytes]]:
        """Make the bus's metrics in Prometheus' text format, a piece at a time: a whole one would hold up the stream.

        The texts follow one another. Those of a thousand sources are 6 MB, which nobody is to join in one go.
        """
        texts: list[bytes] = []
        name, lines = "", 0
        for metric in self._collector.collect():
            if metric is None:
                yield
                continue
            text = generate_latest(_Only(metric))
            if metric.name == name:  # its next part: what it is has been said, in two lines
                text = text.split(b"\n", 2)[2]
            name, lines = metric.name, lines + 1 + len(metric.samples)
            texts.append(text)
            if lines >= PIECE:
                lines = 0
                yield
        return texts

    def process(self) -> bytes:
        """Make those of the process and of its Python: for a thread, since it lists its descriptors, 4 ms of 3,000."""
        return generate_latest(self._registry)
