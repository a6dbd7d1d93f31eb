"""`kvbus run` as a process of its own that can be killed and started again, on the same endpoints."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from tests.ports import free_ports


class Process:
    """One `kvbus run` after the other."""

    def __init__(self, directory: Path, *, keeps_state: bool) -> None:
        ports = free_ports(4)
        self.engine, self.engine_replay, self.out, self.out_replay = (f"tcp://127.0.0.1:{port}" for port in ports)
        self.config = directory / "kvbus.yaml"
        self.config.write_text(
            f"sources: [{{endpoint: '{self.engine}', replay_endpoint: '{self.engine_replay}'}}]\n"
            f"outputs: [{{endpoint: '{self.out}', replay_endpoint: '{self.out_replay}', heartbeat: 0.2}}]\n"
            f"http: null\nstate_dir: {directory / 'state' if keeps_state else 'null'}\nprobe_interval: 0.2\n"
        )
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("KVBUS_")}
        self.env["XDG_RUNTIME_DIR"] = str(directory)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvbus", "run", "-c", str(self.config)], env=self.env, stderr=subprocess.DEVNULL
        )

    def kill(self) -> None:
        assert self._process is not None
        assert self._process.poll() is None, "kvbus ended by itself"
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(10)


class QuickProcess(Process):
    """The same, forked off a process that has imported everything: a start takes milliseconds instead of half a second.

    Logs are rotated every 64 KiB instead of 32 MiB, so that kills meet dumps that are being written.
    """

    def __init__(self, directory: Path, *, keeps_state: bool) -> None:
        super().__init__(directory, keeps_state=keeps_state)
        self.log = directory / "kvbus.log"
        with self.log.open("ab") as log:
            self._nursery: subprocess.Popen[str] = subprocess.Popen(
                [sys.executable, "-m", "tests.system.nursery", str(self.config), str(64 * 1024)],
                env=self.env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def start(self) -> None:
        assert self._told("start") == "started\n"

    def kill(self) -> None:
        assert self._told("kill") == f"{signal.SIGKILL.value}\n", f"kvbus ended by itself:\n{self.log.read_text()}"

    def close(self) -> None:
        """End the process that the others are forked off, and the last of them with it."""
        with self._nursery:
            _pipe(self._nursery.stdin).close()
            self._nursery.wait(10)

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
