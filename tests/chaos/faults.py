"""Functions that make the faults of a campaign.

Each function returns evidence that its fault took effect. It returns None if there was no connection, batch or process
that the fault could affect.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Final

from tests.chaos.namespaces import Network, connected_to
from tests.chaos.plan import Fault

if TYPE_CHECKING:
    from tests.chaos.cell import Cell
    from tests.doubles.child import Child
    from tests.doubles.link import Link

Maker = Callable[["Cell", Fault], Awaitable[str | None]]


def _link(cell: Cell, fault: Fault) -> Link:
    """Return the link of one rank to which a fault is applied. The same fault always gets the same link."""
    links = cell.links[fault.target]
    return links[int(fault.at * 1000) % len(links)]


async def _armed(cell: Cell, link: Link) -> None:
    """Wait until the link has a connection that a fault can affect, or until the round's traffic ends.

    A replay link has a connection only for moments, while kvbus requests a replay.
    """
    await cell.while_traffic(lambda: link.connections)


async def _cut(cell: Cell, fault: Fault) -> str | None:
    link = _link(cell, fault)
    await _armed(cell, link)
    cut = link.cut(reset=fault.kind == "reset")
    return f"{cut} connections" if cut else None


async def _stall(cell: Cell, fault: Fault) -> str | None:
    link = _link(cell, fault)
    before = link.accepted
    held = link.stall()
    try:
        await asyncio.sleep(fault.seconds)
    finally:
        link.flow()
    held += link.accepted - before
    return f"{held} connections" if held else None


async def _delay(cell: Cell, fault: Fault) -> str | None:
    link = _link(cell, fault)
    before = link.delayed
    link.slow(0.03)
    try:
        await asyncio.sleep(fault.seconds)
    finally:
        link.flow()
    return f"{link.delayed - before} chunks" if link.delayed > before else None


async def _half_open(cell: Cell, fault: Fault) -> str | None:
    link = _link(cell, fault)
    await _armed(cell, link)
    lonely = link.half_open()
    try:
        await asyncio.sleep(fault.seconds)
    finally:
        link.drop_half_open()
    return f"{lonely} connections" if lonely else None


async def _half_open_unnoticed(cell: Cell, fault: Fault) -> str | None:
    """Drop an engine's connection so that kvbus does not notice, and wait until it has recovered the missed batches.

    The proxy's kernel answers kvbus's keepalive probes, so only kvbus's replay requests can show the loss.
    """
    link = cell.links["live"][0]
    await cell.connected()
    before = await cell.counter("kvbus_source_recovered_batches_total")
    if not link.half_open():
        return None
    try:
        end = asyncio.get_running_loop().time() + 60
        while await cell.counter("kvbus_source_recovered_batches_total") == before:
            assert asyncio.get_running_loop().time() < end, "kvbus never missed what a half-open connection swallowed"
            await asyncio.sleep(0.1)
    finally:
        link.drop_half_open()
    return "missed and replayed"


async def _forgotten(cell: Cell, fault: Fault) -> str | None:
    """Drop every packet of kvbus's connection to the engine, until kvbus's TCP keepalive has noticed it.

    A firewall that has forgotten a connection does the same. New connections are not affected.
    """
    engine, network = cell.engine, cell.networks["engine"]
    await cell.connected()
    forgotten = connected_to(network.address, engine.live)
    if not forgotten:
        return None
    rules: list[tuple[str, ...]] = [
        (chain, "-p", "tcp", ours, str(engine.live), theirs, str(port), "-j", "DROP")
        for port in forgotten
        for chain, ours, theirs in (("INPUT", "--dport", "--sport"), ("OUTPUT", "--sport", "--dport"))
    ]
    start = asyncio.get_running_loop().time()
    async with _rules(network, rules):
        await cell.until(
            lambda: connected_to(network.address, engine.live) - forgotten, "kvbus has connected once more", 90
        )
        await cell.connected()
    return f"noticed by kvbus after {asyncio.get_running_loop().time() - start:.0f} s"


async def _replay_silent(cell: Cell, fault: Fault) -> str | None:
    """Lose live batches while the engine's replay does not answer, until kvbus counts these batches as lost."""
    await cell.connected()
    before = await cell.counter("kvbus_source_lost_batches_total")
    replay, live = cell.links["replay"][0], cell.links["live"][0]
    replay.stall()
    try:
        dropped = len(live.wire.dropped)
        live.wire.drop += 1
        await cell.while_traffic(lambda: len(live.wire.dropped) > dropped)
        end = asyncio.get_running_loop().time() + 20
        while await cell.counter("kvbus_source_lost_batches_total") == before:
            if asyncio.get_running_loop().time() > end:
                return None
            await asyncio.sleep(0.1)
        return "given up and counted as lost"
    finally:
        replay.flow()


async def _refuse(cell: Cell, fault: Fault) -> str | None:
    link = _link(cell, fault)
    cut = link.connections
    await link.refuse()
    try:
        await asyncio.sleep(fault.seconds)
    finally:
        await link.listen()
    return f"{cut} connections" if cut else "no listener"


async def _wire(cell: Cell, fault: Fault) -> str | None:
    """Drop, double or swap single batches on a link. Return a text with the number of these batches.

    Wait until the traffic has brought enough batches for the fault. Return None if the traffic ends before that.
    """
    wire = _link(cell, fault).wire
    if fault.kind == "drop":
        wire.drop += fault.count
        goal = len(wire.dropped) + wire.drop
        hit = await cell.while_traffic(lambda: len(wire.dropped) >= goal)
    elif fault.kind == "double":
        wire.double += 1
        goal = wire.doubled + wire.double
        hit = await cell.while_traffic(lambda: wire.doubled >= goal)
    else:
        wire.swap += 1
        goal = wire.swapped + wire.swap
        hit = await cell.while_traffic(lambda: wire.swapped >= goal)
    return f"{fault.count} batches" if hit else None


def _stopped(which: Callable[[Cell], Child]) -> Maker:
    async def stop(cell: Cell, fault: Fault) -> str | None:
        child = which(cell)
        async with child.lock:
            if not child.running:
                return None
            return "stood still" if await child.stop_for(fault.seconds or 5.0) else None

    return stop


async def _kill_engine(cell: Cell, fault: Fault) -> str | None:
    child = cell.engine.child
    async with child.lock:
        if not child.running:
            return None
        killed = child.pid
        await child.kill()
        await cell.engine.revive()
        return f"{killed} -> {child.pid}"


async def _kill_bus(cell: Cell, fault: Fault) -> str | None:
    async with cell.bus.child.lock:
        killed = cell.bus.child.pid
        await cell.restart_bus(orderly=fault.kind == "end kvbus")
        return f"{killed} -> {cell.bus.child.pid}"


async def _kill_router(cell: Cell, fault: Fault) -> str | None:
    router = cell.tried
    async with router.child.lock:
        killed = router.child.pid
        await router.restart()
        return f"{killed} -> {router.child.pid}"


@contextlib.asynccontextmanager
async def _rules(network: Network, rules: list[tuple[str, ...]]) -> AsyncIterator[None]:
    async with network.busy:
        for rule in rules:
            await network.rule(*rule)
        try:
            yield
        finally:
            for rule in rules:
                await network.unrule(*rule)


@contextlib.asynccontextmanager
async def _out_of_reach(cell: Cell) -> AsyncIterator[None]:
    """Make the engine unreachable until the ``with`` block ends.

    If the cell has proxies (links), they refuse connections. If it has network namespaces, the engine's namespace drops
    all packets.
    """
    if cell.networks:
        async with _rules(cell.networks["engine"], [(chain, "-j", "DROP") for chain in ("INPUT", "OUTPUT")]):
            yield
        return
    links = cell.links["live"] + cell.links["replay"]
    for link in links:
        await link.refuse()
    try:
        yield
    finally:
        for link in links:
            await link.listen()


async def _engine_away(cell: Cell, fault: Fault) -> str | None:
    """Make the engine unreachable until kvbus has noticed it and `source_timeout` has passed."""
    async with cell.engine.child.lock:
        await cell.connected()
        before = await cell.counter("kvbus_source_timeouts_total")
        async with _out_of_reach(cell):
            end = asyncio.get_running_loop().time() + 100
            while await cell.counter("kvbus_source_timeouts_total") < before + cell.shape.ranks:
                assert asyncio.get_running_loop().time() < end, "kvbus never gave up an engine that was out of reach"
                await asyncio.sleep(0.1)
            cleared = await cell.bystander.report()
            told = sum(view["blocks"] for stream in cleared.values() for view in stream["views"].values())
    assert not told, f"the engine counts as lost, and a router still holds {told} of its blocks"
    return "given up, then back"


async def _disk_full(cell: Cell, fault: Fault) -> str | None:
    """Fill the disk. kvbus must give up its saved state and continue to relay; a restart with free space begins a
    new state.
    """
    bus, disk = cell.bus, cell.disk
    if disk is None:
        return None
    async with bus.child.lock:
        filled = disk.fill()
        try:
            if fault.kind == "restart on a full disk":
                await cell.restart_bus()
            given_up = await cell.gives_up_state()
            await asyncio.sleep(fault.seconds)
        finally:
            disk.free()
        await cell.restart_bus()
    return f"{filled >> 10} KiB filled" if given_up else None


async def _file_limit(cell: Cell, fault: Fault) -> str | None:
    """Set the maximum size of kvbus's files to one byte, so that its writes fail with EFBIG.

    Unlike a full disk (ENOSPC), this fault needs neither root nor a mount. It also prevents that kvbus overwrites a
    part of an existing file.
    """
    async with cell.bus.child.lock:
        pid = cell.bus.child.pid
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
        try:
            given_up = await cell.gives_up_state()
            await asyncio.sleep(fault.seconds)
        finally:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        await cell.restart_bus()
    return "state given up" if given_up else None


_RULES: Final[dict[str, list[tuple[str, ...]]]] = {
    "packet loss": [("-m", "statistic", "--mode", "random", "--probability", "0.25", "-j", "DROP")],
    "partition": [("-j", "DROP")],
    "tcp reset": [("-p", "tcp", "-j", "REJECT", "--reject-with", "tcp-reset")],
}


async def _packets(cell: Cell, fault: Fault) -> str | None:
    network = cell.networks[fault.target]
    rules: list[tuple[str, ...]] = [(chain, *rule) for rule in _RULES[fault.kind] for chain in ("INPUT", "OUTPUT")]
    async with _rules(network, rules):
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            hit = await network.hits()
    return f"{hit} packets" if hit else None


async def _cable(cell: Cell, fault: Fault) -> str | None:
    network = cell.networks[fault.target]
    async with network.busy:
        await network.link(up=False)
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            await network.link(up=True)
    return "pulled"


ARMED: Final = frozenset({"drop", "double", "swap", "cut", "reset", "half-open"})
"""Kinds of faults that may wait until the end of the traffic for a message or connection to hit."""

MAKERS: Final[dict[str, Maker]] = {
    "cut": _cut,
    "reset": _cut,
    "stall": _stall,
    "delay": _delay,
    "half-open": _half_open,
    "half-open unnoticed": _half_open_unnoticed,
    "connection forgotten": _forgotten,
    "refuse": _refuse,
    "replay silent": _replay_silent,
    "drop": _wire,
    "double": _wire,
    "swap": _wire,
    "stop engine": _stopped(lambda cell: cell.engine.child),
    "stop kvbus": _stopped(lambda cell: cell.bus.child),
    "stop kvbus long": _stopped(lambda cell: cell.bus.child),
    "stop router": _stopped(lambda cell: cell.tried.child),
    "engine away": _engine_away,
    "kill engine": _kill_engine,
    "kill kvbus": _kill_bus,
    "end kvbus": _kill_bus,
    "kill router": _kill_router,
    "disk full": _disk_full,
    "restart on a full disk": _disk_full,
    "file size limit": _file_limit,
    "packet loss": _packets,
    "partition": _packets,
    "tcp reset": _packets,
    "link down": _cable,
}
