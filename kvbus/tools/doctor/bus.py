"""HTTP requests of doctor to a running bus, for its sources, its routers and its findings.

A finding is a problem that the bus reports.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

import msgspec
from aiohttp.abc import AbstractResolver, ResolveResult

from kvbus.core.findings.finding import Finding, Reported
from kvbus.tools.asking import Login, NoAnswerError, asking, get
from kvbus.tools.doctor.findings import Report, Seen
from kvbus.transport.reach import find, shown


class BusSource(msgspec.Struct):
    """One source of a running bus: those fields of its entry in ``/sources`` that doctor needs."""

    name: str
    endpoint: str
    state: str
    epoch: int
    last_seq: int
    partial: bool
    blocks: dict[str, int]


class BusRouter(msgspec.Struct):
    """One router of a running bus: those fields of its entry in ``/routers`` that doctor needs."""

    output: str
    state: str
    left: str | None


@dataclass(slots=True)
class Bus:
    """The answers from an HTTP address at which a bus is expected.

    Attributes:
        url: base URL of the address.
        problem: why the address did not answer as a bus does; empty if it did.
        listens: whether some program has accepted the connection.
        sources: entries of ``/sources``.
        routers: entries of ``/routers``, without routers that have disconnected.
        findings: entries of ``/findings``: about the bus, its sources and its routers.
    """

    url: str
    problem: str = ""
    listens: bool = False
    sources: list[BusSource] = field(default_factory=list)
    routers: list[BusRouter] = field(default_factory=list)
    findings: list[Reported] = field(default_factory=list)

    @property
    def runs(self) -> bool:
        """Whether a bus has answered at the address."""
        return not self.problem

    @property
    def spoke(self) -> frozenset[str]:
        """Endpoints of the engines from which the bus has received batches, either live or by a replay."""
        return frozenset(source.endpoint for source in self.sources if source.last_seq >= 0)


class _Resolver(AbstractResolver):
    """A resolver of host names that works in a thread. A slow look-up does not delay the end of the process."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        del family  # not needed, because every name is resolved for IPv4 and for IPv6
        found = await find(f"tcp://{host}:{port}")
        return [
            ResolveResult(hostname=host, host=shown(each), port=port, family=each[0], proto=0, flags=0)
            for each in (found.first, *found.others)
        ]

    async def close(self) -> None:
        """Do nothing, because the resolver holds no resource."""


async def ask(url: str, timeout: float, login: Login | None = None) -> Bus:  # noqa: ASYNC109 - of HTTP
    """Request the sources, routers and findings of a bus.

    If that fails, `Bus.problem` says why, and no error is raised.
    """
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
            findings, _ = await get(client, f"{bus.url}/findings")
            bus.findings = msgspec.json.decode(findings, type=list[Reported])
    except NoAnswerError as error:
        bus.problem, bus.listens = str(error), error.listens
    else:
        bus.listens = True
    return bus


def judge(bus: Bus, *, keys: frozenset[str] = frozenset()) -> Report:
    """Return a report with the findings that a running bus has about itself, its sources and its routers.

    Args:
        bus: the answers of the bus.
        keys: configuration keys about which doctor itself has findings. Findings of the bus about these keys are left
            out.
    """
    report = Report()
    for each in bus.findings:
        text = f"{each.who}: {each.text}" if each.kind == "source" else each.text
        if each.key not in keys:
            report.add([Finding(each.id, each.severity, text, each.key, each.remedy, each.link)])
    return report


def seen(bus: Bus) -> list[Seen]:
    """Return the lines that describe a bus: one for each source, and one for the routers of each output."""
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
