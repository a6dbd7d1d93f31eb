"""Tests for routers that share one IP address, as with NAT, a service mesh or `hostNetwork`.

A replay request of one router has no effect on another router.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final

import pytest
import zmq

from kvbus.client import BlockView, Subscriber, Synced
from kvbus.core.findings.finding import Finding
from kvbus.core.findings.source import source_findings
from kvbus.core.source import Source
from kvbus.core.wire.frames import ASKS_REPLAY
from tests.doubles.bus import Bus, eventually
from tests.doubles.engine import Engine
from tests.doubles.llmd import LlmdWithReplay
from tests.doubles.router import PlainSetRouter
from tests.doubles.socket_routers import END, Context, SocketRouter
from tests.system.test_rebuild import JOURNAL, circuit, run
from tests.system.test_state_on_subscription import deaf, exact, live, publish, stats_of, stream_of

PROFILES: Final[dict[str, Any]] = {
    "vllm": {"profile": "vllm"},
    "dynamo": {"profile": "dynamo"},
    "vllm-router": {"profile": "vllm-router", "topic": ""},
    "llm-d": {"profile": "llm-d", "topic": "kv@pod@model"},
}
OTHERS: Final = [name for name in PROFILES if name != "llm-d"]


def findings(source: Source) -> list[Finding]:
    """Return kvbus's findings about a source.

    The finding about the engine's clock is left out, because the captures are old.
    """
    return [finding for finding in source_findings(source) if finding.id != "clock_off"]


async def ask_for_everything(bus: Bus) -> PlainSetRouter:
    """Request a replay from seq 0 with a DEALER socket without a routing id, and return the blocks that its answer
    gives.

    The client has no subscription.
    """
    router, view = SocketRouter(bus.out, bus.out_replay), PlainSetRouter()
    dealer = router.request(0, hwm=0)
    try:
        while True:
            await eventually(lambda: dealer.poll(0), "an answer")
            frames = dealer.recv_multipart()
            if frames[-2] == END:
                return view
            view.take(int.from_bytes(frames[-2], "big"), frames[-1])
    finally:
        dealer.close(0)
        router.close()


async def rebuild(bus: Bus) -> set[Any]:
    """Return the blocks that a subscriber of kvbus's client library has when it has got the complete state."""
    view = BlockView()
    async with Subscriber(bus.out, bus.out_replay) as subscriber:
        async for update in subscriber:
            view.update(update)
            if isinstance(update, Synced):
                break
    return {key[1:] for key in view.keys()}  # noqa: SIM118


@pytest.mark.parametrize("profile", PROFILES)
def test_eight_readers_and_five_new_routers_at_one_address_get_the_state(profile: str) -> None:
    async def test() -> None:
        async with circuit(batches=5 * JOURNAL, **PROFILES[profile]) as (bus, engine), deaf(bus, 5) as routers:
            await exact(engine, *routers)
            truth = engine.settle()
            for found in await asyncio.gather(*(rebuild(bus) for _ in range(4))):
                assert found == truth
            for view in await asyncio.gather(*(ask_for_everything(bus) for _ in range(4))):
                assert set(view.blocks) == truth
            clears = [router.view.clears for router in routers]
            await publish(bus, engine, 50)
            await exact(engine, *routers)
            assert [router.view.clears for router in routers] == clears
            assert stats_of(bus).states_sent == {"subscribed": 5}

    run(test())


@pytest.mark.parametrize("neighbours", [0, 1])
@pytest.mark.parametrize("profile", PROFILES)
def test_a_router_that_announces_replays_gets_the_state_by_a_replay(profile: str, neighbours: int) -> None:
    """A router has announced by a subscription that it requests replays.

    Its request from 0 gets the complete state, although it lacks the routing id by which kvbus recognizes its own
    readers.
    """

    async def test() -> None:
        async with (
            circuit(batches=5 * JOURNAL, **PROFILES[profile]) as (bus, engine),
            deaf(bus, neighbours) as there,
        ):
            await exact(engine, *there)
            asks = SocketRouter(bus.out, bus.out_replay)
            asks.subscribe()
            try:
                said = ASKS_REPLAY.decode()
                await eventually(lambda: any(said in view.topics for view in live(bus)), "its subscriptions")
                assert set((await ask_for_everything(bus)).blocks) == engine.settle()
            finally:
                asks.close()

    run(test())


@pytest.mark.parametrize("profile", OTHERS)
def test_315_requests_of_one_client_do_not_clear_routers_at_its_address(profile: str) -> None:
    async def test() -> None:
        async with circuit(batches=5 * JOURNAL, **PROFILES[profile]) as (bus, engine), deaf(bus, 2) as neighbours:
            await exact(engine, *neighbours)
            clears = [router.view.clears for router in neighbours]
            for _ in range(315):
                await ask_for_everything(bus)
            await publish(bus, engine, 50)
            await exact(engine, *neighbours)
            assert [router.view.clears for router in neighbours] == clears
            assert stats_of(bus).states_sent == {"subscribed": 2}
            assert stats_of(bus).replay_requests["late"] >= 314, "the last one may not be counted yet"

    run(test())


# -- llm-d, which refuses an answer that begins late -------------------------------------------------------------------


@contextlib.asynccontextmanager
async def llmds(bus: Bus, *contexts: Context | None) -> AsyncIterator[list[LlmdWithReplay]]:
    made = [LlmdWithReplay(bus.out, bus.out_replay) for _ in contexts]
    for router, context in zip(made, contexts, strict=True):
        if context is not None:
            router.unsubscribe()
            router.context.term()
            router.context = context
            router.subscribe()
    try:
        yield made
    finally:
        for router in made:
            router.close()


async def all_hold(engine: Engine, *routers: LlmdWithReplay) -> None:
    truth = {block for _, _, block in engine.settle()}

    async def follow(router: LlmdWithReplay) -> None:
        async with asyncio.timeout(120):
            while await router.read_on() != truth:  # noqa: ASYNC110 - sockets say it
                await asyncio.sleep(0.005)

    await asyncio.gather(*map(follow, routers))


async def joined(bus: Bus, count: int) -> None:
    await eventually(lambda: stats_of(bus).subscribers == count, "the subscriptions")


NUMBERS: Final = [0, 2_000_000, 2**48]


@pytest.mark.parametrize("number", NUMBERS)
def test_llm_d_gets_only_end_as_an_answer_from_0_and_the_state_twice(number: int) -> None:
    """It requests everything when it connects, and again at the first live batch. END makes it take that batch."""

    async def test() -> None:
        async with circuit(**PROFILES["llm-d"]) as (bus, engine):
            stream_of(bus).next_seq += number
            await publish(bus, engine, 5 * JOURNAL)
            async with llmds(bus, None) as (router,):
                await joined(bus, 1)
                await all_hold(engine, router)
                await publish(bus, engine, 50)
                await all_hold(engine, router)
                await eventually(lambda: stats_of(bus).states_sent == {"subscribed": 1, "asked": 1}, "the states")
                await all_hold(engine, router)
                assert stats_of(bus).replay_requests["subscription"] == 2
                assert router.refused == 0
                assert not findings(bus.source)

    run(test())


@pytest.mark.parametrize("number", NUMBERS)
def test_an_llm_d_that_loses_its_blocks_gets_the_state_again(number: int) -> None:
    """Its seqs jump because kvbus has lost its state. llm-d refuses the answer, and asks again after its cooldown."""

    async def test() -> None:
        async with circuit(batches=5 * JOURNAL, **PROFILES["llm-d"]) as (bus, engine), llmds(bus, None) as (router,):
            await joined(bus, 1)
            await all_hold(engine, router)
            await eventually(lambda: stats_of(bus).states_sent["asked"] == 1, "the states")
            await all_hold(engine, router)
            stream_of(bus).resume_at(stream_of(bus).next_seq + number + 10)
            await publish(bus, engine, 10)
            await asyncio.sleep(0)
            router.rules.cooldown = 0.2
            while router.refused < (number > 0):
                await router.read_on()
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            await publish(bus, engine, 10)
            await all_hold(engine, router)
            await publish(bus, engine, 10)
            await all_hold(engine, router)
            assert router.refused == (number > 0)
            assert not findings(bus.source)

    run(test())


@pytest.mark.parametrize("number", NUMBERS)
def test_several_llm_ds_at_one_address_are_exact(number: int) -> None:
    """A request may come from each of them.

    The answer has every seq. After a million seqs, it is END, and each of them gets the state again.
    """

    async def test() -> None:
        async with circuit(**PROFILES["llm-d"]) as (bus, engine):
            stream_of(bus).next_seq += number
            await publish(bus, engine, 5 * JOURNAL)
            async with llmds(bus, None, None) as both:
                await joined(bus, 2)
                await all_hold(engine, *both)
                await publish(bus, engine, 50)
                await all_hold(engine, *both)
                assert [router.refused for router in both] == [0, 0]
                outcome = "subscription" if number else "compacted"
                await eventually(lambda: stats_of(bus).replay_requests[outcome] >= 2, "their requests")
                await all_hold(engine, *both)
                assert bool(stats_of(bus).states_sent["asked"]) == bool(number)
                assert not findings(bus.source)

    run(test())


@pytest.mark.parametrize("count", [1, 2])
def test_requests_of_a_client_keep_llm_ds_at_its_address_exact(count: int) -> None:
    async def test() -> None:
        async with circuit(**PROFILES["llm-d"]) as (bus, engine), deaf(bus, count) as neighbours:
            stream_of(bus).next_seq += 2_000_000
            await publish(bus, engine, 5 * JOURNAL)
            await exact(engine, *neighbours)
            for _ in range(100):
                assert not (await ask_for_everything(bus)).blocks
            await publish(bus, engine, 50)
            await exact(engine, *neighbours)
            assert count <= stats_of(bus).states_sent["asked"] <= 100 * count

    run(test())


def test_a_client_without_a_subscription_after_a_million_seqs_is_a_finding(caplog: pytest.LogCaptureFixture) -> None:
    """If an llm-d requests replays from another address than that of its subscription, kvbus cannot help it."""

    async def test() -> None:
        async with circuit(**PROFILES["llm-d"]) as (bus, engine):
            stream_of(bus).next_seq += 2_000_000
            await publish(bus, engine, 5 * JOURNAL)
            assert set((await ask_for_everything(bus)).blocks) == engine.settle()
            (finding,) = findings(bus.source)
            assert (finding.id, finding.key) == ("replay_too_long", "outputs[].replay_endpoint")
            await eventually(lambda: finding.text in caplog.text, "a log line")
            async with llmds(bus, None) as (router,):
                await joined(bus, 1)
                await all_hold(engine, router)
                assert router.refused == 0
                assert not findings(bus.source), "it ends with an answer that llm-d takes"

    run(test())


def test_llm_ds_with_their_own_keys_are_distinguished_after_a_million_seqs(
    tmp_path: Path, context_with_key: Callable[[bytes], tuple[bytes, Context]]
) -> None:
    server, secret = zmq.curve_keypair()
    (tmp_path / "server").write_bytes(secret + b"\n")
    (tmp_path / "server").chmod(0o600)
    (one, first), (two, second) = context_with_key(server), context_with_key(server)
    (tmp_path / "clients").write_bytes(one + b" one\n" + two + b" two\n")
    keys: dict[str, Any] = {
        "curve_secret_key_file": str(tmp_path / "server"),
        "curve_client_keys": str(tmp_path / "clients"),
    }

    async def test() -> None:
        async with circuit(**PROFILES["llm-d"], **keys) as (bus, engine):
            stream_of(bus).next_seq += 2_000_000
            await publish(bus, engine, 5 * JOURNAL)
            async with llmds(bus, first, second) as both:
                await joined(bus, 2)
                await all_hold(engine, *both)
                assert [router.refused for router in both] == [0, 0]
                await eventually(lambda: stats_of(bus).replay_requests["subscription"] == 4, "their requests")
                await eventually(lambda: stats_of(bus).states_sent["asked"] == 2, "a state for each, and for no other")
                assert not findings(bus.source)

    run(test())


@pytest.fixture
def context_with_key() -> Callable[[bytes], tuple[bytes, Context]]:
    def make(server: bytes) -> tuple[bytes, Context]:
        public, secret = zmq.curve_keypair()
        context: Context = zmq.Context()
        context.setsockopt(zmq.CURVE_SERVERKEY, server)
        context.setsockopt(zmq.CURVE_PUBLICKEY, public)
        context.setsockopt(zmq.CURVE_SECRETKEY, secret)
        return public, context

    return make
