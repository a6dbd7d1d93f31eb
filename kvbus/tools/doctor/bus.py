"""A running bus, asked over HTTP: what it says of its sources and its routers."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

import msgspec
from aiohttp.abc import AbstractResolver, ResolveResult
from msgspec import structs

from kvbus.core import findings as catalogue
from kvbus.core.findings import Finding
from kvbus.tools.asking import Login, NoAnswerError, asking, get
from kvbus.tools.doctor.findings import Report, Seen
from kvbus.transport.reach import find, shown


class BusSource(msgspec.Struct):
    """The needed fields of an entry of ``/sources``."""

    name: str
    endpoint: str
    state: str
    epoch: int
    last_seq: int
    partial: bool
    blocks: dict[str, int]
    findings: list[Finding] = []


class BusOverview(msgspec.Struct):
    """The needed fields of ``/overview``."""

    state_writing: bool | None


class Dropped(msgspec.Struct):
    """Batches that a router did not get."""

    batches: int


class BusRouter(msgspec.Struct):
    """The needed fields of an entry of ``/routers``."""

    output: str
    peer: str
    topics: list[str]
    subscriptions: int
    state: str
    dropped: Dropped
    left: str | None


@dataclass(slots=True)
class Bus:
    """What answers at an HTTP address.

    Attributes:
        url: its base URL.
        problem: why it is no bus, or none that can be asked; empty if it is one.
        listens: something has accepted the connection.
        sources: ``/sources``.
        routers: ``/routers``, without those that have left.
        state_writing: whether it writes its state; None without ``state_dir``.
    """

    url: str
    problem: str = ""
    listens: bool = False
    sources: list[BusSource] = field(default_factory=list)
    routers: list[BusRouter] = field(default_factory=list)
    state_writing: bool | None = None

    @property
    def runs(self) -> bool:
        """Whether it is a running bus."""
        return not self.problem

    @property
    def spoke(self) -> frozenset[str]:
        """The endpoints from which it has got batches, by their live stream or a replay."""
        return frozenset(source.endpoint for source in self.sources if source.last_seq >= 0)


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


async def ask(url: str, timeout: float, login: Login | None = None) -> Bus:  # noqa: ASYNC109 - of HTTP
    """Ask a bus."""
    bus = Bus(url.rstrip("/"))
    try:
        async with (
            asking(bus.url, timeout),
            (login or Login()).session(_Resolver()) as client,
        ):
            sources, _ = await get(client, f"{bus.url}/sources")
            bus.sources = msgspec.json.decode(sources, type=list[BusSource])
            routers, _ = await get(client, f"{bus.url}/routers")
            bus.routers = [each for each in msgspec.json.decode(routers, type=list[BusRouter]) if each.left is None]
            overview, _ = await get(client, f"{bus.url}/overview")
            bus.state_writing = msgspec.json.decode(overview, type=BusOverview).state_writing
    except NoAnswerError as error:
        bus.problem, bus.listens = str(error), error.listens
    else:
        bus.listens = True
    return bus


def judge(bus: Bus, *, keys: frozenset[str] = frozenset()) -> Report:
    """Return what a bus says of itself.

    Args:
        bus: what it has answered.
        keys: of findings made already; the bus need not say the same.
    """
    report = Report()
    if not bus.sources:
        report.add([catalogue.NO_ENGINE_FOUND(at="sources", where=f"the bus at {bus.url} follows none")])
    if bus.state_writing is False:
        report.add([catalogue.STATE_NOT_WRITTEN(where="state_dir", why=f"the log of the bus at {bus.url} says why")])
    for source in bus.sources:
        for finding in source.findings:
            if finding.key not in keys:
                report.add([structs.replace(finding, text=f"source {source.name}: {finding.text}", since=None)])
    for router in bus.routers:
        report.add(_router(router))
    return report


def _router(router: BusRouter) -> list[Finding]:
    who = f"router {router.peer} of output {router.output}"
    at, dropped = f"outputs[{router.output}]", router.dropped.batches
    if router.state == "idle" and router.subscriptions:
        return [catalogue.ROUTER_TOPIC(at=at, who=who, topics=router.topics, topic="another")]
    if router.state == "stalled":
        return [catalogue.ROUTER_STALLED(at=at, who=who, dropped=dropped)]
    return [catalogue.ROUTER_LOST_BATCHES(at=at, who=who, dropped=dropped, when="")] if dropped else []


def seen(bus: Bus) -> list[Seen]:
    """Return a line for each source and each output's routers, as the bus has them."""
    lines = []
    for number, source in enumerate(bus.sources):
        partial = ", partial" if source.partial else ""
        blocks = f"{sum(source.blocks.values()):,} blocks{partial}"
        text = f"{source.endpoint}; {source.state}, epoch {source.epoch}, seq {source.last_seq:,}, {blocks}"
        lines.append(Seen(f"sources[{number}]", source.name, text))
    for output in dict.fromkeys(router.output for router in bus.routers):
        states = [router.state for router in bus.routers if router.output == output]
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        lines.append(Seen("outputs", output, f"routers: {counts}"))
    return lines
