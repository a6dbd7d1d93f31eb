"""Processes around a log: kvbus processes that write or read it, and routers that record what they receive."""

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
"""Arguments of `python -m` that run kvbus as a former version, which writes records of the former schema."""


class Process(KvbusProcess):
    """A `kvbus run` that can be restarted with another version."""

    def __init__(self, directory: Path, name: str, **settings: Any) -> None:
        self.name = name
        (directory / name).mkdir()
        super().__init__(directory / name, settings)

    def stop(self) -> None:
        """Stop the process as the kubelet does: send SIGTERM, and wait until it has ended."""
        assert self.terminate() == 0, self.said

    def counts(self, metric: str, label: str = "reason") -> dict[str, int]:
        """Return the values of a metric's counters that are above zero, by the value of one of its labels."""
        found: dict[str, int] = {}
        for line in self.get("/metrics").decode().splitlines():
            name, _, value = line.rpartition(" ")
            if name.startswith(f"{metric}{{") and float(value):
                key = name.partition(f'{label}="')[2].partition('"')[0]
                found[key] = found.get(key, 0) + int(float(value))
        return found


class Aggregator(Process):
    """A kvbus process that reads the streams of a log and serves routers."""

    def __init__(self, kind: Any, directory: Path, name: str) -> None:
        self.endpoint = f"ipc://{directory / name}.ipc"
        ((log, keys),) = kind.settings().items()
        routers = {"endpoint": self.endpoint, "layout": "per_topic", "topic": "kv@{source}@m", "replay_endpoint": None}
        source = {"name": "fleet", "discover": {log: {"endpoint": kind.endpoint, "token_ids": "keep", **keys}}}
        super().__init__(directory, name, sources=[source], outputs=[routers])


class Noting(Moving):
    """A router that records the events of each seq in a record that it shares with other routers.

    A seq must have the same events at all these routers, whichever aggregator they read.
    """

    def __init__(self, endpoint: str, said: dict[tuple[bytes, int], set[str]]) -> None:
        self._said = said
        super().__init__(endpoint)

    def _take(self, topic: bytes, seq: int, payload: bytes) -> None:
        events = msgspec.msgpack.decode(payload)[1]
        if events:  # a record that the router already knows brings no events
            said = {repr(event) for event in events}
            before = self._said.setdefault((topic, seq), said)
            assert before == said, f"two contents of {seq} at {self.at}: {before} and {said}"
        super()._take(topic, seq, payload)
