"""One relay as a process on a core of its own: kvbus, or one of those that it is compared with."""

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
"""Engines and routers run here, in the benchmark's own process."""

RELAY_CORE: Final = CORES[-1]
"""The relay runs here. It is alone if there are two cores and nobody else uses them."""

Kind = Literal["kvbus", "naive", "proxy"]


class Relay:
    """A running relay.

    Attributes:
        live, replay: the engine's endpoints, one for each rank.
        out, out_replay: the relay's endpoints for routers, one for each rank.
        directory: its configuration, log and state.
    """

    def __init__(self, kind: Kind, ranks: int, directory: Path) -> None:
        self.kind, self.ranks, self.directory = kind, ranks, directory
        self.live, self.replay, self.out, self.out_replay = (
            [f"tcp://127.0.0.1:{first + rank}" for rank in range(ranks)]
            for first in (ports_in_a_row(ranks) for _ in range(4))
        )
        self.http = f"127.0.0.1:{free_port()}"
        self.started_in = 0.0
        """Seconds from the start of the process until it was ready."""
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
        with self._log.open("wb") as log:
            self._process = subprocess.Popen([sys.executable, *command], cwd=ROOT, env=env, stdout=log, stderr=log)
        os.sched_setaffinity(self.pid, {RELAY_CORE})
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > began + 60:
                raise RuntimeError(f"{self.kind} did not start: {self._log.read_text()[-2000:]}")
            time.sleep(0.002)
        self.started_in = time.monotonic() - began

    def stop(self) -> None:
        """End the process by its id."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(20)

    @property
    def pid(self) -> int:
        """The id of the process."""
        assert self._process is not None
        return self._process.pid

    def cpu_seconds(self) -> float:
        """Return the CPU time of all threads of the process so far."""
        return time.clock_gettime((~self.pid << 3) | 2)  # Linux's clock of another process's CPU time

    def resident_bytes(self) -> int:
        """Return the memory that the process has resident now."""
        pages = Path(f"/proc/{self.pid}/statm").read_text().split()[1]
        return int(pages) * resource.getpagesize()

    def get(self, path: str) -> str:
        """Return what kvbus's admin server answers."""
        with urllib.request.urlopen(f"http://{self.http}{path}", timeout=60) as answer:
            return str(answer.read().decode())

    def sources(self) -> list[dict[str, Any]]:
        """Return the entries of ``/sources``."""
        found: list[dict[str, Any]] = json.loads(self.get("/sources"))
        return found

    def live_blocks(self) -> int:
        """Return how many blocks kvbus holds of all ranks together."""
        return sum(sum(source["blocks"].values()) for source in self.sources())

    def check(self) -> None:
        """Refuse a run in which kvbus lost, refused or dropped a batch. Others count nothing."""
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
        path.write_text(json.dumps(whole))  # JSON is YAML
        return path


@contextlib.contextmanager
def relay(kind: Kind, ranks: int = 1, **settings: Any) -> Iterator[Relay]:
    """Run a relay until the block ends.

    Args:
        kind: which one.
        ranks: streams that it relays.
        settings: of kvbus alone. ``output``: further keys of its output; ``state``: True keeps its state on disk.
    """
    with tempfile.TemporaryDirectory(prefix="kvbus-bench-") as directory:
        found = Relay(kind, ranks, Path(directory))
        try:
            found.start(settings)
            yield found
        finally:
            found.stop()
