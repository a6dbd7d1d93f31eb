"""Readings of a bus over HTTP, and the rates of change between two readings."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Final

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from kvbus.core.findings.finding import Reported
from kvbus.tools.asking import asking, get

TIMEOUT_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class Output:
    """The number of routers and the counters of one output of the bus, as ``/metrics`` shows them."""

    name: str
    routers: float
    batches: float
    bytes: float
    queued: float
    behind: float
    dropped: float
    replays: float
    states: float


@dataclass(frozen=True, slots=True)
class Moment:
    """The state of a bus at one moment, as read over HTTP.

    Attributes:
        at: time of the reading, in seconds of the reader's own clock.
        sources: the entries of ``/sources``.
        routers: the entries of ``/routers``, without routers that have disconnected.
        findings: the entries of ``/findings``: about the bus, its sources and its routers, problems first.
        outputs: the outputs of the bus.
        reasons: counts of rejected and filtered events, dropped batches, disconnections and failed handshakes. A key
            has the form ``what: reason (source or output)``.
        version: version of kvbus.
        started: start of the bus, in seconds since 1970. The counters began at 0 then.
        age: seconds since the start, by the bus's own clock.
        memory: resident memory of the bus, in bytes.
    """

    at: float
    sources: list[dict[str, Any]]
    routers: list[dict[str, Any]]
    findings: list[Reported]
    outputs: list[Output]
    reasons: dict[str, float]
    version: str
    started: float
    age: float
    memory: float


async def read(session: aiohttp.ClientSession, url: str) -> Moment:
    """Read a bus over HTTP: request ``/sources``, ``/routers``, ``/findings`` and ``/metrics`` in parallel.

    Raises:
        NoAnswerError: the bus does not answer in time, or the answer is not from a bus.
    """
    async with asking(url, TIMEOUT_S):
        (sources, _), (routers, _), (findings, _), (metrics, headers) = await asyncio.gather(
            *(get(session, f"{url}/{path}") for path in ("sources", "routers", "findings", "metrics"))
        )
        wall = parsedate_to_datetime(headers["Date"]).timestamp()
        at = asyncio.get_running_loop().time()
        standing = msgspec.json.decode(findings, type=list[Reported])
        return moment(json.loads(sources), json.loads(routers), standing, metrics.decode(), at, wall)


def moment(
    sources: list[dict[str, Any]],
    routers: list[dict[str, Any]],
    findings: list[Reported],
    metrics: str,
    at: float,
    wall: float,
) -> Moment:
    """Combine the HTTP answers of a bus into its state at one moment.

    Args:
        sources: the entries of ``/sources``.
        routers: the entries of ``/routers``.
        findings: the entries of ``/findings``.
        metrics: the text of ``/metrics``.
        at: current time, in seconds of the reader's clock.
        wall: current time of the bus, in seconds since 1970.

    Raises:
        ValueError: the metrics are not in Prometheus's format, or are not those of a kvbus.
    """
    values: defaultdict[str, dict[tuple[tuple[str, str], ...], float]] = defaultdict(dict)
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            values[sample.name][tuple(sorted(sample.labels.items()))] = sample.value

    def of(name: str, output: str) -> float:
        return sum(value for labels, value in values[name].items() if ("output", output) in labels)

    if not values["kvbus_build_info"]:
        raise ValueError("no kvbus_build_info in /metrics")
    (build,) = values["kvbus_build_info"]
    started = values["process_start_time_seconds"].get((), wall)
    names = [dict(labels)["output"] for labels in values["kvbus_output_batches_total"]]
    return Moment(
        at=at,
        sources=sources,
        routers=[router for router in routers if router["left"] is None],
        findings=findings,
        outputs=[
            Output(
                name,
                routers=of("kvbus_output_routers", name),
                batches=of("kvbus_output_batches_total", name),
                bytes=of("kvbus_output_bytes_total", name),
                queued=of("kvbus_output_queue_depth", name),
                behind=of("kvbus_output_router_behind_seconds", name),
                dropped=of("kvbus_output_dropped_batches_total", name),
                replays=of("kvbus_replay_requests_total", name),
                states=of("kvbus_output_states_sent_total", name),
            )
            for name in names
        ],
        reasons={
            f"{what}: {dict(labels)['reason']} ({dict(labels)[of_whom]})": value
            for what, metric, of_whom in _REASONS
            for labels, value in values[metric].items()
            if value
        },
        version=dict(build)["version"],
        started=started,
        age=max(0.0, wall - started),
        memory=values["process_resident_memory_bytes"].get((), 0.0),
    )


_REASONS: Final = (
    ("rejected", "kvbus_events_rejected_total", "source"),
    ("filtered", "kvbus_events_filtered_total", "source"),
    ("dropped", "kvbus_output_dropped_batches_total", "output"),
    ("router disconnected", "kvbus_output_router_disconnects_total", "output"),
    ("router's handshake failed", "kvbus_output_handshakes_failed_total", "output"),
    ("engine's handshake failed", "kvbus_source_handshakes_failed_total", "source"),
)


MAX_MOMENTS: Final = 120
"""Maximum number of moments (states of a bus) that a history keeps."""

RATE_OVER: Final = 5
"""Number of readings over which a rate is averaged.

A rate over a single reading would change too quickly on the screen.
"""


class History:
    """The newest states of one bus (moments), oldest first.

    If the bus restarts, the older states are deleted, because the counters begin at 0.
    """

    def __init__(self) -> None:
        self.moments: deque[Moment] = deque(maxlen=MAX_MOMENTS)

    def add(self, moment: Moment) -> None:
        """Append the newest moment. If the bus has restarted, delete all older moments first."""
        if self.moments and self.moments[-1].started != moment.started:
            self.moments.clear()
        self.moments.append(moment)

    def rate(self, value: Callable[[Moment], float | None]) -> float:
        """Return by how much a counter grew per second, over the newest `RATE_OVER` readings of the bus.

        ``value`` is a function that returns the counter's value in a reading (a `Moment`). The rate is 0 if fewer than
        two readings have the counter.
        """
        now = self.moments[-1]
        end = value(now)
        for then in list(self.moments)[-RATE_OVER - 1 : -1]:
            begin = value(then)
            if end is not None and begin is not None and now.at > then.at:
                return max(0.0, end - begin) / (now.at - then.at)
        return 0.0

    def course(self, value: Callable[[Moment], float | None], length: int) -> list[float]:
        """Return the newest rates of a counter, oldest first, for a chart.

        A rate is the counter's growth per second between two successive moments. ``value`` is a function that returns
        the counter from a moment. At most ``length`` rates are returned.
        """
        kept = list(self.moments)[-length - 1 :]
        found = []
        for before, after in itertools.pairwise(kept):
            begin, end = value(before), value(after)
            known = begin is not None and end is not None and after.at > before.at
            found.append(max(0.0, end - begin) / (after.at - before.at) if known else 0.0)  # type: ignore[operator]
        return found


def batches_of(name: str) -> Callable[[Moment], float | None]:
    """Return a function that returns how many batches a source has had up to a moment.

    ``name`` is the name of the source. The function returns None if the moment lacks the source.
    """

    def value(moment: Moment) -> float | None:
        return next((source["counts"]["batches"] for source in moment.sources if source["name"] == name), None)

    return value


def of_output(name: str, field: Callable[[Output], float]) -> Callable[[Moment], float | None]:
    """Return a function that returns a value of an output from a moment.

    ``name`` is the name of the output, and ``field`` returns the value from the output. The function returns None if
    the moment lacks the output.
    """

    def value(moment: Moment) -> float | None:
        return next((field(output) for output in moment.outputs if output.name == name), None)

    return value


def of_reason(reason: str) -> Callable[[Moment], float]:
    """Return a function that returns how often a bus has counted ``reason`` up to a moment; 0 if it never has."""
    return lambda moment: moment.reasons.get(reason, 0.0)
