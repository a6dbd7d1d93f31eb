"""Cut a running member of a log's cluster off from the network: ``unshare --net python -m tests.log.partition nats``.

Each member has its own network namespace. The clients are in this process's namespace, which routes between the
members. The cut drops packets silently, so the kernel reports nothing. After each cut, the readers must again hold
exactly the engine's blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final

import click
from redis.asyncio import Redis as Client

from tests.chaos.namespaces import Network
from tests.log import clusters
from tests.log.fleet import fleet
from tests.log.kinds import Redis
from tests.log.load import BusState, asked
from tests.log.server import Seat, Server
from tests.log.test_clusters import Brokers, NatsServers

CUTS: Final = ("peers", "clients", "mute", "alone")
"""The peers from which the leading member is cut off.

``peers``: the other members. ``clients``: the clients. ``mute``: the other members do not get its packets, but it gets
theirs. ``alone``: members and clients.
"""

SILENT: Final = 15.0
"""Duration of a cut in seconds.

It is longer than an append is retried, and longer than two records of an epoch may be apart.
"""


class Sentinels(Redis):
    """A Redis log whose clients ask Sentinels for the primary server."""

    def __init__(self, cluster: clusters.Redises) -> None:
        super().__init__(cluster.servers[0], cluster)
        self.cluster = cluster

    async def _asked(self, server: Server, *words: Any) -> Any:
        """Run a command at a Sentinel or a Redis server, and return its answer."""
        async with Client(host=server.host, port=server.port, protocol=2, decode_responses=True) as client:
            return await client.execute_command(*words)

    async def leader(self) -> Server:
        """Return the server that all Sentinels name as the primary."""
        ask = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", clusters.PRIMARY)
        (host,) = {(await self._asked(each, *ask))[0] for each in self.cluster.members}
        (server,) = (each for each in self.cluster.servers if each.host == host)
        return server

    async def whole(self) -> bool:
        """Return whether the replica follows the primary and has all of its data."""
        leader = await self.leader()
        (other,) = (each for each in self.cluster.servers if each is not leader)
        role, primary, *_ = await self._asked(other, "ROLE")
        return bool(role == "slave" and primary == leader.host and await self._asked(leader, "WAIT", 1, 1000))


class Wires:
    """The network namespaces of the members of a log's cluster. `cut` cuts one member off from others."""

    def __init__(self, networks: Sequence[Network]) -> None:
        self._networks = networks

    @property
    def seats(self) -> list[Seat]:
        return [Seat(each.address, each.inside) for each in self._networks]

    @contextlib.asynccontextmanager
    async def cut(self, host: str, what: str) -> AsyncIterator[None]:
        """Drop packets from or to the member at ``host``, as the kind of cut says."""
        (mine,) = (each for each in self._networks if each.address == host)
        here = [["FORWARD", "-s", host]] if what != "clients" else []
        if what in {"peers", "alone"}:
            here.append(["FORWARD", "-d", host])
        if what in {"clients", "alone"}:
            here.append(["INPUT", "-s", host])
            await mine.rule("INPUT", "-s", mine.outside, "-j", "DROP")
        for rule in here:
            run("iptables", "-w", "-A", *rule, "-j", "DROP")
        try:
            yield
        finally:
            for rule in here:
                run("iptables", "-w", "-D", *rule, "-j", "DROP")
            await mine.unrule("INPUT", "-s", mine.outside, "-j", "DROP")


def run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=60)


def routes() -> None:
    """Configure this network namespace to forward packets between the network namespaces of the log's servers."""
    run("ip", "link", "set", "lo", "up")
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


@contextlib.asynccontextmanager
async def wired(directory: Path) -> AsyncIterator[Wires]:
    """Create a network namespace for each server of the cluster. The process must run in its own network
    namespace.
    """
    routes()
    networks = [Network(directory, f"{number}") for number in range(clusters.MEMBERS)]
    try:
        for each in networks:
            await each.open()
            await each.run("ip", "route", "add", "default", "via", each.outside)
        yield Wires(networks)
    finally:
        for each in networks:
            await each.close()


MAKE: Final[dict[str, Any]] = {
    "kafka": lambda directory, seats: Brokers(clusters.brokers(directory, seats)),
    "nats": lambda directory, seats: NatsServers(clusters.nats_servers(directory, seats)),
    "redis": lambda directory, seats: Sentinels(clusters.Redises(directory, seats)),
}


async def main(name: str, cuts: Sequence[str]) -> None:
    """Start the cluster, and test each kind of cut: make it, end it, and compare the readers' blocks with the
    engine's.
    """
    with tempfile.TemporaryDirectory() as made:
        root = Path(made)
        (root / "members").mkdir()
        async with wired(root) as wires:
            kind = MAKE[name](root / "members", wires.seats)
            try:
                await asyncio.to_thread(kind.cluster.start)
                await watch(kind, wires, root, cuts)
            finally:
                kind.cluster.kill()


async def watch(kind: Any, wires: Wires, root: Path, cuts: Sequence[str]) -> None:
    """Make each cut while the engine publishes, and check afterwards that the readers hold exactly the engine's
    blocks.
    """
    async with fleet(kind) as log, BusState(kind, log, root / "aggregator", None) as seen:
        for what in cuts:
            await asked(kind.whole, "all replicas")
            await seen.exact()
            leader = await asked(kind.leader, "a leader")
            async with seen.load():
                await seen.goes_on()
                async with wires.cut(leader.host, what):
                    await asyncio.sleep(SILENT)
                healed = time.monotonic()
                await seen.goes_on()
                took = time.monotonic() - healed
                await asked(kind.whole, "all replicas")
                await seen.goes_on()
            await seen.exact()
            stats = seen.leaf.stats
            click.echo(
                f"{what}: {took:.1f} s, epoch {seen.epoch}, {dict(stats.refused)}, {dict(stats.dropped_batches)}"
            )


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2:] or CUTS))
