"""A log server such as Kafka, NATS or Redis that tests start, kill and start again, in its own directory."""

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
"""Maximum duration of a start on a busy machine, in seconds. An idle machine needs a tenth of a second."""

MOST = 5400
"""Seconds after which a server ends, even if the tests were killed.

A complete test run takes longer than half an hour if other machines use the cores.
"""


def under_timeout(process: subprocess.Popen[bytes]) -> int:
    """Return the process id of the server that runs as the child of a `timeout` process."""
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])


class Seat(NamedTuple):
    """The place where a server runs: its address, and the command prefix that runs a program there."""

    host: str = "127.0.0.1"
    inside: Callable[[list[str]], list[str]] = list


HERE = Seat()


class Server:
    """A server that runs from `start` to `kill`. It has the same port after a restart."""

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
        """Whether several tests share the server, so that its resources count for no single test."""

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        """The process id of the server itself, not of `timeout`."""
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
        """Wait until the started server answers. Fail if it ends before."""
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
        """Send a signal to the server and to the `timeout` around it."""
        assert self._process is not None
        os.killpg(self._process.pid, number)

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        """Stop the server with SIGSTOP until the ``with`` block ends, so that it answers nothing.

        On a busy machine it takes a moment until all threads have stopped.
        """
        assert self._process is not None
        group = self._process.pid
        self.signal(signal.SIGSTOP)
        try:
            until = time.monotonic() + PATIENCE
            while not all(state in "TZ" for state in _states(group)):  # a zombie does not run either
                assert time.monotonic() < until, "the server does not stop"
                time.sleep(0.001)
            yield
        finally:
            self.signal(signal.SIGCONT)

    def kill(self, number: int = KILL) -> None:
        """Send the server a signal, by default SIGKILL, and wait until it has ended."""
        if self._process is not None:
            os.kill(self.pid, number)
            with ends_servers() if self.of_session else contextlib.nullcontext():
                self._process.wait(self._patience)
            while self._answers():  # the server may end after `timeout`
                time.sleep(0.01)
            self._process = None
        if self._watch is not None:
            self._watch.close()
            self._watch = None


def _states(group: int) -> Iterator[str]:
    """Yield the state of each thread of a process group, as the letter that ps shows."""
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # the process has just ended
            if process.name.isdecimal() and os.getpgid(int(process.name)) == group:
                for thread in (process / "task").iterdir():
                    yield (thread / "stat").read_text().rpartition(")")[2].split()[0]


def sockets() -> set[str]:
    """Return the sockets that the test's process has open, to see whether a client closes all of its sockets."""
    found = set()
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            name = str(each.readlink())
            if name.startswith("socket:"):
                found.add(name)
    return found
