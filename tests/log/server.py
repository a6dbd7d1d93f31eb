"""A server that the suite starts, kills and starts again, in a directory of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.budget import ends_servers
from tests.children import Watch

KILL = signal.SIGKILL

PATIENCE = 60.0
"""Seconds for a start on a busy machine; a tenth of one where nothing else runs."""

MOST = 5400
"""Seconds after which a server ends, whatever became of the tests; a whole run takes longer than half an hour where
other machines use the cores."""


def under_timeout(process: subprocess.Popen[bytes]) -> int:
    """The process id of what `timeout` runs."""
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])


class Seat(NamedTuple):
    """Where a server runs: its address, and the command that runs one there."""

    host: str = "127.0.0.1"
    inside: Callable[[list[str]], list[str]] = list


HERE = Seat()


class Server:
    """Runs from `start` to `kill`; its port stays over a restart."""

    def __init__(
        self,
        directory: Path,
        port: int,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        patience: float = PATIENCE,
        seat: Seat = HERE,
    ) -> None:
        self._said = directory / "said"
        self.host, self.port = seat.host, port
        self._command = ["timeout", "--signal=KILL", str(MOST), *seat.inside(list(command))]
        self._env = {**os.environ, **(env or {})}
        self._patience = patience
        self._process: subprocess.Popen[bytes] | None = None
        self._watch: Watch | None = None
        self.of_session = False
        """What it has used is no test's own, whichever of them ends it."""

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        """Of the server itself."""
        assert self._process is not None
        return under_timeout(self._process)

    @property
    def runs(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        self.launch()
        self.wait()

    def launch(self) -> None:
        with self._said.open("ab") as said:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=self._env, process_group=0
            )
        self._watch = Watch(self._process.pid)

    def wait(self) -> None:
        """Until it answers."""
        assert self._process is not None
        until = time.monotonic() + self._patience
        while not self._answers():
            assert self._process.poll() is None, self._said.read_text()
            assert time.monotonic() < until, "the server does not come up"
            time.sleep(0.02)

    def _answers(self) -> bool:
        try:
            socket.create_connection((self.host, self.port), timeout=5).close()
        except OSError:
            return False
        return True

    def signal(self, number: int) -> None:
        """To the server, and `timeout` around it."""
        assert self._process is not None
        os.killpg(self._process.pid, number)

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        """It answers nothing: every thread of it has stopped, which takes a moment on a busy machine."""
        assert self._process is not None
        group = self._process.pid
        self.signal(signal.SIGSTOP)
        try:
            until = time.monotonic() + PATIENCE
            while not all(state in "TZ" for state in _states(group)):  # a zombie runs no more, either
                assert time.monotonic() < until, "the server does not stop"
                time.sleep(0.001)
            yield
        finally:
            self.signal(signal.SIGCONT)

    def kill(self, number: int = KILL) -> None:
        """End it, at once or as it likes to end."""
        if self._process is not None:
            os.kill(self.pid, number)
            with ends_servers() if self.of_session else contextlib.nullcontext():
                self._process.wait(self._patience)
            while self._answers():  # `timeout` is gone, the server goes
                time.sleep(0.01)
            self._process = None
        if self._watch is not None:
            self._watch.close()
            self._watch = None


def _states(group: int) -> Iterator[str]:
    """One letter for each thread of a process group, as in ps."""
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            if process.name.isdecimal() and os.getpgid(int(process.name)) == group:
                for thread in (process / "task").iterdir():
                    yield (thread / "stat").read_text().rpartition(")")[2].split()[0]


def sockets() -> set[str]:
    """The sockets that this process has open."""
    found = set()
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            name = str(each.readlink())
            if name.startswith("socket:"):
                found.add(name)
    return found
