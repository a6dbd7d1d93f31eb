"""kvbus as processes around a log: those that write it, those that read it, and routers that note what they are told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any, Final

import msgspec

from tests.log.server import under_timeout
from tests.log.test_aggregator import Moving
from tests.ports import free_port

MOST: Final = 300
"""Seconds after which a process ends, whatever became of the test."""

NOW: Final = "kvbus"
ADDITIVE: Final = "tests.log.later additive"
BREAKING: Final = "tests.log.later breaking"
FORMER: Final = "tests.log.later former"
"""Versions: what `python -m` runs."""


class Process:
    """`kvbus run`, of one version after the other."""

    def __init__(self, directory: Path, name: str, **settings: Any) -> None:
        self.name = name
        self.http = f"127.0.0.1:{free_port()}"
        self._config = directory / f"{name}.yaml"
        self._config.write_bytes(msgspec.json.encode({"http": self.http, **settings}))
        self._runtime = directory / f"runtime-{name}"
        self._runtime.mkdir()
        self._log = directory / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, version: str = NOW) -> None:
        """Run a version."""
        bounded = ["timeout", "--signal=KILL", str(MOST)]
        command = [*bounded, sys.executable, "-m", *version.split(), "run", "-c", str(self._config)]
        env = {name: value for name, value in os.environ.items() if not name.startswith("KVBUS_")}
        env["XDG_RUNTIME_DIR"] = str(self._runtime)
        with self._log.open("ab") as said:
            self._process = subprocess.Popen(command, stdout=said, stderr=said, env=env, process_group=0)

    @property
    def said(self) -> str:
        """Its log, of all versions."""
        return self._log.read_text()

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        assert self._process.poll() is None, self.said
        return self._process

    def kill(self) -> None:
        """As a crash does."""
        process = self._running
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)

    def stop(self) -> None:
        """As the kubelet does: SIGTERM, and then patience."""
        process = self._running
        os.kill(under_timeout(process), signal.SIGTERM)
        assert process.wait(60) == 0, self.said

    def close(self) -> None:
        """End it, whatever became of it."""
        if self._process is not None and self._process.poll() is None:
            self.kill()

    def asked(self, path: str) -> str:
        """What it answers over HTTP; nothing where it is not there yet, or not ready."""
        assert self._running
        try:
            with urllib.request.urlopen(f"http://{self.http}{path}", timeout=30) as answer:
                return str(answer.read().decode())
        except OSError:
            return ""

    def counts(self, metric: str, label: str = "reason") -> dict[str, int]:
        """The counters of a metric that are above zero, by a label."""
        found: dict[str, int] = {}
        for line in self.asked("/metrics").splitlines():
            name, _, value = line.rpartition(" ")
            if name.startswith(f"{metric}{{") and float(value):
                key = name.partition(f'{label}="')[2].partition('"')[0]
                found[key] = found.get(key, 0) + int(float(value))
        return found


class Aggregator(Process):
    """One that reads a log, for routers."""

    def __init__(self, kind: Any, directory: Path, name: str) -> None:
        self.endpoint = f"ipc://{directory / name}"
        ((log, keys),) = kind.settings().items()
        routers = {"endpoint": self.endpoint, "layout": "per_topic", "topic": "kv@{source}@m", "replay_endpoint": None}
        source = {"name": "fleet", "discover": {log: {"endpoint": kind.endpoint, "token_ids": "keep", **keys}}}
        super().__init__(directory, name, sources=[source], outputs=[routers])


class Noting(Moving):
    """It notes what is said under which number, with everybody who has the same notes: a number has one content."""

    def __init__(self, endpoint: str, said: dict[tuple[bytes, int], set[str]]) -> None:
        self._said = said
        super().__init__(endpoint)

    def _take(self, topic: bytes, seq: int, payload: bytes) -> None:
        events = msgspec.msgpack.decode(payload)[1]
        if events:  # a known record says nothing
            said = {repr(event) for event in events}
            assert self._said.setdefault((topic, seq), said) == said, f"two contents of {seq}"
        super()._take(topic, seq, payload)


def above(router: Moving, newest: dict[bytes, int], batches: int = 20) -> bool:
    """Whether a router has had so many messages more of each topic."""
    router.read()
    return set(router.next) == set(newest) and all(router.next[topic] > newest[topic] + batches for topic in newest)
