"""Tests for an engine's PUB socket that carries the batches of two workers, with common seqs and with separate seqs.

Common seqs are a proposal for LMCache's coordinator (LMCache#4768).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.request
from collections.abc import AsyncIterator

import pytest
import zmq

from kvbus.config import load
from kvbus.daemon.daemon import Daemon
from kvbus.transport.pump import Pump
from tests.doubles.bus import eventually
from tests.doubles.payloads import payload, store
from tests.doubles.runtimes import WITHOUT_STORE
from tests.ports import free_ports

A, B = b"kv@a@m", b"kv@b@m"


class Coordinator:
    """A PUB socket with a topic for each worker, and one replay endpoint whose answers contain the topic of each
    batch.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], *, one_numbering: bool) -> None:
        live, replay = free_ports(2)
        self.endpoint, self.replay_endpoint = f"tcp://127.0.0.1:{live}", f"tcp://127.0.0.1:{replay}"
        self._one_numbering = one_numbering
        self._buffer: list[tuple[bytes, bytes, bytes]] = []
        self.stored: dict[bytes, set[int]] = {}
        self._pub, self._router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        self._pub.bind(self.endpoint)
        self._router.bind(self.replay_endpoint)
        self._router.sndhwm = 0
        self._pump = Pump(self._router, self._answer)

    def publish(self, topic: bytes, *, lost: bool = False) -> None:
        seq = sum(1 for each, _, _ in self._buffer if self._one_numbering or each == topic)
        block = len(self._buffer) + 1
        self.stored.setdefault(topic, set()).add(block)
        self._buffer.append((topic, seq.to_bytes(8, "big"), payload(store([block]))))
        if not lost:
            self._pub.send_multipart(self._buffer[-1])

    def _answer(self, frames: list[bytes]) -> None:
        peer, start = frames[0], frames[-1]
        for batch in self._buffer:
            if batch[1] >= start:
                self._router.send_multipart([peer, b"", *batch])
        self._router.send_multipart([peer, b"", b"", b"\xff" * 8, b""])

    def close(self) -> None:
        self._pump.close()
        self._pub.close(0)


@contextlib.asynccontextmanager
async def bus_before(coordinator: Coordinator, *topics: bytes) -> AsyncIterator[Daemon]:
    at = {"endpoint": coordinator.endpoint, "replay_endpoint": coordinator.replay_endpoint}
    sources = [{"name": f"s{n}", "topic": topic.decode(), **at} for n, topic in enumerate(topics)]
    outputs = [{"endpoint": f"tcp://127.0.0.1:{free_ports(1)[0]}", "layout": "merged"}]
    settings = {"sources": sources, "outputs": outputs, "http": "127.0.0.1:0", "probe_interval": 0.2}
    daemon = Daemon(load(None, env={}, overrides=settings), runtime=WITHOUT_STORE)
    await daemon.start()
    try:
        yield daemon
    finally:
        await daemon.close(drain=0)


def held_hashes(daemon: Daemon, slot: int) -> set[object]:
    return set(daemon.relay.sources[slot].normalizer.index.names())


@pytest.mark.parametrize("one_numbering", [True, False], ids=["one numbering", "one each"])
async def test_kvbus_is_exact_for_each_worker_of_a_shared_socket(one_numbering: bool) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    coordinator = Coordinator(context, one_numbering=one_numbering)
    try:
        for topic in (A, B, B, A, B):
            coordinator.publish(topic)
        async with bus_before(coordinator, A, B) as daemon:
            for n, topic in enumerate([A, B, B, A, A, B] * 20):
                coordinator.publish(topic, lost=n % 7 == 0)
                await asyncio.sleep(0)
            await eventually(
                lambda: (
                    [held_hashes(daemon, 0), held_hashes(daemon, 1)] == [coordinator.stored[A], coordinator.stored[B]]
                ),
                "each source has its worker's blocks",
            )
            assert all(not source.partial and not source.stats.lost for source in daemon.relay.sources)
    finally:
        coordinator.close()
        context.destroy(0)


async def test_the_sources_page_names_a_wrong_topic() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    coordinator = Coordinator(context, one_numbering=True)
    try:
        async with bus_before(coordinator, b"engine") as daemon:
            assert daemon.http_address is not None
            _, port = daemon.http_address

            about: list[str] = []
            while "topic" not in about:
                coordinator.publish(b"")
                about = [each["id"] for each in await asyncio.to_thread(findings_at, port)]
    finally:
        coordinator.close()
        context.destroy(0)


def findings_at(port: int) -> list[dict[str, str]]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/findings", timeout=60) as answer:
        findings: list[dict[str, str]] = json.load(answer)
        return findings
