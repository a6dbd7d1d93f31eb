"""Tests for SMG's released gateway and relay at kvbus's output with one merged stream.

The gateway expects consecutive seqs from each rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import running_bus
from tests.ports import free_ports, ports_in_a_row

from .cache import BLOCK_SIZE, Cache

pytestmark = [pytest.mark.slow]

RELAY = """
import sys
from smg.servicer import VllmGrpcServer
live, engine, size = sys.argv[1:]
ends = {"kv_events_endpoint": live, "block_size": int(size), "served_model_name": "m", "max_context_length": 4096}
server = VllmGrpcServer("127.0.0.1:0", engine, "tcp://127.0.0.1:0", "m", vocab_size=1000, **ends)
print(server.address, flush=True)
sys.stdin.read()
server.stop()
"""
RANKS = 2


class Gateway:
    """A running SMG gateway, which a test observes by its log and metrics."""

    def __init__(self, log: Path, metrics: int) -> None:
        self._log = log
        self._url = f"http://127.0.0.1:{metrics}/metrics"

    @property
    def gaps(self) -> int:
        """The number of gaps between seqs that the gateway has logged."""
        return self._log.read_text().count("Sequence gap")

    @property
    def blocks(self) -> int:
        """Return the number of blocks in the gateway's index; -1 before it has an index."""
        try:
            with urllib.request.urlopen(self._url, timeout=5) as answer:  # noqa: S310 - on loopback
                lines = answer.read().decode().splitlines()
        except urllib.error.URLError:
            return -1
        return sum(int(line.rpartition(" ")[2]) for line in lines if line.startswith("smg_kv_index_blocks{"))


@contextlib.contextmanager
def gateway(directory: Path, live: str) -> Iterator[Gateway]:
    """Run SMG's relay, which reads kvbus, and SMG's gateway, which reads the relay."""
    home = os.environ.get("TEST_ROUTERS_HOME")
    python = Path(home or "/nonexistent") / "smg" / "bin" / "python"
    if not python.exists():
        pytest.skip("TEST_ROUTERS_HOME has no SMG: .ci/routers.sh DIR smg")
    port, metrics = free_ports(2)
    words = ("-c", RELAY, live, f"ipc://{directory}/engine", str(BLOCK_SIZE))
    relay = subprocess.Popen([python, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    log = directory / "gateway.log"
    with relay, log.open("wb") as out:
        assert relay.stdout is not None
        address = relay.stdout.readline().decode().strip()
        here = ("--host", "127.0.0.1", "--port", str(port), "--worker-urls", f"grpc://{address}")
        shown = ("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics), "--log-level", "info")
        how = ("--policy", "cache_aware", "--disable-health-check")
        process = subprocess.Popen([python, "-m", "smg", "launch", *here, *shown, *how], stdout=out, stderr=out)
        try:
            yield Gateway(log, metrics)
        finally:
            process.terminate()
            process.wait(30)
            assert relay.stdin is not None
            relay.stdin.close()


async def test_the_smg_gateway_has_the_blocks_of_each_rank_and_misses_no_seq(tmp_path: Path) -> None:
    """SMG's gateway ends with the blocks of both ranks, although it joins late and one rank restarts."""
    live, replay = ports_in_a_row(RANKS), ports_in_a_row(RANKS)
    places = [(f"tcp://127.0.0.1:{live + rank}", f"tcp://127.0.0.1:{replay + rank}") for rank in range(RANKS)]
    source = {"endpoint": places[0][0], "replay_endpoint": places[0][1], "data_parallel_size": RANKS}
    async with (
        running_bus(source=source, output={"profile": "smg", "layout": "merged"}) as bus,
        AsyncExitStack() as stack,
    ):
        engines = [await stack.enter_async_context(EnginePublisher(*each, bind=True)) for each in places]
        caches = [Cache(seed=7000 * rank, rank=rank) for rank in range(RANKS)]

        async def publish(count: int) -> None:
            for engine, cache in zip(engines, caches, strict=True):
                await engine.wait_for_subscriber(60)
                for _ in range(count):
                    engine.publish(cache.batch())

        await publish(60)
        smg = stack.enter_context(gateway(tmp_path, str(bus.daemon.config.outputs[0].endpoint)))

        async def holds(what: str) -> None:
            end = asyncio.get_running_loop().time() + 120
            expected = len(set().union(*(cache.live for cache in caches)))
            while (found := await asyncio.to_thread(lambda: smg.blocks)) != expected:
                assert asyncio.get_running_loop().time() < end, f"{what}: {found} and not {expected}; {tmp_path}"
                await asyncio.sleep(0.2)

        await holds("late")
        await publish(20)
        await holds("live")
        engines[1].restart()
        caches[1].restart(seed=90000)
        await publish(30)
        await holds("after a restart of a rank")
        assert smg.gaps == 0
