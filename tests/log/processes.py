"""kvbus as processes around a log: those that write it, those that read it, and routers that note what they are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from tests.doubles.kvbus_process import KvbusProcess
from tests.log.test_aggregator import Moving

NOW: Final = "kvbus"
ADDITIVE: Final = "tests.log.later additive"
BREAKING: Final = "tests.log.later breaking"
FORMER: Final = "tests.log.later former"
"""Versions: what `python -m` runs."""


class Process(KvbusProcess):
    """`kvbus run`, of one version after the other."""

    def __init__(self, directory: Path, name: str, **settings: Any) -> None:
        self.name = name
        (directory / name).mkdir()
        super().__init__(directory / name, settings)

    def stop(self) -> None:
        """End as the kubelet does: SIGTERM, and then patience."""
        assert self.terminate() == 0, self.said

    def counts(self, metric: str, label: str = "reason") -> dict[str, int]:
        """The counters of a metric that are above zero, by a label."""
        found: dict[str, int] = {}
        for line in self.get("/metrics").decode().splitlines():
            name, _, value = line.rpartition(" ")
            if name.startswith(f"{metric}{{") and float(value):
                key = name.partition(f'{label}="')[2].partition('"')[0]
                found[key] = found.get(key, 0) + int(float(value))
        return found


class Aggregator(Process):
    """One that reads a log, for routers."""

    def __init__(self, kind: Any, directory: Path, name: str) -> None:
        self.endpoint = f"ipc://{directory / name}.ipc"
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
            before = self._said.setdefault((topic, seq), said)
            assert before == said, f"two contents of {seq} at {self.at}: {before} and {said}"
        super()._take(topic, seq, payload)
