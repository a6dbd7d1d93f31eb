"""An aggregator that is killed while engines write: its routers go to the other one, and it comes back from the log."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from kvbus.core.numbered import EPOCH_BITS
from tests.doubles.bus import eventually
from tests.log.fleet import fleet
from tests.log.kinds import Kafka, Nats, Redis
from tests.log.processes import Aggregator, Noting, above

STREAMS = 4
KILLS = 3


@pytest.fixture(params=["kafka", "nats", "redis"])
def kind(request):
    """Every log that another process can read."""
    return {"kafka": Kafka, "nats": Nats, "redis": Redis}[request.param](request.getfixturevalue(request.param))


async def test_routers_are_exact_afterwards_and_each_number_has_one_content(kind, tmp_path):
    async with fleet(kind) as log:
        leaves = {
            f"kv@pod-{n}.engine.{n}@m".encode(): log.leaf(topic=f"m␟pod-{n}/engine␟{n}".encode())
            for n in range(STREAMS)
        }
        for leaf in leaves.values():
            leaf.store(200)
            await leaf.written()
        over = asyncio.Event()

        async def load():
            while not over.is_set():
                for leaf in leaves.values():
                    leaf.store(5, gone=4)
                await asyncio.sleep(0.01)

        def exact(router):
            return all(router.blocks(topic) == leaf.blocks for topic, leaf in leaves.items())

        said: dict[tuple[bytes, int], set[str]] = {}
        ones = [Aggregator(kind, tmp_path, name) for name in ("one", "other")]
        with contextlib.ExitStack() as stack:
            for each in ones:
                each.start()
                stack.callback(each.close)
            # one goes to whoever is left, one waits for the one that comes back
            router, waiting = (Noting(each.endpoint, said) for each in ones)
            stack.callback(router.close)
            stack.callback(waiting.close)
            await eventually(lambda: exact(router) and exact(waiting), "the engines' blocks")
            epochs = {topic: seq >> EPOCH_BITS for topic, seq in router.next.items()}
            loading = asyncio.ensure_future(load())
            for kill in range(KILLS):
                gone, left = ones[kill % 2], ones[1 - kill % 2]
                router.go_to(gone)
                newest = dict(router.next)
                await eventually(lambda newest=newest: above(router, newest), "live batches of each stream")
                gone.kill()
                router.go_to(left)
                newest = dict(router.next)
                gone.start()
                await eventually(lambda newest=newest: above(router, newest), "live batches of the other one")
                fresh = Noting(gone.endpoint, said)
                stack.callback(fresh.close)
                await eventually(lambda fresh=fresh: len(fresh.held) == STREAMS, "the one that came back")
            over.set()
            await loading
            for one in (router, waiting, fresh):
                await eventually(lambda one=one: exact(one), "the engines' blocks")
                assert one.violations == []
                assert {topic: seq >> EPOCH_BITS for topic, seq in one.next.items()} == epochs, "nobody began another"
        assert not any(sum(leaf.stats.dropped_batches.values()) for leaf in leaves.values())
