"""What a bus shows of itself at one moment, read over HTTP, and the rates between two moments."""

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
from prometheus_client.parser import text_string_to_metric_families

from kvbus.tools.asking import asking, get

TIMEOUT_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class Output:
    """One output, as ``/metrics`` has it."""

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
    """Everything at once.

    Attributes:
        at: seconds of the reader's own clock.
        sources: the entries of ``/sources``.
        routers: the entries of ``/routers``.
        outputs: its outputs.
        reasons: counted rejections, left-out events and dropped batches, by ``what: reason (of whom)``.
        version: of the bus.
        started: its start, in seconds since 1970. Counters begin anew with it.
        age: seconds since then, by the bus's own clock.
        memory: resident bytes.
    """

    at: float
    sources: list[dict[str, Any]]
    routers: list[dict[str, Any]]
    outputs: list[Output]
    reasons: dict[str, float]
    version: str
    started: float
    age: float
    memory: float


async def read(session: aiohttp.ClientSession, url: str) -> Moment:
    """Ask a bus.

    Raises:
        NoAnswerError: it does not answer in time, or with something else.
    """
    async with asking(url, TIMEOUT_S):
        (sources, _), (routers, _), (metrics, headers) = await asyncio.gather(
            *(get(session, f"{url}/{path}") for path in ("sources", "routers", "metrics"))
        )
        wall = parsedate_to_datetime(headers["Date"]).timestamp()
        at = asyncio.get_running_loop().time()
        return moment(json.loads(sources), json.loads(routers), metrics.decode(), at, wall)


def moment(
    sources: list[dict[str, Any]], routers: list[dict[str, Any]], metrics: str, at: float, wall: float
) -> Moment:
    """Put the three answers together.

    Args:
        sources: of ``/sources``.
        routers: of ``/routers``.
        metrics: of ``/metrics``.
        at: the reader's clock.
        wall: the bus's time of day.

    Raises:
        ValueError: the metrics are not in Prometheus's format, or not those of kvbus.
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


KEPT: Final = 120
"""Moments."""

RATE_OVER: Final = 5
"""Moments that a rate is taken over, so that it does not flicker."""


class History:
    """Moments of one bus, oldest first. One that has been started anew begins anew: its counters do."""

    def __init__(self) -> None:
        self.moments: deque[Moment] = deque(maxlen=KEPT)

    def add(self, moment: Moment) -> None:
        """Take in the newest."""
        if self.moments and self.moments[-1].started != moment.started:
            self.moments.clear()
        self.moments.append(moment)

    def rate(self, value: Callable[[Moment], float | None]) -> float:
        """The growth of a counter per second; 0 where it is not known twice."""
        now = self.moments[-1]
        end = value(now)
        for then in list(self.moments)[-RATE_OVER - 1 : -1]:
            begin = value(then)
            if end is not None and begin is not None and now.at > then.at:
                return max(0.0, end - begin) / (now.at - then.at)
        return 0.0

    def course(self, value: Callable[[Moment], float | None], length: int) -> list[float]:
        """The growth per second between each two of the last moments, at most ``length`` of them."""
        kept = list(self.moments)[-length - 1 :]
        found = []
        for before, after in itertools.pairwise(kept):
            begin, end = value(before), value(after)
            known = begin is not None and end is not None and after.at > before.at
            found.append(max(0.0, end - begin) / (after.at - before.at) if known else 0.0)  # type: ignore[operator]
        return found


def batches_of(name: str) -> Callable[[Moment], float | None]:
    """What reads the batches taken in of one source."""

    def value(moment: Moment) -> float | None:
        return next((source["counts"]["batches"] for source in moment.sources if source["name"] == name), None)

    return value


def of_output(name: str, field: Callable[[Output], float]) -> Callable[[Moment], float | None]:
    """What reads a field of one output."""

    def value(moment: Moment) -> float | None:
        return next((field(output) for output in moment.outputs if output.name == name), None)

    return value


def of_reason(reason: str) -> Callable[[Moment], float]:
    """What reads the count of one reason."""
    return lambda moment: moment.reasons.get(reason, 0.0)
