"""`kvbus run` as a process of its own that can be killed and started again, on the same endpoints."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from kvbus.common.errors import ExitCode
from tests.ports import free_port, ports_in_a_row


class Process:
    """One `kvbus run` after the other, on the ranks of one engine; the names are those of rank 0."""

    def __init__(self, directory: Path, *, keeps_state: bool, ranks: int = 1, replay_timeout: float = 2.0) -> None:
        self._ports = [ports_in_a_row(ranks) for _ in range(4)]
        self.engine, self.engine_replay, self.out, self.out_replay = self.endpoints(0)
        self.http = f"127.0.0.1:{free_port()}"
        self.config = directory / "kvbus.yaml"
        self.config.write_text(
            f"sources: [{{name: engine, endpoint: '{self.engine}', replay_endpoint: '{self.engine_replay}',"
            f" data_parallel_size: {ranks}}}]\n"
            f"outputs: [{{endpoint: '{self.out}', replay_endpoint: '{self.out_replay}', heartbeat: 0.2}}]\n"
            f"http: {self.http}\nstate_dir: {directory / 'state' if keeps_state else 'null'}\nprobe_interval: 0.2\n"
            f"replay_timeout: {replay_timeout}\n"
        )
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("KVBUS_")}
        self.env["XDG_RUNTIME_DIR"] = str(directory)
        self.log = directory / "kvbus.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, before: Callable[[], None] | None = None) -> None:
        """Start one; it calls ``before`` before everything else."""
        command = [sys.executable, "-m", "kvbus", "run", "-c", str(self.config)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, env=self.env, stderr=log, preexec_fn=before)  # noqa: PLW1509

    def endpoints(self, rank: int) -> list[str]:
        """Of the engine, of its replay, of the output and of its replay."""
        return [f"tcp://127.0.0.1:{port + rank}" for port in self._ports]

    def get(self, path: str) -> bytes:
        """The answer to a path, on a connection of its own; nothing while kvbus does not listen yet."""
        try:
            with urllib.request.urlopen(f"http://{self.http}{path}", timeout=10) as answer:
                return bytes(answer.read())
        except (urllib.error.URLError, ConnectionError):
            return b""

    def sources(self) -> list[dict[str, Any]]:
        """What `/sources` says."""
        said: list[dict[str, Any]] = json.loads(self.get("/sources") or b"[]")
        return said

    def pause(self) -> None:
        """Stop it where it stands, as a node without a free core does."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def terminate(self) -> int:
        """Send SIGTERM and return the exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(60)

    def kill(self) -> None:
        assert self._process is not None
        assert self._process.poll() is None, "kvbus ended by itself"
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(60)


class QuickProcess(Process):
    """The same, forked off a process that has imported everything: a start takes milliseconds instead of half a second.

    Logs are rotated every 64 KiB instead of 32 MiB, so that kills meet dumps that are being written.
    """

    def __init__(self, directory: Path, *, keeps_state: bool) -> None:
        super().__init__(directory, keeps_state=keeps_state)
        with self.log.open("ab") as log:
            self._nursery: subprocess.Popen[str] = subprocess.Popen(
                [sys.executable, "-m", "tests.system.nursery", str(self.config), str(64 * 1024)],
                env=self.env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def start(self, before: Callable[[], None] | None = None) -> None:
        assert before is None
        assert self._told("start") == "started\n"

    def kill(self) -> None:
        assert self._told("kill") == f"{signal.SIGKILL.value}\n", f"kvbus ended by itself:\n{self.log.read_text()}"

    def exhaust(self) -> None:
        """Let it run out of memory, at whatever it is doing."""
        assert self._told("exhaust") == f"-{ExitCode.INTERNAL.value}\n", self.log.read_text()

    def close(self) -> None:
        """End the process that the others are forked off, and the last of them with it."""
        with self._nursery:
            _pipe(self._nursery.stdin).close()
            self._nursery.wait(60)

    def _told(self, what: str) -> str:
        _pipe(self._nursery.stdin).write(f"{what}\n")
        _pipe(self._nursery.stdin).flush()
        return _pipe(self._nursery.stdout).readline()


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


@contextlib.contextmanager
def killed_at_the_end(process: Process) -> Iterator[Process]:
    process.start()
    try:
        yield process
    finally:
        process.kill()
