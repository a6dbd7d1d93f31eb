"""What a bus shows of itself at one moment, read over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
from collections import defaultdict
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Final

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from kvbus.errors import ExitCode, KvbusError

TIMEOUT_S: Final = 3.0

MAX_BYTES: Final = 64 * 1024 * 1024
"""Of one answer."""


class NoAnswerError(KvbusError):
    """There is no bus at the address, or it does not answer as one."""

    exit_code = ExitCode.CANNOT_BIND


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
        cpu: CPU seconds since the start.
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
    cpu: float


def base_url(address: str) -> str:
    """Return the URL that an address stands for: ``HOST:PORT`` or ``http://HOST:PORT/``.

    Raises:
        ValueError: it is neither.
    """
    url = (address if "://" in address else f"http://{address}").rstrip("/")
    if not url.startswith(("http://", "https://")) or not url.partition("://")[2]:
        raise ValueError(f"{address!r} is not HOST:PORT or http://HOST:PORT")
    return url


async def read(session: aiohttp.ClientSession, url: str) -> Moment:
    """Ask a bus.

    Raises:
        NoAnswerError: it does not answer in time, or with something else.
    """
    try:
        async with asyncio.timeout(TIMEOUT_S):
            (sources, _), (routers, _), (metrics, wall) = await asyncio.gather(
                *(_get(session, f"{url}/{path}") for path in ("sources", "routers", "metrics"))
            )
        return moment(json.loads(sources), json.loads(routers), metrics, asyncio.get_running_loop().time(), wall)
    except TimeoutError as error:
        raise NoAnswerError(f"{url} does not answer within {TIMEOUT_S:g} s") from error
    except aiohttp.ClientConnectorError as error:
        why = error.os_error
        raise NoAnswerError(f"{url}: {os.strerror(why.errno) if why.errno else why}") from error
    except (aiohttp.ClientError, OSError) as error:
        raise NoAnswerError(f"{url}: {error or type(error).__name__}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise NoAnswerError(f"{url} does not answer as kvbus does ({error})") from error


async def _get(session: aiohttp.ClientSession, url: str) -> tuple[str, float]:
    """Return an answer, and the server's time of day."""
    async with session.get(url, allow_redirects=False) as response:
        response.raise_for_status()
        body = bytearray()
        async for part in response.content.iter_any():
            body += part
            if len(body) > MAX_BYTES:
                raise ValueError(f"more than {MAX_BYTES} bytes")
        return body.decode(), parsedate_to_datetime(response.headers["Date"]).timestamp()


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
                queued=max(of("kvbus_output_queue_depth", name), of("kvbus_output_router_queue_max", name)),
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
        cpu=values["process_cpu_seconds_total"].get((), 0.0),
    )


_REASONS: Final = (
    ("rejected", "kvbus_events_rejected_total", "source"),
    ("left out", "kvbus_events_filtered_total", "source"),
    ("dropped", "kvbus_output_dropped_batches_total", "output"),
    ("router cut off", "kvbus_output_router_disconnects_total", "output"),
    ("router refused", "kvbus_output_handshakes_failed_total", "output"),
    ("engine refused", "kvbus_source_handshakes_failed_total", "source"),
)
