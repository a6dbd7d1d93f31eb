"""Tests for defects of routers that kvbus cannot repair, as docs/INTEROP.md lists them.

If such a test fails, the router's project has repaired the defect.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest

from kvbus.core.wire.encoding import encode_value
from kvbus.core.wire.profiles import PROFILES, encode
from kvbus.core.wire.schema import BlockRemoved, BlockStored
from kvbus.transport.engine.publisher import EnginePublisher

from .cache import BLOCK_SIZE, Block
from .kinds import KINDS
from .routers import PATIENCE, Router, Stream

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

ONE, TWIN, LAST = (number << 60 for number in (1, 2, 3))
"""Hashes of three blocks. They are large, because llm-d cannot read an integer that msgpack encodes in one byte."""
TOKENS = tuple(range(BLOCK_SIZE))
KNOWN = {ONE: Block(None, TOKENS), TWIN: Block(None, TOKENS), LAST: Block(None, (7,) * BLOCK_SIZE)}


def stored(block: int) -> BlockStored:
    return BlockStored((block,), None, encode_value(list(KNOWN[block].tokens)), BLOCK_SIZE, None, "GPU", None)


def removed(block: int) -> BlockRemoved:
    return BlockRemoved((block,), "GPU")


async def holds(router: Router, expected: set[int]) -> None:
    """Wait until the router holds exactly these blocks."""
    end = asyncio.get_running_loop().time() + PATIENCE
    while (held := await router.held(KNOWN)) != expected:
        assert asyncio.get_running_loop().time() < end, f"{held} instead of {expected}"
        await asyncio.sleep(0.05)


class Pods:
    """A router that reads pods directly. Each pod publishes events as kvbus does with the router's profile."""

    def __init__(self, name: str, directory: Path, stack: AsyncExitStack) -> None:
        self._kind = next(kind for kind in KINDS if kind.name.startswith(name))
        if lacking := self._kind.lacking():
            pytest.skip(lacking)
        self._stack = stack
        self.router = self._kind.make(directory, "router")
        self._engines: list[EnginePublisher] = []

    async def start(self, count: int) -> None:
        streams = [Stream(*self._kind.listens()) for _ in range(count)]
        for stream in streams:
            engine = EnginePublisher(stream.live, stream.replay, topic=self._kind.topic.encode(), bind=True)
            self._engines.append(await self._stack.enter_async_context(engine))
        self._stack.push_async_callback(self.router.stop)
        await self.router.start(streams)
        for engine in self._engines:
            await engine.wait_for_subscriber(PATIENCE)

    def publish(self, pod: int, *events: BlockStored | BlockRemoved) -> None:
        wire = PROFILES[str(self._kind.output["profile"])].wire
        for event in events:
            self._engines[pod].publish(encode(wire, [event], 1.0, 0))


async def test_llm_d_loses_a_block_whose_tokens_equal_those_of_a_removed_block(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        pods = Pods("llm-d-kv-cache", tmp_path, stack)
        await pods.start(1)
        pods.publish(0, stored(ONE), stored(TWIN), stored(LAST))
        await holds(pods.router, {ONE, TWIN, LAST})
        pods.publish(0, removed(ONE), removed(LAST))
        await holds(pods.router, set())  # the engine still has TWIN


async def test_aibrix_loses_a_prefix_on_all_pods_when_one_pod_evicts_it(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        pods = Pods("AIBrix", tmp_path, stack)
        await pods.start(2)
        pods.publish(0, stored(ONE))
        pods.publish(1, stored(ONE), stored(LAST))
        await holds(pods.router, {ONE, TWIN, LAST})  # ONE and TWIN have equal tokens
        pods.publish(0, removed(ONE))
        await holds(pods.router, {LAST})  # the other pod still has ONE
