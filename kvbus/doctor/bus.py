"""A running bus, asked over HTTP: what it says of its sources and its routers."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from kvbus.doctor.findings import Finding, Report, Seen, Severity
from kvbus.transport.reach.names import find, shown

MAX_BYTES: Final = 16 * 1024 * 1024


@dataclass(slots=True)
class Bus:
    """What answers at an HTTP address.

    Attributes:
        url: its base URL.
        problem: why it is no bus, or none that can be asked; empty if it is one.
        listens: something has accepted the connection.
        sources: ``/sources``.
        routers: ``/routers``.
    """

    url: str
    problem: str = ""
    listens: bool = False
    sources: list[dict[str, Any]] = field(default_factory=list)
    routers: list[dict[str, Any]] = field(default_factory=list)

    @property
    def runs(self) -> bool:
        """Whether it is a running bus."""
        return not self.problem


class _Resolver(AbstractResolver):
    """Looks up names in a thread that nobody waits for at the end."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        del family  # both are tried
        found = await find(f"tcp://{host}:{port}")
        return [
            ResolveResult(hostname=host, host=shown(each), port=port, family=each[0], proto=0, flags=0)
            for each in (found.first, *found.others)
        ]

    async def close(self) -> None:
        """Nothing is open."""


async def ask(url: str, timeout: float) -> Bus:  # noqa: ASYNC109 - of HTTP
    """Ask a bus."""
    bus = Bus(url.rstrip("/"))
    try:
        connector = aiohttp.TCPConnector(resolver=_Resolver())
        limit = aiohttp.ClientTimeout(total=timeout)
        async with aiohttp.ClientSession(timeout=limit, connector=connector) as client:
            bus.sources = await _get(client, bus, "/sources", "state")
            bus.routers = await _get(client, bus, "/routers", "output")
    except aiohttp.ClientConnectorError as error:
        reason = error.os_error.strerror or str(error.os_error)
        bus.problem = f"no bus answers at {bus.url} ({reason.lower()})"
    except TimeoutError:
        bus.listens = True
        bus.problem = f"{bus.url} does not answer within {timeout:g} s"
    except (aiohttp.ClientError, ValueError, TypeError, KeyError) as error:
        bus.listens = True
        bus.problem = (
            f"what answers at {bus.url} is no kvbus ({' '.join(str(error).split())[:80] or type(error).__name__})"
        )
    return bus


async def _get(client: aiohttp.ClientSession, bus: Bus, path: str, mark: str) -> list[dict[str, Any]]:
    async with client.get(bus.url + path, allow_redirects=False) as answer:
        bus.listens = True
        if answer.status != 200:
            raise ValueError(f"GET {path}: {answer.status}")
        body = bytearray()
        async for part in answer.content.iter_chunked(65_536):
            body += part
            if len(body) > MAX_BYTES:
                raise ValueError(f"GET {path}: more than {MAX_BYTES} bytes")
    found = json.loads(body)
    if not isinstance(found, list) or not all(isinstance(each, dict) and mark in each for each in found):
        raise ValueError(f"GET {path} lists no {path[1:]}")
    return found


def judge(bus: Bus, *, keys: frozenset[str] = frozenset()) -> Report:
    """Return what a bus says of itself.

    Args:
        bus: what it has answered.
        keys: of findings made already; the bus need not say the same.
    """
    report = Report()
    for source in bus.sources:
        name = str(source.get("name"))
        reasons = source.get("reasons")
        for reason in reasons if isinstance(reasons, list) else []:
            if not isinstance(reason, dict):
                continue
            key = str(reason.get("key", "")).replace("sources[]", f"sources[{name}]")
            if str(reason.get("key")) not in keys:
                report.add([Finding(f"source {name}: {reason.get('text')}", key, str(reason.get("do")))])
    for router in bus.routers:
        report.add(_router(router))
    return report


def _router(router: dict[str, Any]) -> list[Finding]:
    if router.get("left") is not None:
        return []
    who = f"router {router.get('peer')} of output {router.get('output')}"
    at = f"outputs[{router.get('output')}]"
    if router.get("state") == "idle" and router.get("subscriptions"):
        topics = router.get("topics")
        cause = f"{who} subscribes to {topics}, and the stream's topic is another: it gets nothing"
        return [Finding(cause, f"{at}.topic", "give the output the topic that this router reads, and its profile")]
    if router.get("state") == "stalled":
        cause = f"{who} reads nothing and was cut off from the live stream"
        return [Finding(cause, f"{at}.send_hwm", "find out why it stands still; it gets the state again once it reads")]
    dropped = router.get("dropped")
    if isinstance(dropped, dict) and dropped.get("batches"):
        cause = f"{who} was too slow for {dropped['batches']} batches"
        return [Finding(cause, f"{at}.send_hwm", "give the router CPU; for bursts raise it", Severity.NOTE)]
    return []


def seen(bus: Bus) -> list[Seen]:
    """Return a line for each source and each output's routers, as the bus has them."""
    lines = []
    for number, source in enumerate(bus.sources):
        blocks = source.get("blocks")
        count = sum(blocks.values()) if isinstance(blocks, dict) else 0
        text = f"{source.get('endpoint')}; {source['state']}, epoch {source.get('epoch')}, seq {source.get('last_seq')}"
        partial = ", partial" if source.get("partial") else ""
        lines.append(Seen(f"sources[{number}]", str(source.get("name")), f"{text}, {count:,} blocks{partial}"))
    connected = [router for router in bus.routers if router.get("left") is None]
    for output in dict.fromkeys(str(router.get("output")) for router in connected):
        states = [str(router.get("state")) for router in connected if str(router.get("output")) == output]
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        lines.append(Seen("outputs", output, f"routers: {counts}"))
    return lines
