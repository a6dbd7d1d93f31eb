"""Three servers of Kafka or NATS, of which one, two or none are there: what is written is read, or counted."""

import asyncio
import contextlib
import time

import pytest

from kvbus.core.numbered import EPOCH_BITS
from kvbus.log.contract import UnavailableError
from kvbus.log.kafka_client import partition_of
from tests.log.fleet import KEY, fleet
from tests.log.kinds import Kafka, Nats, insist
from tests.log.test_aggregator import Aggregator, Moving
from tests.transport.loops import eventually


class ThreeBrokers(Kafka):
    def __init__(self, cluster):
        super().__init__(cluster, replicas=3)
        self.cluster = cluster

    async def leads(self):
        """Which member leads the stream's partition."""
        async with self.admin() as admin:
            (topic,) = await admin.describe_topics([self.topic])
            (part,) = (each for each in topic["partitions"] if each["partition"] == partition_of(KEY, 2))
            return None if part["leader"] < 0 or part["error_code"] else part["leader"] - 1

    async def whole(self):
        async with self.admin() as admin:
            topics = await admin.describe_topics([self.topic, self.topic + "-pointers", "__transaction_state"])
            return all(len(part["isr"]) == 3 for topic in topics for part in topic["partitions"])


class ThreeNats(Nats):
    def __init__(self, cluster):
        super().__init__(cluster, replicas=3)
        self.cluster = cluster

    async def leads(self):
        info = await self.api(f"STREAM.INFO.{self.stream}")
        name = info["cluster"].get("leader")
        return int(name[1:]) - 1 if name else None

    async def whole(self):
        for name in (self.stream, self.stream + "-pointers"):
            info = await self.api(f"STREAM.INFO.{name}")
            replicas = info["cluster"]["replicas"]
            if len(replicas) != 2 or not all(each["current"] and not each.get("offline") for each in replicas):
                return False
        return True


@pytest.fixture(params=["kafka", "nats"])
async def kind(request):
    cluster = request.getfixturevalue(f"{request.param}_cluster")
    made = {"kafka": ThreeBrokers, "nats": ThreeNats}[request.param](cluster)
    yield made
    await asyncio.to_thread(cluster.restore)


async def until(what, text, seconds=120.0):
    """Once a question has an answer; servers that are on their way say all kinds of things."""
    end, said = time.monotonic() + seconds, None
    while time.monotonic() < end:
        try:
            said = await what()
            if said is not None and said is not False:
                return said
        except Exception as error:  # noqa: BLE001
            said = error
        await asyncio.sleep(0.1)
    raise AssertionError(f"{text}: {said!r}")


@contextlib.asynccontextmanager
async def load(leaf):
    over = asyncio.Event()

    async def run():
        while not over.is_set():
            leaf.store(5, gone=4)
            leaf.published += 1
            await asyncio.sleep(0.01)

    leaf.published = getattr(leaf, "published", 0)
    task = asyncio.ensure_future(run())
    try:
        yield
    finally:
        over.set()
        await task


def say(*args):
    print(f"{time.monotonic() - T0:8.2f}", *args, flush=True)


T0 = time.monotonic()


async def test_whoever_leads_is_killed(kind, tmp_path, monkeypatch):
    async with fleet(kind) as log:
        await until(kind.whole, "whole")
        say("whole")
        leaf, reading = await log.followed_leaf(queue_batches=1000)
        say("followed")
        aggregator = Aggregator(kind, tmp_path / "agg", monkeypatch)
        await aggregator.daemon.start()
        router = Moving(aggregator.endpoint)
        epochs = []
        try:
            async with load(leaf):
                for _ in range(3):
                    at = await until(kind.leads, "leader")
                    member = kind.cluster.members[at]
                    before = leaf.stats.batches
                    await eventually(lambda: leaf.stats.batches > before + 50, "load")
                    member.kill()
                    killed, before = time.monotonic(), leaf.stats.batches
                    say("killed", at)
                    await asyncio.sleep(0.05)
                    before = leaf.stats.batches
                    await eventually(lambda: leaf.stats.batches > before + 20, "appends")
                    say("appends after", time.monotonic() - killed, dict(leaf.stats.refused), dict(leaf.stats.dropped_batches), dict(leaf.stats.states_sent))
                    n = len(reading.view.blocks)
                    f = reading.follower
                    s = (f.epoch, f.seq)
                    await reading.until(lambda: (f.epoch, f.seq) > (s[0], s[1] + 20))
                    say("read after", time.monotonic() - killed, f.epoch, dict(f.counts))
                    epochs.append(f.epoch)
                    await asyncio.to_thread(kind.cluster.restore)
                    await until(kind.whole, "whole again")
                    say("whole again")
            await reading.holds(leaf)
            say("reading holds", dict(reading.follower.counts))
            topic = b"kv@pod.a.engine.3@m"
            await eventually(lambda: router.blocks(topic) == leaf.blocks, "router")
            say("router exact", aggregator.lag, router.violations, {t: n >> EPOCH_BITS for t, n in router.next.items()})
            say(leaf.published, leaf.stats.batches, dict(leaf.stats.dropped_batches), dict(leaf.stats.refused), dict(leaf.stats.states_sent))
        finally:
            router.close()
            await aggregator.daemon.close(0)
