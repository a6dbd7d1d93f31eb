"""Clusters of log servers as in real installations: three servers of Kafka or NATS, or a Redis with a replica and
Sentinels.

Each cluster is started once and shared by its tests. Tests kill single members, and start them again at the same
addresses with their data.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.log import nats_server, redis_server
from tests.log.broker import PATIENCE, format_storage, java
from tests.log.server import HERE, Seat, Server
from tests.ports import free_ports

MEMBERS: Final = 3
SEATS: Final = (HERE,) * MEMBERS
PRIMARY: Final = "kvbus"
"""The name under which the Sentinels know the Redis primary."""

KAFKA = """
process.roles=broker,controller
node.id={node}
controller.quorum.voters={voters}
listeners=PLAINTEXT://{host}:{port},CONTROLLER://{host}:{controller}
advertised.listeners=PLAINTEXT://{host}:{port}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
controller.listener.names=CONTROLLER
log.dirs={directory}/data
default.replication.factor=3
min.insync.replicas=2
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=3
transaction.state.log.min.isr=2
transaction.state.log.num.partitions=1
broker.session.timeout.ms=3000
broker.heartbeat.interval.ms=500
controller.quorum.election.timeout.ms=500
controller.quorum.fetch.timeout.ms=1500
auto.create.topics.enable=false
auto.leader.rebalance.enable=false
num.network.threads=1
num.io.threads=2
background.threads=2
log.cleaner.enable=false
initial.broker.registration.timeout.ms=600000
"""

NATS = """
server_name: n{node}
listen: "{host}:{port}"
jetstream {{ store_dir: "{directory}/data" }}
cluster {{ name: kvbus, listen: "{host}:{route}", routes: [{routes}] }}
"""

SENTINEL = """
bind {host}
port {port}
protected-mode no
dir {directory}
sentinel monitor {name} {at} {primary} 2
sentinel down-after-milliseconds {name} 1000
sentinel failover-timeout {name} 5000
"""


class Cluster:
    """Servers that serve one log together. Clients get the addresses of all servers."""

    def __init__(self, members: Sequence[Server]) -> None:
        self.members = members

    @property
    def address(self) -> str:
        return ",".join(member.address for member in self.members)

    def start(self) -> None:
        for member in self.members:
            member.launch()
        for member in self.members:
            member.wait()

    def kill(self) -> None:
        for member in self.members:
            member.kill()

    def restore(self) -> None:
        """Start every member that is stopped, and wait until it answers."""
        away = [member for member in self.members if not member.runs]
        for member in away:
            member.launch()
        for member in away:
            member.wait()


def brokers(directory: Path, seats: Sequence[Seat] = SEATS) -> Cluster:
    """Return a Kafka cluster of three brokers, which are also controllers.

    Each broker has every topic, and two of them must have a record before it is acknowledged.
    """
    ports, controllers = free_ports(MEMBERS), free_ports(MEMBERS)
    quorum = enumerate(zip(seats, controllers, strict=True), 1)
    voters = ",".join(f"{node}@{seat.host}:{controller}" for node, (seat, controller) in quorum)
    members = []
    for node, (seat, port, controller) in enumerate(zip(seats, ports, controllers, strict=True), 1):
        home = directory / f"{node}"
        home.mkdir()
        settings = home / "server.properties"
        numbers = {"node": node, "host": seat.host, "port": port, "controller": controller}
        settings.write_text(KAFKA.format(**numbers, voters=voters, directory=home))
        if node == 1:
            format_storage(settings)
        else:  # the nodes differ only in node id and directory id; to copy the rest saves a start of Java
            shutil.copytree(directory / "1" / "data", home / "data")
            meta = home / "data" / "meta.properties"
            lines = [line for line in meta.read_text().splitlines() if not line.startswith("directory.id")]
            meta.write_text("\n".join(lines).replace("node.id=1", f"node.id={node}") + "\n")
        members.append(Server(home, port, java("kafka.Kafka", str(settings)), patience=PATIENCE, seat=seat))
    return Cluster(members)


def nats_servers(directory: Path, seats: Sequence[Seat] = SEATS) -> Cluster:
    """Return a cluster of three NATS servers with JetStream."""
    command = nats_server.command()
    assert command is not None, nats_server.MISSING
    ports, routes = free_ports(MEMBERS), free_ports(MEMBERS)
    known = ", ".join(f'"nats-route://{seat.host}:{route}"' for seat, route in zip(seats, routes, strict=True))
    members = []
    for node, (seat, port, route) in enumerate(zip(seats, ports, routes, strict=True), 1):
        home = directory / f"{node}"
        home.mkdir()
        settings = home / "nats.conf"
        numbers = {"node": node, "host": seat.host, "port": port, "route": route}
        settings.write_text(NATS.format(**numbers, routes=known, directory=home))
        members.append(Server(home, port, (command, "-c", str(settings)), seat=seat))
    return Cluster(members)


class Redises(Cluster):
    """A Redis primary with a replica, and Sentinels that know both. The members of the cluster are the Sentinels."""

    def __init__(self, directory: Path, seats: Sequence[Seat] = SEATS) -> None:
        found = redis_server.command()
        assert found is not None, redis_server.MISSING
        self.servers = []
        for name, seat in zip(("one", "other"), seats, strict=False):
            home = directory / name
            home.mkdir()
            self.servers.append(redis_server.RedisServer(home, seat))
        one, other = self.servers
        other.follow(one)
        sentinels = []
        for node, (seat, port) in enumerate(zip(seats, free_ports(MEMBERS), strict=True)):
            home = directory / f"{node}"
            home.mkdir()
            settings = home / "sentinel.conf"
            numbers = {"host": seat.host, "port": port, "at": one.host, "primary": one.port}
            settings.write_text(SENTINEL.format(**numbers, directory=home, name=PRIMARY))
            sentinels.append(Server(home, port, (found[0], str(settings), "--sentinel"), found[1], seat=seat))
        super().__init__(sentinels)

    def start(self) -> None:
        """Start all servers, and wait until the replica follows and each Sentinel knows all servers."""
        for server in self.servers:
            server.start()
        super().start()

    def kill(self) -> None:
        super().kill()
        for server in self.servers:
            server.kill()
