"""Run nats-server with JetStream. If it is not installed, `.ci/nats.sh` unpacks Debian's."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

from tests.log.server import PATIENCE, Server
from tests.ports import free_ports

HOME_ENV = "TEST_NATS_HOME"
MISSING = f"no nats-server, and {HOME_ENV} names none: .ci/nats.sh DIR unpacks one; .ci/run does it"

SETTINGS = """
listen: "0.0.0.0:{port}"
jetstream {{ store_dir: "{directory}/data" }}
"""

TAKEN_OVER = "Reloaded server configuration"


def command() -> str | None:
    """Return the path of nats-server; None if it is not installed."""
    home = os.environ.get(HOME_ENV)
    return shutil.which("nats-server") or (f"{home}/usr/sbin/nats-server" if home else None)


class NatsServer(Server):
    """A NATS server whose messages survive a SIGKILL. By default every client has all rights."""

    def __init__(self, directory: Path) -> None:
        found = command()
        assert found is not None, MISSING
        (port,) = free_ports(1)
        self.directory = directory
        self._settings = directory / "nats.conf"
        super().__init__(directory, port, (found, "-c", str(self._settings)))
        self.configure()

    def configure(self, more: str = "") -> None:
        """Write the server's settings with additional lines. A running server reloads them."""
        self._settings.write_text(SETTINGS.format(port=self.port, directory=self.directory) + more)
        if self._process is not None:
            before = self._said.read_text().count(TAKEN_OVER)
            os.kill(self.pid, signal.SIGHUP)  # `timeout` would forward the signal: the server would reload twice, and
            # refuse clients that connect during the second reload.
            until = time.monotonic() + PATIENCE
            while self._said.read_text().count(TAKEN_OVER) == before:
                assert time.monotonic() < until, self._said.read_text()
                time.sleep(0.02)

    def lose(self) -> None:
        """Delete the data of the stopped server, so that its log is lost."""
        shutil.rmtree(self.directory / "data")
