"""Tests for the doubles of routers: each follows the rules of the router that it replaces."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest

from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import eventually
from tests.doubles.llmd import LlmdWithReplay
from tests.doubles.payloads import cleared, payload, store
from tests.doubles.ping_as_message import PingAsMessage
from tests.doubles.socket_routers import ClearsByPod, NeverAsks
from tests.transport.bare import listening

from .cache import Cache
from .routers import anywhere

ANY = "tcp://127.0.0.1:*"


async def until(read: Callable[[], Awaitable[set[int]]], wanted: set[int]) -> None:
    async def has_read() -> bool:
        return await read() == wanted

    await eventually(has_read, f"{wanted}")


async def test_the_llmd_double_accepts_a_replay_answer_unless_it_begins_late() -> None:
    for steps, exact in ((100, True), (0, True), (3, False)):
        cache = Cache(seed=1)
        async with EnginePublisher(ANY, ANY, bind=True, buffer_steps=steps) as engine:
            for _ in range(10):
                engine.publish(cache.batch())
            before = set(cache.live)
            router = LlmdWithReplay(engine.endpoint, str(engine.replay_endpoint))
            await until(router.read_on, before if steps == 100 else set())
            await engine.wait_for_subscriber(30)
            engine.publish(cache.batch())
            if exact:
                await until(router.read_on, set(cache.live) if steps else cache.live.keys() - before)
                assert router.refused == 0
            else:
                await until(router.read_on, set())
                assert router.refused
            router.close()


async def test_the_llmd_double_begins_with_the_first_live_batch_even_if_it_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for unheard in range(3):
        cache = Cache(seed=1)
        async with EnginePublisher(ANY, ANY, bind=True, buffer_steps=0) as engine:
            engine.publish(cache.batch())
            before = set(cache.live)
            router = LlmdWithReplay(engine.endpoint, str(engine.replay_endpoint))
            await until(router.read_on, set())
            await engine.wait_for_subscriber(30)
            engine.publish(cache.batch())
            batches: list[tuple[int, bytes]] = []
            while not batches:
                batches.extend(router.arrived())
                await asyncio.sleep(0.001)
            looks: Iterator[list[tuple[int, bytes]]] = iter([*([] for _ in range(unheard)), batches])
            monkeypatch.setattr(router, "arrived", lambda: iter(next(looks, [])))  # noqa: B023
            await until(router.read_on, cache.live.keys() - before)
            assert router.refused == 0
            router.close()


async def test_the_llmd_double_forgets_all_blocks_at_an_unfilled_gap() -> None:
    cache = Cache(seed=1)
    async with EnginePublisher(ANY, ANY, bind=True, buffer_steps=0) as engine:
        router = LlmdWithReplay(engine.endpoint, str(engine.replay_endpoint))
        await until(router.read_on, set())
        await engine.wait_for_subscriber(30)
        engine.publish(cache.batch())
        await until(router.read_on, set(cache.live))
        engine.publish(cache.batch(), live=False)

        async def goes_on() -> set[int]:
            engine.publish(cache.batch())  # repeated, because a lost connection loses a batch
            return await router.read_on()

        await until(goes_on, set())
        assert router.refused == 1
        router.close()


async def test_a_clear_of_one_rank_clears_its_blocks_or_all_blocks_of_its_pod() -> None:
    async def settled(read: Callable[[], set[int]], wanted: set[int]) -> None:
        async def found() -> set[int]:
            return read()

        await until(found, wanted)

    for double, left in ((NeverAsks, {2}), (ClearsByPod, set())):
        async with EnginePublisher(ANY, None, bind=True) as one, EnginePublisher(ANY, None, bind=True) as other:
            router = double([one.endpoint, other.endpoint])
            for number, engine in enumerate((one, other)):
                await engine.wait_for_subscriber(30)
                engine.publish(payload(store([number + 1]), rank=number))
            await settled(router.read, {1, 2})
            one.publish(payload(cleared()))
            await settled(router.read, left)
            router.close()


async def test_the_ping_double_reads_a_ping_as_a_message_and_does_not_answer() -> None:
    _, port, _ = anywhere()
    async with listening(port, b"PUB") as peers:
        router = PingAsMessage(f"tcp://127.0.0.1:{port}")
        await eventually(lambda: peers and peers[0].messages, "a subscription")
        peers[0].command(b"PING", bytes(2))
        await eventually(lambda: router.odd, "a message that is none")
        assert peers[0].messages == [[b"\x01"]]
        assert peers[0].commands == [b"READY"]
        await peers[0].close()
        await eventually(lambda: router.lost, "the end of the connection")
        await router.close()
