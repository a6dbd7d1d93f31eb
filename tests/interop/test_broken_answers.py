"""Tests for the vLLM router at a replay that stalls.

The router gives up after 5 s without a message, and never requests
the replay again. It must become exact nevertheless: the state on its
subscription has all blocks.

The ordinary suite stalls the link of the replay in the middle of the answer. With a million blocks, the router itself
reads so slowly that the answer stalls: ``TEST_INTEROP_BLOCKS=1000000 TEST_ROUTERS_HOME=… pytest
interop/test_broken_answers.py --log-cli-level=INFO``
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import wait_for
from tests.doubles.link import Link
from tests.ports import free_ports

from .cache import BLOCK_SIZE, Block, Known, removed
from .kinds import VLLM_ROUTER, vllm_router
from .routers import Stream
from .support import Kvbus

log = logging.getLogger(__name__)

BLOCKS: Final = int(os.environ.get("TEST_INTEROP_BLOCKS", "30000"))
SLOWED: Final = BLOCKS < 500_000
CHAIN: Final = 5
"""Number of consecutive blocks that each store event of the test has."""
GONE: Final = 'kvbus_replay_requests_total{outcome="gone",output="routers"}'
TIMED_OUT: Final = "timed out"
SENT: Final = 'kvbus_replay_batches_total{output="routers"}'
LOOKED_AT: Final = 300
"""Number of chains of blocks, evenly spread over all chains, that the test looks up in the router."""


def chain(number: int) -> Known:
    first = number * CHAIN + 1
    names = range(first, first + CHAIN)
    return {
        name: Block(name - 1 if name > first else None, tuple(range(name * BLOCK_SIZE, (name + 1) * BLOCK_SIZE)))
        for name in names
    }


def store(number: int) -> dict[str, Any]:
    blocks = chain(number)
    tokens = [token for block in blocks.values() for token in block.tokens]
    sizes = {"block_size": BLOCK_SIZE, "lora_id": None, "medium": "GPU", "lora_name": None}
    return {"type": "BlockStored", "block_hashes": [*blocks], "parent_block_hash": None, "token_ids": tokens, **sizes}


def batch(*events: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode([1.5, events, 0])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("per_batch", "journal", "said"),
    [
        pytest.param(100, 10, "noncontiguous seq", id="an answer that begins late"),
        pytest.param(100, 100_000, TIMED_OUT, id="the journal"),
        pytest.param(819, 1, TIMED_OUT, id="a state from 0 on"),
    ],
)
async def test_the_vllm_router_is_exact_after_a_broken_replay_answer(
    per_batch: int, journal: int, said: str, tmp_path: Path
) -> None:
    if lacking := VLLM_ROUTER():
        pytest.skip(lacking)
    count = BLOCKS // CHAIN
    engine_live, engine_replay, live, replay, slowed = free_ports(5)
    engine = EnginePublisher(f"tcp://127.0.0.1:{engine_live}", f"tcp://127.0.0.1:{engine_replay}", bind=True)
    output = {
        "endpoint": f"tcp://127.0.0.1:{live}",
        "replay_endpoint": f"tcp://127.0.0.1:{replay}",
        "profile": "vllm-router",
        "heartbeat": 0,
        "journal_batches": journal,
        "journal_bytes": 2**31,
    }
    link = Link("replay", slowed, replay)
    if SLOWED:
        link.slow(0.2)
    async with engine:
        with Kvbus(engine, tmp_path, output) as bus:
            await engine.wait_for_subscriber(60)
            for first in range(0, count, per_batch):
                engine.publish(batch(*map(store, range(first, min(count, first + per_batch)))))
                await asyncio.sleep(0.005)
            wait_for(lambda: bus.last_seq() == engine.next_seq - 1, "kvbus has the stream so far", 300)
            await link.start()
            router = vllm_router(tmp_path, "router", replays=True)
            began = time.monotonic()
            await router.start([Stream("127.0.0.1", live, slowed)])
            try:
                if SLOWED and said == TIMED_OUT:
                    await asyncio.to_thread(wait_for, lambda: bus.metric(SENT) >= 3, "the answer has begun")
                    link.stall()
                await asyncio.to_thread(wait_for, lambda: bus.metric(GONE), "the answer broke off", 60)
                broke = time.monotonic() - began
                numbers = sorted({*range(0, count, max(1, count // LOOKED_AT)), count - 2, count - 1})
                known = {name: block for number in (*numbers, count) for name, block in chain(number).items()}
                gone = chain(count - 1)
                engine.publish(batch(*map(removed, reversed(gone)), store(count)))
                async with asyncio.timeout(600):
                    while await router.held(known) != known.keys() - gone.keys():  # noqa: ASYNC110 - a process says it
                        await asyncio.sleep(0.5)
                exact = time.monotonic() - began
                log.info("%d blocks: the answer broke off after %.1f s, exact after %.1f s", BLOCKS, broke, exact)
            finally:
                await router.stop()
                await link.close()
    assert said in (tmp_path / "router.log").read_text()
