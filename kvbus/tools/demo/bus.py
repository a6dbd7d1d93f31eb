"""The bus of the demo: ``kvbus run`` in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvbus.common.errors import ExitCode, KvbusError
from kvbus.tools.asking import Login, NoAnswerError, asking, get

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvbus.tools.demo.engines import Engine

_START_SECONDS: Final = 30.0
_POLL_SECONDS: Final = 0.2


class BusError(KvbusError):
    """``kvbus run`` did not start."""

    exit_code = ExitCode.CANNOT_BIND


class Bus:
    """A ``kvbus run`` process that the demo starts, reads over HTTP, and kills.

    Args:
        engines: its sources.
        directory: for its configuration, state, log and sockets.
    """

    def __init__(self, engines: Sequence[Engine], directory: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.url: Final = f"http://127.0.0.1:{probe.getsockname()[1]}"
        self.sources: list[dict[str, Any]] = []
        """The newest answer of ``/sources``; empty while kvbus is down."""
        self._process: asyncio.subprocess.Process | None = None
        self._directory: Final = Path(directory)
        endpoint = f"ipc://{directory}/kvbus"
        self.streams: Final = {
            engine.name: (f"{endpoint}-{stream}", f"{endpoint}-replay-{stream}")
            for stream, engine in enumerate(engines)
        }
        """The live and the replay endpoint for routers, by engine."""
        sources = [
            {"name": each.name, "endpoint": each.endpoint, "replay_endpoint": each.replay_endpoint} for each in engines
        ]
        output = {"name": "routers", "endpoint": endpoint + "-{rank}", "replay_endpoint": endpoint + "-replay-{rank}"}
        self._file: Final = self._directory / "kvbus.yaml"
        # JSON is YAML
        self._file.write_text(
            json.dumps(
                {
                    "http": self.url.removeprefix("http://"),
                    "state_dir": f"{directory}/state",
                    "sources": sources,
                    "outputs": [output],
                }
            )
        )

    @property
    def up(self) -> bool:
        """Whether kvbus runs and answers."""
        return bool(self.sources)

    def total(self, count: str) -> int:
        """Return one of the counts of ``/sources``, summed over the engines."""
        return sum(source["counts"][count] for source in self.sources)

    async def start(self) -> None:
        """Start the process, and wait until it answers.

        Raises:
            BusError: it ended, or it did not answer in time.
        """
        env = {name: value for name, value in os.environ.items() if not name.startswith("KVBUS_")}
        log = self._directory / "log"
        with log.open("w") as errors:
            # in a session of its own: a Ctrl-C is for the demo alone, which then ends this process
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "kvbus", "run", "-c", str(self._file)),
                stdin=asyncio.subprocess.DEVNULL, stdout=errors, stderr=errors, env=env, start_new_session=True,
            )  # fmt: skip
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_START_SECONDS):
                while self._process.returncode is None and not self.up:  # noqa: ASYNC110 - `watch` sets no event
                    await asyncio.sleep(0.02)
        if not self.up:
            raise BusError("kvbus run did not start: " + " ".join(log.read_text().splitlines()[-1:]))

    async def kill(self) -> None:
        """Kill the process with SIGKILL, and wait for its end."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            self._process = None
        self.sources = []

    async def watch(self) -> None:
        """Read ``/sources`` again and again, until cancelled."""
        async with Login().session() as session:
            while True:
                process, answer = self._process, []
                with contextlib.suppress(NoAnswerError):
                    async with asking(self.url, 2.0):
                        body, _ = await get(session, f"{self.url}/sources")
                        answer = json.loads(body)
                self.sources = answer if process is self._process and process is not None else []
                await asyncio.sleep(_POLL_SECONDS if self.up else 0.05)
