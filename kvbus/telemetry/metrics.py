"""The collector of Prometheus metrics.

It reads the core's counters at each scrape, and does nothing between scrapes.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol

from prometheus_client import CONTENT_TYPE_LATEST, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from kvbus.common.front_stats import CallStats, FrontStats
from kvbus.core.findings.finding import Reported
from kvbus.core.relay import Relay
from kvbus.core.stats import Histogram, OutputStats, ProcessStats
from kvbus.telemetry.readings import (
    DiscoveryStats,
    Driver,
    OutputReading,
    SourceReading,
    read_outputs,
    read_sources,
)
from kvbus.telemetry.table import DISCOVERY, FRONT, FRONT_GRPC, HISTOGRAMS, OUTPUTS, PROCESS, SOURCES, Row, row

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST

FINDING: Final = row(
    "finding",
    "1 for each current finding about the bus, a source or a router. /findings has the text and the remedy. A router "
    "has the name of its key, or the name of its output. Findings that do not apply have no series.",
    lambda each: (each.severity, each.kind, each.name or each.output or "", each.id),
)
FINDING_LABELS: Final = ("severity", "kind", "name", "id")

AT_ONCE: Final = 4
"""Number of sources that a scrape reads in one iteration of the event loop.

The loop can handle batches between two iterations, so a scrape of many sources does not delay them.
"""

disable_created_metrics()  # type: ignore[no-untyped-call]


class BusState(Protocol):
    """The parts of a running bus from which the metrics are read."""

    relay: Relay
    process: ProcessStats

    @property
    def drivers(self) -> Sequence[Driver]:
        """The driver of each output: the object that sends the output's batches and knows its routers."""

    @property
    def output_stats(self) -> Sequence[OutputStats]:
        """The counters of each output's driver, in the order of ``drivers``."""

    @property
    def discovery_stats(self) -> Sequence[DiscoveryStats]:
        """The counters of each discovery entry of the configuration."""

    @property
    def front_stats(self) -> FrontStats | None:
        """The counters of the proxy in front of the engine's HTTP API; None without a proxy."""

    @property
    def front_grpc_stats(self) -> CallStats | None:
        """The counters of the proxy in front of the engine's gRPC API; None without a proxy."""

    @property
    def findings(self) -> Sequence[Reported]:
        """All current findings, problems before notes."""


class Readings(NamedTuple):
    """The readings of all sources and all outputs, and the current findings, for one scrape."""

    sources: list[SourceReading]
    outputs: list[OutputReading]
    findings: Sequence[Reported]


class RelayCollector(Collector):
    """The collector of all metrics of kvbus.

    The values of labels are names from the configuration, names of the core's enums, and names of the drivers' reasons
    for drops. No label has text that an engine or a router has sent.

    Args:
        observed: the bus. The collector reads only its counters, so it may run in a thread.
        readings: the readings of the bus's sources and outputs.
        others: collectors of other metrics, such as the memory of the process.
    """

    def __init__(self, observed: BusState, readings: Readings, others: Iterable[Collector]) -> None:
        self._observed = observed
        self._readings = readings
        self._others = others

    def collect(self) -> Iterator[Metric]:
        """Yield every metric with its current values."""
        for rows, label, items in self._tables():
            for name, text, read, of, keys, part in rows:
                shown = [item for item in items if part in item.stats.parts] if part else items
                if not shown:
                    continue
                family_of = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                family = family_of(f"kvbus_{name.removesuffix('_total')}", text, labels=label + ((of,) if of else ()))
                for item in shown:
                    values, found = (item.name,) if label else (), read(item)
                    if of:
                        for key, value in (dict.fromkeys(keys, 0) | found).items():
                            family.add_metric((*values, str(key)), value)
                    else:
                        family.add_metric(values, found if isinstance(found, int | float) else bool(found))
                yield family
        family = GaugeMetricFamily(f"kvbus_{FINDING.name}", FINDING.text, labels=FINDING_LABELS)
        for values in dict.fromkeys(map(FINDING.read, self._readings.findings)):
            family.add_metric(values, 1)
        yield family
        for name, text, read, *_ in HISTOGRAMS:
            yield _histogram(name, text, read(self._observed.process))
        for other in self._others:
            yield from other.collect()

    def _tables(self) -> list[tuple[tuple[Row, ...], tuple[str, ...], Sequence[Any]]]:
        """Return a tuple for each table of metrics.

        A tuple has the table's rows, the label that names an item (empty if there is only one item), and the items that
        the rows read, such as the readings of all sources.
        """
        observed = self._observed
        single = (FRONT, observed.front_stats), (FRONT_GRPC, observed.front_grpc_stats), (PROCESS, observed.process)
        return [
            (SOURCES, ("source",), self._readings.sources),
            (OUTPUTS, ("output",), self._readings.outputs),
            (DISCOVERY, ("discovery",), observed.discovery_stats),
            *((rows, (), [stats]) for rows, stats in single if stats is not None),
        ]


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    family = HistogramMetricFamily(f"kvbus_{name}", text, labels=())
    buckets: list[tuple[str, float]] = []
    count = 0
    for bound, n in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        count += n
        buckets.append(("+Inf" if bound == float("inf") else repr(bound), count))
    family.add_metric((), buckets, histogram.total)
    return family


class Exposition:
    """The object that writes the answers to ``/metrics``.

    Call `read` in the event loop, and then `render` in a thread.
    """

    def __init__(self, observed: BusState) -> None:
        self._observed = observed
        self._others = PlatformCollector(registry=None), ProcessCollector(registry=None)

    def read(self) -> Generator[None, None, Readings]:
        """Read all sources and then all outputs. Return the readings for `render`.

        The generator yields after every `AT_ONCE` sources, so that the caller can do other work.
        """
        sources: list[SourceReading] = []
        for _, source in read_sources(self._observed.relay):
            sources.append(source)
            if not len(sources) % AT_ONCE:
                yield
        observed = self._observed
        outputs = read_outputs(observed.relay, observed.drivers, observed.output_stats)
        observed.process.unsent_bytes = observed.process.measure_unsent()
        return Readings(sources, outputs, observed.findings)

    def render(self, readings: Readings) -> bytes:
        """Return all metrics in Prometheus's text format.

        Call this in a thread. The metrics of 1,000 sources are 6 MB of text, which would block the event loop.
        """
        return generate_latest(RelayCollector(self._observed, readings, self._others))
