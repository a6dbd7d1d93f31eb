"""Tests for faults that only Redis has: a replica that lagged, retention, and many clients. See ``test_faults.py``."""

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis as Client
from redis.asyncio.connection import Connection

from kvbus.parts.log.contract import START, Entry, Pointer
from kvbus.parts.log.record import Stream
from kvbus.parts.log.redis import POINTER_SECONDS
from kvbus.parts.log.redis_client import names
from tests.doubles.bus import eventually
from tests.log.fleet import KEY, fleet, taken
from tests.log.kinds import Redis

HOUR = 3600 * 10**6
"""An hour in microseconds, which are the unit of a Redis log's positions."""


async def execute(kind, *command):
    async with kind.server.client() as client:
        return await client.execute_command(*command)


async def test_the_next_append_detects_that_redis_lost_data(redis):
    kind = Redis(redis)
    async with fleet(kind) as log:
        leaf = log.leaf()
        leaf.store(10)
        await leaf.written()
        async with Client(port=redis.port, protocol=2) as client:
            kept: dict[str, Any] = {name: await client.dump(name) for name in names(kind.place(""), KEY)}
            leaf.store(5)
            await leaf.written()
            reading = await log.reading()
            await reading.holds(leaf)
            before = reading.follower.epoch
            for name, data in kept.items():  # restore old data, as a replica that lagged has it
                await client.restore(name, 0, data, replace=True)
        leaf.store(5, gone=3)
        await eventually(lambda: leaf.stats.refused["data_lost"], "the writer to notice")
        await reading.holds(leaf)
        assert reading.follower.epoch > before
        assert reading.follower.counts["lost"] == 0


async def test_redis_deletes_old_records_before_the_newest_state_and_no_later_record(redis):
    kind = Redis(redis)
    records, _ = names(kind.place(""), KEY)
    writer = await kind.open().claim(KEY)
    for n in range(3):
        await writer.append([b"%d" % n])
    state = await writer.append([b"state"])
    await writer.append([b"behind"])

    async def kept():
        reader = await kind.open().read({KEY: START})
        found = [entry.data for entry in await reader.take(20.0)]
        await reader.close()
        return found

    await writer.point(Pointer(writer.epoch, 3, state))
    assert await kept() == [b"0", b"1", b"2", b"state", b"behind"]
    async with Client(port=redis.port, protocol=2) as client:  # make the records look an hour old
        young: Any = await client.xrange(records)
        await client.delete(records)
        for at, fields in young:
            await client.xadd(records, fields, id=f"{int(at.partition(b'-')[0]) - HOUR}-0")
    await writer.point(Pointer(writer.epoch, 3, state - HOUR))
    await writer.append([b"live"])
    assert await kept() == [b"state", b"behind", b"live"]
    await writer.close()


async def test_the_redis_keys_of_a_stream_without_a_writer_expire(redis):
    kind = Redis(redis)
    writer = await kind.open().claim(KEY)
    await writer.append([b"a"])
    await writer.close()
    records, pointer = names(kind.place(""), KEY)
    assert 290 < await execute(kind, "TTL", records) <= 300
    assert POINTER_SECONDS - 10 < await execute(kind, "TTL", pointer) <= POINTER_SECONDS
    await execute(kind, "DEL", records)  # as after the end of the TTL
    again = await kind.open().claim(KEY)
    assert again.epoch > writer.epoch
    position = await again.append([b"b"])
    reader = await kind.open().read({KEY: START})
    assert [(each.position, each.data) for each in await taken(reader, 1)] == [(position, b"b")]
    await reader.close()
    await again.close()


async def test_forty_long_streams_are_read_in_bounded_slices_and_in_order(redis):
    kind = Redis(redis)
    keys = [Stream("eu", "m", "w", rank).key for rank in range(40)]
    for key in keys:
        writer = await kind.open().claim(key)
        await writer.append([b"%d" % n for n in range(150)])
        await writer.close()
    reader = await kind.open().read(dict.fromkeys(keys, START))
    largest = 0
    entries: list[Entry] = []
    async with asyncio.timeout(50):
        while len(entries) < 150 * len(keys):
            found = await reader.take(1.0)
            largest = max(largest, len(found))
            entries.extend(found)
    await reader.close()
    assert largest <= 16 * 64
    for key in keys:
        mine = [entry for entry in entries if entry.key == key]
        assert [entry.data for entry in mine] == [b"%d" % n for n in range(150)]


async def test_an_unreadable_pointer_in_redis_is_ignored(redis):
    kind = Redis(redis)
    await execute(kind, "HSET", names(kind.place(""), KEY)[1], "epoch", "x", "seq", "1", "position", "1")
    assert await kind.open().pointers() == await kind.open().pointers(KEY) == {}


async def test_cancelling_the_close_of_a_redis_client_leaves_no_connection(redis, monkeypatch):
    closing, disconnect = asyncio.Event(), Connection.disconnect
    closed: set[Connection] = set()

    async def held(connection, *args, **keys):
        closed.add(connection)
        closing.set()
        await asyncio.sleep(0.05)
        await disconnect(connection, *args, **keys)

    monkeypatch.setattr(Connection, "disconnect", held)
    task = asyncio.ensure_future(Redis(redis).open().pointers())
    await closing.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await eventually(lambda: not any(connection.is_connected for connection in closed), "the end of it")
