"""A running bus, asked over HTTP: what it says of its sources and its routers."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

import msgspec
from aiohttp.abc import AbstractResolver, ResolveResult
from msgspec import structs

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

    findings: list[Finding]


class BusRouter(msgspec.Struct):
    """The needed fields of an entry of ``/routers``."""

    output: str
    state: str
    left: str | None
    findings: list[Finding]


@dataclass(slots=True)
class Bus:
    """What answers at an HTTP address.

    Attributes:
        url: its base URL.
        problem: why it is no bus, or none that can be asked; empty if it is one.
        listens: something has accepted the connection.
        sources: ``/sources``.
        routers: ``/routers``, without those that have left.
        findings: what it says of itself as a whole.
    """

    url: str
    problem: str = ""
    listens: bool = False
    sources: list[BusSource] = field(default_factory=list)
    routers: list[BusRouter] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

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
            bus.findings = msgspec.json.decode(overview, type=BusOverview).findings
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
    found = [*bus.findings]
    for source in bus.sources:
        found += [structs.replace(each, text=f"source {source.name}: {each.text}") for each in source.findings]
    found += [each for router in bus.routers for each in router.findings]
    report = Report()
    report.add(structs.replace(each, since=None) for each in found if each.key not in keys)
    return report


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
