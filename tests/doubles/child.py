"""Child processes that tests start, stop, kill and inspect, and that the kernel kills when the test process ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]

_DIES_WITH_PARENT: Final = ("setpriv", "--pdeathsig", "KILL", "--")
"""Command prefix that makes the kernel kill the child when this process ends.

`subprocess` could do this with a `preexec_fn`, but then it forks, and libraries register handlers for forks. After this
process has used gRPC, about one child in thirty aborts before it executes the program.
"""


class Child:
    """A program that a test can start several times. It writes stderr to a file, or passes each line to a callback.

    Args:
        name: name of the program in error messages, and name of its log file.
        command: command line of the program. A test may change it between two starts.
        directory: directory of the log file.
        piped: whether stdin and stdout of the program are pipes.
        on_line: called with each line of stderr.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        directory: Path,
        *,
        piped: bool = False,
        on_line: Callable[[str], None] | None = None,
    ) -> None:
        self.name = name
        self.command = list(command)
        self.log = directory / f"{name}.log"
        self._piped = piped
        self._on_line = on_line
        self._reader: asyncio.Task[None] | None = None
        self.process: asyncio.subprocess.Process | None = None
        self.lock = asyncio.Lock()
        """Lock that a task holds while it stops, kills or restarts the program."""
        self.starts = 0
        self.expected_end = False
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("KVBUS_")}
        self.env["PYTHONPATH"] = str(ROOT)  # A child in its own mount namespace may have another working directory.

    async def start(self) -> None:
        self.starts += 1
        self.expected_end = False
        pipe = asyncio.subprocess.PIPE if self._piped else asyncio.subprocess.DEVNULL
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *_DIES_WITH_PARENT,
                *self.command,
                stdin=pipe,
                stdout=pipe,
                stderr=asyncio.subprocess.PIPE if self._on_line else log,
                env=self.env,
                cwd=ROOT,
                limit=64 * 1024 * 1024,
            )
        if self._on_line is not None:
            self._reader = asyncio.ensure_future(self._read(self.process))

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        assert self._on_line is not None
        with self.log.open("ab", buffering=0) as log:
            async for line in process.stderr:
                log.write(line)
                self._on_line(line.decode(errors="replace").rstrip())

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.returncode is None

    def send(self, number: int) -> None:
        if self.running:
            os.kill(self.pid, number)

    async def stop_for(self, seconds: float) -> bool:
        """Send SIGSTOP, wait, and send SIGCONT. Return whether the kernel had really stopped the program."""
        self.send(signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
            return self.running and self.state() == "T"
        finally:
            self.send(signal.SIGCONT)

    async def kill(self) -> int:
        """Kill the program with SIGKILL, and return its exit status."""
        return await self.end(signal.SIGKILL)

    async def end(self, number: int = signal.SIGTERM, patience: float = 60.0) -> int:
        """Send a signal, wait until the program ends, and return its exit status.

        Raises:
            AssertionError: the program did not end within ``patience`` seconds. It has been killed.
        """
        assert self.process is not None
        self.expected_end = True
        self.send(number)
        try:
            async with asyncio.timeout(patience):
                return await self.process.wait()
        except TimeoutError:
            self.send(signal.SIGKILL)
            await self.process.wait()
            raise AssertionError(f"{self.name} did not end within {patience:g} s of signal {number}") from None

    async def close(self) -> None:
        """Kill the program if it is running, and read the rest of its stderr."""
        if self.process is not None and self.process.returncode is None:
            self.expected_end = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            await self.process.wait()
        if self._reader is not None:
            await asyncio.gather(self._reader, return_exceptions=True)

    # -- values from /proc -------------------------------------------------------------------------------------------

    def state(self) -> str:
        """Return the state of the process as the letter that ``ps`` shows. ``T`` means stopped."""
        text = Path(f"/proc/{self.pid}/stat").read_text()
        return text.rpartition(")")[2].split()[0]

    def rss(self) -> int:
        """Return the resident memory of the process in bytes."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))  # noqa: PTH208 - only the number of entries is needed


def python(*arguments: str) -> list[str]:
    """Return a command line that runs a Python module of this project."""
    return [sys.executable, "-m", *arguments]
