"""An aggregator that is killed while engines write: its routers go to the other one, and it comes back from the log."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from kvbus.core.numbered import EPOCH_BITS
from tests.log.fleet import fleet
from tests.log.kinds import Kafka, Nats, Redis
from tests.log.test_aggregator import Moving
from tests.transport.loops import eventually

STREAMS = 4
KILLS = 3
MOST = 300
"""Seconds after which an aggregator ends, whatever became of the test."""


@pytest.fixture(params=["kafka", "nats", "redis"])
def kind(request):
    """Every log that another process can read."""
    return {"kafka": Kafka, "nats": Nats, "redis": Redis}[request.param](request.getfixturevalue(request.param))


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


class Process:
    """`kvbus run` that reads the log."""

    def __init__(self, kind, directory, name):
        self.endpoint = f"ipc://{directory / name}"
        ((log, keys),) = kind.settings().items()
        settings: dict[str, Any] = {
            "sources": [{"name": "fleet", "discover": {log: {"endpoint": kind.endpoint, **keys}}}],
            "outputs": [
                {"endpoint": self.endpoint, "layout": "per_topic", "topic": "kv@{source}@m", "replay_endpoint": None}
            ],
            "http": None,
        }
        self._config = directory / f"{name}.yaml"
        self._config.write_bytes(msgspec.json.encode(settings))
        self._said = directory / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self):
        command = ["timeout", "--signal=KILL", str(MOST), sys.executable, "-m", "kvbus", "run", "-c", str(self._config)]
        with self._said.open("ab") as said:
            self._process = subprocess.Popen(command, stdout=said, stderr=said, process_group=0)

    def kill(self):
        assert self._process is not None
        assert self._process.poll() is None, self._said.read_text()
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(60)


async def test_routers_are_exact_afterwards_and_each_number_has_one_content(kind, tmp_path):
    async with fleet(kind) as log:
        leaves = {
            f"kv@pod-{n}.engine.{n}@m".encode(): log.leaf(topic=f"m␟pod-{n}/engine␟{n}".encode())
            for n in range(STREAMS)
        }
        for leaf in leaves.values():
            leaf.store(200)
            await leaf.written()
        over = asyncio.Event()

        async def load():
            while not over.is_set():
                for leaf in leaves.values():
                    leaf.store(5, gone=4)
                await asyncio.sleep(0.01)

        def exact(router):
            return all(router.blocks(topic) == leaf.blocks for topic, leaf in leaves.items())

        said: dict[tuple[bytes, int], set[str]] = {}
        ones = [Process(kind, tmp_path, name) for name in ("one", "other")]
        with contextlib.ExitStack() as stack:
            for each in ones:
                each.start()
                stack.callback(each.kill)
            # one goes to whoever is left, one waits for the one that comes back
            router, waiting = (Noting(each.endpoint, said) for each in ones)
            stack.callback(router.close)
            stack.callback(waiting.close)
            await eventually(lambda: exact(router) and exact(waiting), "the engines' blocks")
            loading = asyncio.ensure_future(load())
            for kill in range(KILLS):
                gone, left = ones[kill % 2], ones[1 - kill % 2]
                router.go_to(gone)
                newest = dict(router.next)
                await eventually(lambda newest=newest: _above(router, newest), "live batches of each stream")
                gone.kill()
                router.go_to(left)
                newest = dict(router.next)
                gone.start()
                await eventually(lambda newest=newest: _above(router, newest), "live batches of the other one")
                fresh = Noting(gone.endpoint, said)
                stack.callback(fresh.close)
                await eventually(lambda fresh=fresh: len(fresh.held) == STREAMS, "the one that came back")
            over.set()
            await loading
            for one in (router, waiting, fresh):
                await eventually(lambda one=one: exact(one), "the engines' blocks")
                assert one.violations == []
                assert {seq >> EPOCH_BITS for seq in one.next.values()} == {1}
        assert not any(sum(leaf.stats.dropped_batches.values()) for leaf in leaves.values())


def _above(router, newest):
    router.read()
    return set(router.next) == set(newest) and all(router.next[topic] > newest[topic] + 20 for topic in newest)
