"""`kvbus run` as a process of its own that can be killed and started again, on the same endpoints."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from kvbus.common.errors import ExitCode
from tests.doubles.kvbus_process import KvbusProcess
from tests.ports import ports_in_a_row


class Process(KvbusProcess):
    """`kvbus run` on the ranks of one engine; the endpoints are those of rank 0."""

    def __init__(self, directory: Path, *, keeps_state: bool, ranks: int = 1, replay_timeout: float = 2.0) -> None:
        self._ports = [ports_in_a_row(ranks) for _ in range(4)]
        self.engine, self.engine_replay, self.out, self.out_replay = self.endpoints(0)
        source = {"name": "engine", "endpoint": self.engine, "replay_endpoint": self.engine_replay}
        config = {
            "sources": [source | {"data_parallel_size": ranks}],
            "outputs": [{"endpoint": self.out, "replay_endpoint": self.out_replay, "heartbeat": 0.2}],
            "state_dir": str(directory / "state") if keeps_state else None,
            "probe_interval": 0.2,
            "replay_timeout": replay_timeout,
        }
        super().__init__(directory, config)

    def endpoints(self, rank: int) -> list[str]:
        """Of the engine, of its replay, of the output and of its replay."""
        return [f"tcp://127.0.0.1:{port + rank}" for port in self._ports]


class QuickProcess(Process):
    """The same, forked off a process that has imported everything: a start takes milliseconds instead of half a second.

    A checkpoint is due after 64 KiB of log instead of 128 MiB, so that kills meet checkpoints that are being written.
    """

    def __init__(self, directory: Path, *, keeps_state: bool) -> None:
        super().__init__(directory, keeps_state=keeps_state)
        self.write()
        with self.log.open("ab") as log:
            self._nursery: subprocess.Popen[str] = subprocess.Popen(
                [sys.executable, "-m", "tests.system.nursery", str(self.file), str(64 * 1024)],
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
