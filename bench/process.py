"""Run a relay as a process on its own core: kvbus, or a relay that it is compared with."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

from tests.ports import free_port, ports_in_a_row

ROOT: Final = Path(__file__).parents[1]
CORES: Final = sorted(os.sched_getaffinity(0))
LOAD_CORE: Final = CORES[0]
"""Number of the core for the engines and routers, which run in the benchmark's process."""

RELAY_CORE: Final = CORES[-1]
"""Number of the core for the relay. With at least two cores and no other load, no other process uses it."""

Kind = Literal["kvbus", "naive", "proxy"]


class Relay:
    """A relay process.

    Attributes:
        live, replay: the engine's endpoints, one for each rank.
        out, out_replay: the relay's endpoints for routers, one for each rank.
        directory: directory of the relay's configuration, log and state.
    """

    def __init__(self, kind: Kind, ranks: int, directory: Path) -> None:
        self.kind, self.ranks, self.directory = kind, ranks, directory
        self.live, self.replay, self.out, self.out_replay = (
            [f"tcp://127.0.0.1:{first + rank}" for rank in range(ranks)]
            for first in (ports_in_a_row(ranks) for _ in range(4))
        )
        self.http = f"127.0.0.1:{free_port()}"
        self.started_in = 0.0
        """Seconds from the start of the process until the relay was ready."""
        self._log = directory / "relay.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, settings: dict[str, Any]) -> None:
        """Start the process and wait until it is ready."""
        if self.kind == "kvbus":
            command = ["-m", "kvbus", "run", str(self._configuration(settings))]
        else:
            pairs = [endpoint for pair in zip(self.live, self.out, strict=True) for endpoint in pair]
            command = ["-m", "bench.relays", self.kind, *pairs]
        env = {name: value for name, value in os.environ.items() if not name.startswith("KVBUS_")}
        env["XDG_RUNTIME_DIR"] = str(self.directory)
        began = time.monotonic()
        if settings.get("output", {}).get("layout") == "merged":
            del self.out[1:]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen([sys.executable, *command], cwd=ROOT, env=env, stdout=log, stderr=log)
        os.sched_setaffinity(self.pid, {RELAY_CORE})
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > began + 60:
                raise RuntimeError(f"{self.kind} did not start: {self._log.read_text()[-2000:]}")
            time.sleep(0.002)
        self.started_in = time.monotonic() - began

    def stop(self) -> None:
        """Terminate the process."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(20)

    @property
    def pid(self) -> int:
        """The operating system's id of the process."""
        assert self._process is not None
        return self._process.pid

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of all threads of the process so far."""
        return time.clock_gettime((~self.pid << 3) | 2)  # Linux's clock id for the CPU time of another process

    def resident_bytes(self) -> int:
        """Return the resident memory of the process in bytes."""
        pages = Path(f"/proc/{self.pid}/statm").read_text().split()[1]
        return int(pages) * resource.getpagesize()

    def get(self, path: str) -> str:
        """Return the body of a GET from kvbus's HTTP server."""
        with urllib.request.urlopen(f"http://{self.http}{path}", timeout=60) as answer:
            return str(answer.read().decode())

    def sources(self) -> list[dict[str, Any]]:
        """Return the entries of kvbus's ``/sources``."""
        found: list[dict[str, Any]] = json.loads(self.get("/sources"))
        return found

    def live_blocks(self) -> int:
        """Return the number of blocks that kvbus's index holds, of all ranks together."""
        return sum(sum(source["blocks"].values()) for source in self.sources())

    def check(self) -> None:
        """Check that kvbus has lost, rejected or dropped nothing. The other relays have no counters to check.

        Raises:
            RuntimeError: kvbus has lost, rejected or dropped batches or events.
        """
        if self.kind != "kvbus":
            return
        for source in self.sources():
            counts = source["counts"]
            bad = counts["missing"] - counts["recovered"], counts["rejected"], counts["lost"]
            if any(bad) or source["state"] != "live":
                raise RuntimeError(f"kvbus lost something: {source}")
        for line in self.get("/metrics").splitlines():
            if line.startswith("kvbus_output_dropped_batches_total") and float(line.split()[-1]):
                raise RuntimeError(f"kvbus dropped something: {line}")

    def _ready(self) -> bool:
        if self.kind != "kvbus":
            return self._log.read_bytes() == b"ready\n"
        try:
            self.get("/readyz")
        except OSError:
            return False
        return True

    def _configuration(self, settings: dict[str, Any]) -> Path:
        source = {"name": "engine", "endpoint": self.live[0], "replay_endpoint": self.replay[0]}
        output = {"name": "routers", "endpoint": self.out[0], "replay_endpoint": self.out_replay[0]}
        whole = {
            "sources": [{**source, "data_parallel_size": self.ranks}],
            "outputs": [{**output, **settings.get("output", {})}],
            "http": self.http,
            "state_dir": str(self.directory / "state") if settings.get("state") else None,
        }
        path = self.directory / "kvbus.yaml"
        path.write_text(json.dumps(whole))  # JSON is valid YAML
        return path


@contextlib.contextmanager
def relay(kind: Kind, ranks: int = 1, **settings: Any) -> Iterator[Relay]:
    """Run a relay until the block ends.

    Args:
        kind: the relay's kind.
        ranks: number of streams that it relays.
        settings: settings for kvbus only. ``output``: additional keys of its output; ``state``: whether it keeps its
            state on disk.
    """
    with tempfile.TemporaryDirectory(prefix="kvbus-bench-") as directory:
        found = Relay(kind, ranks, Path(directory))
        try:
            found.start(settings)
            yield found
        finally:
            found.stop()
