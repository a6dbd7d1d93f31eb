"""Run Redis or Valkey, with and without TLS. If neither is installed, `.ci/redis.sh` unpacks Debian's."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

from redis.asyncio import Redis

from tests.log.server import HERE, Seat, Server
from tests.ports import free_ports
from tests.security.certificates import Authority

HOME_ENV = "TEST_REDIS_HOME"
MISSING = f"no redis-server or valkey-server, and {HOME_ENV} names none: .ci/redis.sh DIR unpacks one; .ci/run does it"

SETTINGS = """
bind {host} 127.0.0.2
protected-mode no
port {port}
tls-port {tls}
tls-cert-file {directory}/server.crt
tls-key-file {directory}/server.key
tls-ca-cert-file {directory}/authority.crt
tls-auth-clients optional
dir {directory}
appendonly yes
appendfsync always
save ""
repl-diskless-sync-delay 0
"""


def command() -> tuple[str, dict[str, str]] | None:
    """Return the path of the Redis or Valkey server and the environment that it needs; None if neither is installed."""
    for name in ("redis-server", "valkey-server"):
        if (found := shutil.which(name)) is not None:
            return found, {}
    home = os.environ.get(HOME_ENV)
    if not home:
        return None
    libraries = [str(path) for path in Path(home).glob("usr/lib/*-linux-gnu")]
    return f"{home}/usr/bin/redis-server", {"LD_LIBRARY_PATH": ":".join(libraries)}


class RedisServer(Server):
    """A Redis server whose records survive a SIGKILL. A client without a user name has all rights."""

    def __init__(self, directory: Path, seat: Seat = HERE) -> None:
        found = command()
        assert found is not None, MISSING
        port, self.tls_port = free_ports(2)
        self.directory = directory
        self.authority = Authority(directory)
        self.authority.issue("server")
        self.authority.issue("expired", days=-1)
        self._settings = directory / "redis.conf"
        self._settings.write_text(SETTINGS.format(host=seat.host, port=port, tls=self.tls_port, directory=directory))
        super().__init__(directory, port, (found[0], str(self._settings)), found[1], seat=seat)

    def follow(self, primary: RedisServer) -> None:
        """Configure the server as a replica of ``primary``, before it starts."""
        with self._settings.open("a") as settings:
            settings.write(f"replicaof {primary.host} {primary.port}\n")

    def client(self) -> Redis:
        """Return a client with the rights of an administrator."""
        return Redis(host=self.host, port=self.port, protocol=2, decode_responses=True)

    def _answers(self) -> bool:
        """Return whether the server runs commands.

        While it loads its data, it accepts connections but runs no command.
        """
        try:
            with socket.create_connection((self.host, self.port), timeout=5) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(5) == b"+PONG"
        except OSError:
            return False

    def lose(self) -> None:
        """Delete the data of the stopped server, so that its log is lost."""
        shutil.rmtree(self.directory / "appendonlydir")
