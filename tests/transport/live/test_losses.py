"""The account alone: each batch that a router does not get is counted once, and what is said of it is said once."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvbus.core.stats import OutputStats
from kvbus.transport.live.losses import Losses
from kvbus.transport.live.ring import OVERHEAD, Entry, Ring, Share
from kvbus.transport.live.router import Router


def router_at(position, name="", *, asks=False):
    peer: Any = SimpleNamespace(id=position, address=f"10.0.0.{position}:1")
    router = Router(peer, 3, name)
    router.position, router.asks = position, asks
    return router


def account_of(ring, *routers, restart=None):
    stats = OutputStats()
    return Losses("routers", stats, ring, {router.peer.id: router for router in routers}, restart), stats


def fill(ring, count):
    for i in range(count):
        ring.append(Entry(b"x", 2, float(i)))


def test_each_batch_that_the_ring_lets_go_is_lost_for_those_that_had_not_got_it(caplog):
    ring, early, late = Ring(2, 10**6), router_at(0), router_at(2, "blue")
    losses, stats = account_of(ring, early, late)
    fill(ring, 5)
    losses.make_room()
    assert [(each.position, each.dropped_batches, each.dropped_events) for each in (early, late)] == [
        (3, 3, 6),
        (3, 1, 2),
    ]
    assert (stats.dropped_batches, stats.dropped_events) == ({"slow_router": 4}, {"slow_router": 8})
    assert [record.message for record in caplog.records] == [
        "output routers: router 10.0.0.0:1 is too slow and loses batches; it has to ask the replay",
        "output routers: router blue (10.0.0.2:1) is too slow and loses batches; it has to ask the replay",
    ]
    assert [getattr(record, "router", None) for record in caplog.records] == [None, "blue"]
    assert {(vars(record)["output"], vars(record)["stream"]) for record in caplog.records} == {("routers", 3)}
    losses.make_room()
    assert stats.dropped_batches == {"slow_router": 4}, "nothing is counted twice"


def test_where_the_stream_sends_the_state_a_router_gets_it_again_unless_it_asks(caplog):
    ring, takes, asks = Ring(2, 10**6), router_at(0), router_at(1, asks=True)
    again = []

    def restart(router):
        again.append((router, router.lost_at))
        del behind[router.peer.id]

    behind = {0: takes, 1: asks}
    losses = Losses("routers", OutputStats(), ring, behind, restart)
    fill(ring, 4)
    losses.make_room()
    assert again == [(takes, 0.0)], "since when it lacks something, and once"
    assert (takes.dropped_batches, asks.dropped_batches) == (1, 1), "what restarts it counts the rest"
    assert [record.message.rpartition("; ")[2] for record in caplog.records] == [
        "it gets the state again",
        "it has to ask the replay",
    ]


def test_what_all_streams_together_keep_too_much_is_lost_here_too():
    share = Share(2 * (OVERHEAD + 1))
    ring, router = Ring(100, 10**6, share), router_at(0)
    losses, stats = account_of(ring, router)
    fill(ring, 3)
    losses.make_room()
    assert not stats.dropped_batches, "this stream alone is within its limits"
    share.make_room()
    assert stats.dropped_batches == {"slow_router": 1}
    assert router.position == ring.first == 1


@pytest.mark.parametrize("times", [1, 3])
def test_a_batch_that_nobody_gets_has_a_reason_of_its_own(times):
    losses, stats = account_of(Ring(2, 10))
    for _ in range(times):
        losses.queue_full(7)
    assert (stats.dropped_batches, stats.dropped_events) == ({"queue_full": times}, {"queue_full": 7 * times})
