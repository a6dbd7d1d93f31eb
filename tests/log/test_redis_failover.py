"""Tests for a Redis whose primary is killed under load.

Its replica takes over with all records, or without the newest records.
"""

import asyncio

import pytest

from kvbus.parts.log.contract import UnavailableError
from kvbus.parts.log.redis import RedisLog
from tests.doubles.bus import eventually
from tests.doubles.link import Link
from tests.log.clusters import Redises
from tests.log.fleet import KEY, fleet
from tests.log.kinds import Redis, insist
from tests.log.load import PATIENCE, BusState, asked
from tests.log.redis_server import MISSING, command
from tests.ports import free_port


async def execute(server, *words):
    async with server.client() as client:
        return await client.execute_command(*words)


async def level(primary):
    """Return whether the primary's replica has all of its data."""
    _, offset, ((_, _, theirs),) = await execute(primary, "ROLE")
    return int(theirs) == offset


@pytest.fixture
async def redises(tmp_path):
    """A primary with a replica that follows it, and Sentinels that know both."""
    if command() is None:
        pytest.skip(MISSING)
    made = Redises(tmp_path)
    try:
        await asyncio.to_thread(made.start)
        one, _ = made.servers
        await asked(lambda: execute(one, "WAIT", 1, 0), "a replica")
        yield made
    finally:
        made.kill()


async def test_a_redis_claim_without_a_replica_fails_and_later_epochs_are_higher(redises):
    one, other = redises.servers
    kind = Redis(one)
    first = await insist(lambda: kind.open().claim(KEY))
    await first.append([b"first"])
    with other.standing_still():
        with pytest.raises(UnavailableError, match="no replica") as error:
            await kind.open().claim(KEY)
        assert error.value.reason == "too_few_replicas"
    second = await insist(lambda: kind.open().claim(KEY))
    one.kill()
    await execute(other, "REPLICAOF", "NO", "ONE")
    third = await Moved(other, other.address, kind.prefix).open().claim(KEY)
    assert first.epoch < second.epoch < third.epoch, "who takes over knows of it"
    for writer in (first, second, third):
        await writer.close()


class Moved(Redis):
    """A Redis log whose address a test can change to another server's."""

    def __init__(self, server, address, prefix=None):
        super().__init__(server)
        self._at = address
        self.prefix = prefix or self.prefix

    @property
    def _address(self):
        return self._at


@pytest.mark.parametrize("behind", [False, True], ids=["with everything", "without the newest"])
async def test_kvbus_continues_when_the_redis_address_moves_to_a_replica(redises, behind, tmp_path, monkeypatch):
    one, other = redises.servers
    for sentinel in redises.members:
        sentinel.kill()  # this test decides which server is the primary
    async with Link("redis", free_port(), one.port) as between:
        kind = Moved(one, between.address)
        async with fleet(kind) as log, BusState(kind, log, tmp_path / "aggregator", monkeypatch) as seen:
            await seen.exact()
            first = seen.epoch
            if behind:
                await execute(other, "REPLICAOF", "NO", "ONE")
                async with seen.load():
                    await seen.goes_on()
                await seen.leaf.written()
            else:
                await seen.leaf.written()
                await execute(one, "CLIENT", "PAUSE", 60_000, "WRITE")
                await asked(lambda: level(one), "a replica that has everything")
            one.kill()
            if not behind:
                await execute(other, "REPLICAOF", "NO", "ONE")
            between.move(other.port)
            async with seen.load():
                await seen.goes_on()
            await seen.exact()
            assert (seen.epoch > first) == behind
            assert dict(seen.leaf.stats.refused) == ({"data_lost": 1} if behind else {})


async def test_kvbus_finds_the_redis_primary_through_sentinels(redises, tmp_path, monkeypatch):
    one, other = redises.servers
    redises.members[0].kill()  # the first Sentinel of the configuration
    kind = Redis(one, redises)
    async with fleet(kind) as log, BusState(kind, log, tmp_path / "aggregator", monkeypatch) as seen:
        async with seen.load():
            await seen.goes_on()
            first = seen.epoch
            one.kill()
            await eventually(lambda: seen.leaf.stats.refused["unreachable"], "the end of the turn", PATIENCE)
            await seen.goes_on()
            assert seen.epoch > first
            await asyncio.to_thread(one.start)  # until the Sentinels see it, it acts as the primary

            async def follows():
                return (await execute(one, "ROLE"))[0] == "slave"

            await asked(follows, "the former primary to follow")
            await execute(other, "CONFIG", "SET", "min-replicas-to-write", 2)
            await eventually(lambda: seen.leaf.stats.refused["too_few_replicas"], "the primary to refuse", PATIENCE)
            await execute(other, "CONFIG", "SET", "min-replicas-to-write", 0)
        await seen.exact()
    unknown = RedisLog(kind.place(redises.address, sentinel="nobody"))
    with pytest.raises(UnavailableError, match="knows a primary nobody") as error:
        await unknown.pointers()
    assert error.value.reason == "primary_unknown"
