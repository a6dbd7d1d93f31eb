"""A running bus, asked over HTTP: what it says of its sources and its routers."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

import msgspec
from aiohttp.abc import AbstractResolver, ResolveResult

from kvbus.core.remarks import Said
from kvbus.tools.asking import Login, NoAnswerError, asking, get
from kvbus.tools.doctor.findings import Finding, Report, Seen, Severity
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
    reasons: list[Said] = []


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
        do = "start an engine, or correct where kvbus searches"
        report.add([Finding(f"the bus at {bus.url} has found no engine yet", "sources", do)])
    if bus.state_writing is False:
        do = "make room in state_dir or correct its permissions; kvbus tries again every minute"
        report.add([Finding(f"the bus at {bus.url} cannot write its state: a restart loses it", "state_dir", do)])
    for source in bus.sources:
        for said in source.reasons:
            if said.key not in keys:
                key = said.key.replace("sources[]", f"sources[{source.name}]")
                report.add([Finding(f"source {source.name}: {said.text}", key, said.do)])
    for router in bus.routers:
        report.add(_router(router))
    return report


def _router(router: BusRouter) -> list[Finding]:
    who = f"router {router.peer} of output {router.output}"
    at = f"outputs[{router.output}]"
    if router.state == "idle" and router.subscriptions:
        cause = f"{who} subscribes to {router.topics}, and the stream's topic is another: it gets nothing"
        return [Finding(cause, f"{at}.topic", "give the output the topic that this router reads, and its profile")]
    if router.state == "stalled":
        cause = f"{who} reads nothing and was cut off from the live stream"
        return [Finding(cause, f"{at}.send_hwm", "find out why it stands still; it gets the state again once it reads")]
    if router.dropped.batches:
        cause = f"{who} was too slow for {router.dropped.batches:,} batches"
        return [Finding(cause, f"{at}.send_hwm", "give the router CPU; for bursts raise it", Severity.NOTE)]
    return []


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
