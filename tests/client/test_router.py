"""Tests for the client's PrefixRouter, which looks up a prompt in the blocks of many publishers.

They use real sockets, in an event loop and in a thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter

import pytest

from kvbus.client import (
    Match,
    PrefixRouter,
    Restarted,
    RouterError,
    Subscriber,
    SubscriberClosedError,
    Synced,
    Timing,
    Worker,
)
from kvbus.common.errors import BindError
from kvbus.core.wire.encoding import encode_value
from kvbus.core.wire.schema import BlockStored
from kvbus.transport.engine.publisher import EnginePublisher
from tests.client.blocks import batch, removed, stored, tokens
from tests.doubles.bus import eventually, running_bus
from tests.ports import free_ports

SOON = Timing(unreachable_s=0.05, idle_s=0.3, confirm_s=60)


def engine():
    return EnginePublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", bind=True)


def subscribed(publisher, timing=SOON):
    return Subscriber(publisher.endpoint, publisher.replay_endpoint, timing=timing)


@contextlib.asynccontextmanager
async def two_engines():
    """Two running engines: the first holds the blocks 1 and 2, the second holds block 1 on two ranks."""
    async with engine() as a, engine() as b:
        a.publish(batch(stored(1, 2)))
        b.publish(batch(stored(1)))
        b.publish(batch(stored(1), rank=1))
        yield a, b


async def test_a_prefix_router_names_the_workers_with_the_longest_prefix():
    async with two_engines() as (a, b), PrefixRouter({"a": subscribed(a), "b": subscribed(b)}) as router:
        await router.settled()
        assert list(router.longest_prefix(tokens(1, 2, 3)).items()) == [
            (Worker("a", 0), 2),
            (Worker("b", 0), 1),
            (Worker("b", 1), 1),
        ]
        assert router.longest_prefix(tokens(2)) == {}
        assert len(router) == 4
        with pytest.raises(ValueError, match="a token id"):
            router.longest_prefix([-1] * 2)
        await a.wait_for_subscriber()
        a.publish(batch(removed(2), stored(3, parent=1)))
        await eventually(lambda: router.longest_prefix(tokens(1, 3))[Worker("a", 0)] == 2, "the change is there")
        assert {name: (status.state, status.seq) for name, status in router.status().items()} == {
            "a": ("live", 1),
            "b": ("live", 1),
        }


async def test_matches_contain_tiers_for_tokens_and_for_hashes():
    async with two_engines() as (a, b), PrefixRouter({"a": subscribed(a), "b": subscribed(b)}) as router:
        a.publish(batch(stored(1, medium="CPU")))
        await a.wait_for_subscriber()
        await router.settled()
        await eventually(lambda: router.blocks()[Worker("a", 0)] == {"GPU": 2, "CPU": 1}, "all blocks are there")
        size = len(tokens(1))
        whole = {
            Worker("a", 0): Match(2, size, {"GPU": 2, "CPU": 1}),
            Worker("b", 0): Match(1, size, {"GPU": 1}),
            Worker("b", 1): Match(1, size, {"GPU": 1}),
        }
        assert router.matches(tokens(1, 2)) == router.matches_by_hash([1, 2, 3]) == whole
        assert router.matches(tokens(1, 2), salt="s") == router.matches_by_hash([7]) == {}


async def test_stores_without_tokens_are_counted():
    async with engine() as publisher, PrefixRouter({"a": subscribed(publisher)}) as router:
        publisher.publish(batch(BlockStored((1, 2), None, encode_value([]), 16)))
        await router.settled()
        assert (router.status()["a"].tokenless, len(router)) == (1, 0)


async def test_a_prefix_router_follows_workers_that_join_leave_and_restart():
    seen: Counter[tuple[str, str]] = Counter()
    async with (
        two_engines() as (a, b),
        PrefixRouter(on_update=lambda name, each: seen.update([(name, each.kind)])) as router,
    ):
        await router.settled()
        router.add("a", subscribed(a))
        router.add("b", subscribed(b))
        with pytest.raises(ValueError, match="another stream already has the name 'a'"):
            router.add("a", subscribed(a))
        await router.settled()
        router.discard("b")
        assert router.longest_prefix(tokens(1)) == {Worker("a", 0): 1}
        assert list(router.status()) == ["a"]
        await a.wait_for_subscriber()
        with pytest.raises(KeyError):
            router.discard("b")
        a.restart()
        a.publish(batch(stored(7)))
        await eventually(lambda: router.longest_prefix(tokens(7)), "the new epoch is known")
        assert router.longest_prefix(tokens(1)) == {}
        assert seen["a", Restarted.kind] == 1
        assert seen["b", Synced.kind] == 1


async def test_an_update_of_a_discarded_worker_is_not_applied():
    subscribers: list[Subscriber] = []
    router = PrefixRouter()

    def leave(name, update):
        if update.kind == "batch" and len(subscribers) == 1:
            subscribers.pop()
            router.discard(name)

    async with two_engines() as (a, b):
        b.publish(batch(stored(1, 2), rank=2))
        router = PrefixRouter(on_update=leave)
        async with router:
            subscribers.append(subscribed(b))
            router.add("b", subscribers[0])
            await eventually(lambda: not subscribers, "the first of three batches taken in, and the worker gone")
            router.add("a", subscribed(a))
            await router.settled()
            assert {worker.name for worker in router.longest_prefix(tokens(1, 2))} == {"a"}
            assert len(router) == 2


async def test_an_unreachable_worker_is_left_out_until_it_is_back():
    live, replay = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
    publisher = EnginePublisher(live, replay, bind=True)
    async with PrefixRouter({"a": subscribed(publisher)}) as router:
        await router.settled()
        assert "nothing listens" in router.status()["a"].unreachable
        async with publisher:
            publisher.publish(batch(stored(1)))
            await eventually(lambda: router.longest_prefix(tokens(1)) == {Worker("a", 0): 1}, "it is there")
        await eventually(lambda: router.status()["a"].unreachable, "it is away")
        assert router.longest_prefix(tokens(1)) == {}


async def test_keep_unreachable_keeps_an_unreachable_worker():
    async with PrefixRouter(keep_unreachable=True) as router:
        async with engine() as publisher:
            publisher.publish(batch(stored(1)))
            router.add("a", subscribed(publisher))
            await eventually(lambda: router.longest_prefix(tokens(1)) == {Worker("a", 0): 1}, "it is there")
        await eventually(lambda: router.status()["a"].unreachable, "it is away")
        assert router.longest_prefix(tokens(1)) == {Worker("a", 0): 1}


async def test_a_merged_output_has_a_rank_for_each_source():
    a, a_replay, b, b_replay = (f"tcp://127.0.0.1:{port}" for port in free_ports(4))
    sources = [
        {"name": "one", "endpoint": a, "replay_endpoint": a_replay},
        {"name": "other", "endpoint": b, "replay_endpoint": b_replay},
    ]
    async with (
        running_bus(output={"layout": "merged"}, sources=sources) as bus,
        EnginePublisher(a, a_replay, bind=True) as one,
        EnginePublisher(b, b_replay, bind=True) as other,
        PrefixRouter({"bus": Subscriber(bus.out, bus.out_replay)}) as router,
    ):
        one.publish(batch(stored(1)))
        other.publish(batch(stored(1, 2)))
        expected = {Worker("bus", 1): 2, Worker("bus", 0): 1}
        await eventually(lambda: router.longest_prefix(tokens(1, 2)) == expected, "both sources are told apart")


async def test_a_prefix_router_gets_blocks_from_a_snapshot():
    (port,) = free_ports(1)
    snapshot = f"tcp://127.0.0.1:{port}"
    async with (
        running_bus(output={"snapshot_endpoint": snapshot}) as bus,
        EnginePublisher(bus.engine, bus.engine_replay, bind=True) as publisher,
    ):
        publisher.publish(batch(stored(1, 2)))
        await eventually(lambda: bus.caught_up(0), "the batch relayed")
        async with PrefixRouter({"a": Subscriber(bus.out, snapshot_endpoint=snapshot)}) as router:
            await eventually(lambda: router.longest_prefix(tokens(1, 2)) == {Worker("a", 0): 2}, "the state is there")
            router.discard("a")
            assert len(router) == 0


def test_a_program_without_an_event_loop_can_use_a_prefix_router():
    with engine_in_this_thread() as publisher:
        publisher.publish(batch(stored(1)))
        with PrefixRouter({"a": subscribed(publisher)}) as router:
            assert router.wait(60)
            answers = []
            asking = threading.Thread(target=lambda: answers.append(router.longest_prefix(tokens(1))))
            asking.start()
            asking.join(60)
            assert answers == [{Worker("a", 0): 1}]
            with pytest.raises(ValueError, match="already"):
                router.add("a", subscribed(publisher))
            never = Subscriber("tcp://127.0.0.1:9", timing=Timing(unreachable_s=60))
            router.add("never", never)
            assert not router.wait(0.01)
            router.discard("never")
            assert router.wait(60)
        with pytest.raises(RouterError, match="not open"):
            router.wait()
        assert "kvbus-router" not in {thread.name for thread in threading.enumerate()}


@contextlib.contextmanager
def engine_in_this_thread():
    publisher = engine()
    publisher.start()
    try:
        yield publisher
    finally:
        publisher.close()


def test_opening_a_prefix_router_fails_if_a_subscriber_cannot_open():
    with engine_in_this_thread() as publisher:
        taken = Subscriber(publisher.endpoint, bind=True)
        fine = subscribed(publisher)
        with pytest.raises(BindError), PrefixRouter({"fine": fine, "taken": taken}):
            raise AssertionError
        with pytest.raises(SubscriberClosedError):
            fine.open()
    assert "kvbus-router" not in {thread.name for thread in threading.enumerate()}


async def test_a_closed_prefix_router_refuses_a_subscriber():
    with pytest.raises(RouterError, match="not open"):
        PrefixRouter().add("a", Subscriber("tcp://127.0.0.1:9"))


async def test_waiting_in_the_event_loop_of_the_router_is_refused():
    async with PrefixRouter() as router:
        with pytest.raises(RouterError, match="own event loop"):
            router.wait()


async def test_an_exception_of_on_update_ends_the_prefix_router_with_an_error():
    def fails(name, update):
        raise KeyError(name)

    async with two_engines() as (a, _):
        router = PrefixRouter({"a": subscribed(a)}, on_update=fails)
        with pytest.raises(RouterError) as at_the_end:  # noqa: PT012 - its end raises
            async with router:
                with pytest.raises(RouterError, match="has stopped") as failed:
                    await router.settled()
                assert isinstance(failed.value.__cause__, KeyError)
                with pytest.raises(RouterError):
                    router.longest_prefix([1])
        assert isinstance(at_the_end.value.__cause__, KeyError)
