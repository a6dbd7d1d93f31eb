"""Run `kvbus run` as a process of a fault campaign, and read its metrics and log."""

from __future__ import annotations

import asyncio
import json
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

import aiohttp

from kvbus.common.errors import ExitCode
from tests.chaos.namespaces import Namespaces
from tests.doubles.child import Child, python

SOURCE_TIMEOUT: Final = 5.0
JOURNAL: Final = 400
SEND_HWM: Final = 1000


class PortTakenError(Exception):
    """An error: another process uses a port that was free a moment ago."""


Metrics = dict[str, dict[tuple[str, ...], float]]


def parse_metrics(text: str) -> Metrics:
    """Return the samples of kvbus's metrics by metric name, and then by the label values in the order of the text."""
    found: Metrics = defaultdict(dict)
    for line in text.splitlines():
        if not line.startswith("kvbus_"):
            continue
        head, _, value = line.rpartition(" ")
        name, _, labels = head.partition("{")
        parts = tuple(pair.partition('="')[2].rstrip('"') for pair in labels.rstrip("}").split('",') if pair)
        found[name][parts] = float(value)
    return found


def total(metrics: Metrics, name: str) -> float:
    return sum(metrics.get(name, {}).values())


def unaccounted(metrics: Metrics) -> list[str]:
    """Describe each source for which ``missing = recovered + lost + pending`` does not hold."""
    wrong = []
    for labels, missing in metrics["kvbus_source_missing_batches_total"].items():
        recovered, lost, pending = (
            metrics[f"kvbus_source_{name}"][labels]
            for name in ("recovered_batches_total", "lost_batches_total", "pending_batches")
        )
        if missing != recovered + lost + pending:
            wrong.append(
                f"{labels[0]}: missing {missing:g} != recovered {recovered:g} + lost {lost:g} + pending {pending:g}"
            )
    return wrong


class BusProcess:
    """A kvbus process that faults kill and restart, with the same configuration and directory.

    Args:
        directory: directory of all files that kvbus writes.
        config: kvbus's configuration. This class adds ``http``.
        place: the Linux namespaces in which kvbus runs; None: the namespaces of the test's process.
        http: port of kvbus's HTTP server.
    """

    def __init__(self, directory: Path, config: dict[str, Any], http: int, place: Namespaces | None) -> None:
        self._http = http
        path = directory / "kvbus.yaml"
        path.write_text(json.dumps({**config, "http": f"127.0.0.1:{http}"}))  # JSON is YAML
        command = python("kvbus", "run", "-c", str(path), "--log-format", "json")
        # This process writes kvbus's log, so that a limit on the size of kvbus's files does not affect it.
        self.child = Child("kvbus", place.inside(command) if place else command, directory, on_line=lambda line: None)
        runtime = directory / "run"
        runtime.mkdir()
        self.child.env["XDG_RUNTIME_DIR"] = str(runtime)
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5))
        await self.child.start()
        await self.answering()

    async def answering(self, patience: float = 90.0) -> None:
        """Wait until kvbus is ready, for at most ``patience`` seconds.

        Raises:
            AssertionError: kvbus ended, or was not ready in time.
            PortTakenError: kvbus's first start found a port in use.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + patience
        while True:
            try:
                assert self._session is not None
                async with self._session.get(f"http://127.0.0.1:{self._http}/readyz") as response:
                    if response.status == 200:
                        return
            except (aiohttp.ClientError, TimeoutError, OSError):
                pass
            if not self.child.running:
                assert self.child.process is not None
                if self.child.process.returncode == ExitCode.UNAVAILABLE and self.child.starts == 1:
                    raise PortTakenError
                raise AssertionError(
                    f"kvbus ended by itself, status {self.child.process.returncode}: {self.last_words()}"
                )
            assert loop.time() < end, f"kvbus is not ready within {patience:g} s"
            await asyncio.sleep(0.02)

    async def kill(self, *, orderly: bool = False) -> None:
        """End kvbus with SIGKILL, or with SIGTERM if ``orderly``."""
        status = await self.child.end(signal.SIGTERM if orderly else signal.SIGKILL)
        if orderly:
            assert status == 0, f"kvbus ended with {status} after SIGTERM: {self.last_words()}"

    async def get(self, path: str) -> str:
        assert self._session is not None
        async with self._session.get(f"http://127.0.0.1:{self._http}{path}") as response:
            assert response.status == 200, f"{path}: {response.status}"
            return await response.text()

    async def metrics(self) -> Metrics:
        return parse_metrics(await self.get("/metrics"))

    async def sources(self) -> list[dict[str, Any]]:
        return json.loads(await self.get("/sources"))

    def last_words(self) -> str:
        return " | ".join(self.child.log.read_text(errors="replace").splitlines()[-3:])

    def complaints(self) -> list[str]:
        """Return the errors in kvbus's log that no injected fault explains."""
        lines = self.child.log.read_text(errors="replace").splitlines()
        return [
            line
            for line in lines
            if ("Traceback" in line or '"level":"error"' in line.replace(" ", "").lower() or "critical" in line.lower())
            and "cannot write its last state" not in line
            and "seqs cannot be reserved" not in line
            and "and skips the seqs that it may have used" not in line
        ]

    async def close(self) -> None:
        await self.child.close()
        if self._session is not None:
            await self._session.close()
