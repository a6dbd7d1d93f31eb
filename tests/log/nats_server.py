"""nats-server with JetStream. `.ci/nats.sh` unpacks Debian's where none is installed."""

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
    """The server; None where there is none."""
    home = os.environ.get(HOME_ENV)
    return shutil.which("nats-server") or (f"{home}/usr/sbin/nats-server" if home else None)


class NatsServer(Server):
    """One whose messages survive being killed. Without further settings whoever comes may do everything."""

    def __init__(self, directory: Path) -> None:
        found = command()
        assert found is not None, MISSING
        (port,) = free_ports(1)
        self.directory = directory
        self._settings = directory / "nats.conf"
        super().__init__(directory, port, (found, "-c", str(self._settings)))
        self.configure()

    def configure(self, more: str = "") -> None:
        """Further settings; one that runs takes them over."""
        self._settings.write_text(SETTINGS.format(port=self.port, directory=self.directory) + more)
        if self._process is not None:
            before = self._said.read_text().count(TAKEN_OVER)
            os.kill(self.pid, signal.SIGHUP)  # not to `timeout`: it hands its own on, and who connects during that
            # second reload is refused, whoever it is
            until = time.monotonic() + PATIENCE
            while self._said.read_text().count(TAKEN_OVER) == before:
                assert time.monotonic() < until, self._said.read_text()
                time.sleep(0.02)

    def lose(self) -> None:
        """What it keeps on its disk; it does not run."""
        shutil.rmtree(self.directory / "data")
