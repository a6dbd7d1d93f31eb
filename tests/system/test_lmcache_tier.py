"""Tests that routers see an engine's blocks, and the blocks that LMCache keeps for the engine, as blocks of one worker.

Both kinds of events come through vLLM's stream. LMCache announces chunks of 256 tokens on the CPU with its own hashes.
"""

from __future__ import annotations

from kvbus.client import Match, PrefixRouter, Subscriber, Worker
from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import eventually, running_bus
from tests.doubles.payloads import payload, removed, store

PROMPT = list(range(1000, 1512))
BLOCKS = list(range(1, 17))
"""Hashes of the engine's blocks in the first half of the prompt, of 16 tokens each."""
CHUNKS = [9001, 9002]


async def test_a_worker_has_a_common_prefix_on_device_and_lmcache():
    async with running_bus() as bus, EnginePublisher(bus.engine, bus.engine_replay, bind=True) as engine:
        await engine.wait_for_subscriber(60)
        out = bus.daemon.config.outputs[0]
        async with PrefixRouter({"pod": Subscriber(out.endpoint, out.replay_endpoint)}) as router:

            async def holds(**tiers: int) -> None:
                expected = {Worker("pod", 0): Match(max(tiers.values()), 16, tiers)} if tiers else {}
                await eventually(lambda: router.matches(PROMPT) == expected, f"{tiers}")

            engine.publish(payload(store(BLOCKS, tokens=PROMPT[:256], block_size=16)))
            for at, chunk in enumerate(CHUNKS):
                tokens = PROMPT[256 * at : 256 * (at + 1)]
                above = CHUNKS[at - 1] if at else None
                engine.publish(payload(store([chunk], above, tokens=tokens, block_size=256, medium="CPU")))
            await holds(GPU=16, CPU=32)
            engine.publish(payload(removed(BLOCKS[::-1])))
            await holds(CPU=32)
            engine.publish(payload(removed([CHUNKS[1]], medium="CPU")))
            await holds(CPU=16)
            engine.publish(payload(removed([CHUNKS[0]], medium="CPU")))
            await holds()
