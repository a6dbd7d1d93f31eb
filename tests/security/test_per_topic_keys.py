"""Tests for CURVE with ``layout: per_topic``.

All streams share one endpoint, so they share one list of the routers that may connect.
"""

from __future__ import annotations

from typing import Any

from tests.doubles.bus import eventually
from tests.doubles.socket_routers import TopicRouter
from tests.security.keys import Keyring, Pair, client_context
from tests.system.test_per_topic import OUTPUT, Workers, reading
from tests.system.test_reload import Fleet, at, running


async def test_removing_a_key_per_topic_disconnects_only_its_router(tmp_path: Any) -> None:
    keys = Keyring(tmp_path)
    pairs = [Pair(tmp_path, name) for name in "ab"]
    keys.allow(*pairs)
    fleet = Fleet("xy", output={**OUTPUT, **keys.output})
    async with running(fleet), Workers(fleet) as workers:
        stays, goes = (TopicRouter(at(fleet.out), context=client_context(pair, keys.bus)) for pair in pairs)
        with reading(stays, goes):
            for n, name in enumerate("xy"):
                await workers.start(n, name)
                workers.publish(name, count=2)
            await workers.exact(stays, goes)
            stats = fleet.daemon.output_stats[0]
            assert stats.routers == 2
            keys.allow(pairs[0])
            await fleet.reload()
            await eventually(lambda: stats.routers == 1, "one less")
            workers.all_publish()
            await workers.exact(stays)
            assert stays.states == goes.states
            assert goes.held != workers.truth
            Pair(tmp_path, "kvbus")  # replaces kvbus's own key
            left = stats.router_disconnects["closed"]
            await fleet.reload()
            await eventually(lambda: stats.router_disconnects["closed"] == left + 1, "the end of all connections")
            assert stats.routers == 0
            newcomer = TopicRouter(at(fleet.out), context=client_context(pairs[0], Pair(tmp_path, "other")))
            with reading(newcomer):
                await eventually(lambda: sum(stats.refused.values()), "a router with another key of kvbus")
                assert newcomer.held == {}
