"""Tests for LoRA adapters at llm-d, whose index mistakes every text among a block's extra keys for an image.

vLLM's extra keys contain the adapter's name.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from kvbus.core.wire.encoding import encode_value
from kvbus.core.wire.profiles import PROFILES, encode
from kvbus.core.wire.schema import BlockStored
from kvbus.transport.engine.publisher import EnginePublisher
from tests.ports import free_port

from .cache import BLOCK_SIZE, Block
from .kinds import LLMD_TOPIC, ROUTERS_ENV, installed, named_streams
from .routers import PATIENCE, Program, Stream

pytestmark = pytest.mark.slow

ADAPTER = "adapter"
FIRST, SECOND, LAST = (number << 60 for number in (1, 2, 3))
"""Hashes of three blocks. They are large, because llm-d cannot read an integer that msgpack encodes in one byte."""
KNOWN = {
    FIRST: Block(None, tuple(range(BLOCK_SIZE))),
    SECOND: Block(FIRST, tuple(range(BLOCK_SIZE, 2 * BLOCK_SIZE))),
    LAST: Block(None, (7,) * BLOCK_SIZE),
}


def stored(keys: list[list[str] | None]) -> BlockStored:
    """Return the event that stores two blocks of a LoRA adapter with these extra keys."""
    tokens = encode_value(list(range(2 * BLOCK_SIZE)))
    return BlockStored(
        block_hashes=(FIRST, SECOND),
        parent_block_hash=None,
        token_ids=tokens,
        block_size=BLOCK_SIZE,
        lora_id=1,
        medium="GPU",
        lora_name=ADAPTER,
        extra_keys=encode_value(keys),
    )


@pytest.mark.parametrize(("profile", "found"), [("vllm", set()), ("llm-d", {FIRST, SECOND})])
async def test_llmd_finds_the_blocks_of_a_lora_adapter_through_kvbus(
    tmp_path: Path, profile: str, found: set[int]
) -> None:
    """llm-d finds the blocks of a LoRA adapter only if kvbus removes the adapter's name from the blocks' extra keys.

    llm-d takes the name for an image, so with vLLM's unchanged events it finds none of these blocks.
    """
    if reason := installed("llmd")():
        pytest.skip(reason)
    stream = Stream("127.0.0.1", free_port(), 0)
    last = BlockStored((LAST,), None, encode_value([7] * BLOCK_SIZE), BLOCK_SIZE, None, "GPU", ADAPTER)
    command = [str(Path(os.environ[ROUTERS_ENV]) / "llmd")]
    llmd = Program(command, tmp_path, "llmd", lambda streams: {**named_streams(streams), "model": ADAPTER})
    async with EnginePublisher(stream.live, None, topic=LLMD_TOPIC.encode(), bind=True) as engine:
        await llmd.start([stream])
        try:
            await engine.wait_for_subscriber(PATIENCE)
            for event in (stored([[ADAPTER], [ADAPTER]]), last):
                engine.publish(encode(PROFILES[profile].wire, [event], 1.0, 0))
            loop = asyncio.get_running_loop()
            end = loop.time() + PATIENCE
            while LAST not in (held := await llmd.held(KNOWN)):
                assert loop.time() < end, "the last block never comes"
                await asyncio.sleep(0.05)
            assert held == found | {LAST}
        finally:
            await llmd.stop()
