"""What NATS can do to streams: full, slow, without its data; each is counted and made good."""

import asyncio
import contextlib
import signal

import pytest

from kvbus.log.contract import START, Entry, UnavailableError
from kvbus.log.nats import NatsLog
from kvbus.log.nats_client import Link
from tests.log.cutting import Cutting
from tests.log.fleet import KEY, fleet
from tests.log.kinds import Nats, insist
from tests.transport.loops import eventually


@pytest.fixture
def kind(nats):
    return Nats(nats)


async def taken(reader, count):
    found: list[Entry] = []
    async with asyncio.timeout(50):
        while len(found) < count:
            found.extend(await reader.take(0.1))
    return found


async def bounded(kind, size):
    """The stream takes so many bytes, and nothing new above that."""
    name = kind.stream
    config = {"name": name, "subjects": [f"{name}.>"], "max_bytes": size, "discard": "new"}
    await kind.api(f"STREAM.UPDATE.{name}", **config)


async def test_a_full_stream_is_named_counted_and_has_everything_once_there_is_room(kind):
    async with fleet(kind) as log:
        leaf = log.leaf(queue_batches=5)
        leaf.store(10)
        await leaf.written()
        reading = await log.reading()
        await reading.holds(leaf)
        await bounded(kind, 2000)

        def full():
            leaf.store(3, gone=2)
            return leaf.stats.refused["stream_full"] and leaf.stats.dropped_batches["log_unavailable"]

        await eventually(full, "the server to refuse")
        assert leaf.stats.queue_depth <= 5
        await bounded(kind, -1)
        await eventually(lambda: leaf.stats.states_sent["lost"], "a state behind what is missing")
        await reading.holds(leaf)
        assert reading.follower.counts["lost"] == 0


async def test_a_server_that_stands_still_holds_nobody_up(kind):
    async with fleet(kind) as log:
        leaf = log.leaf(queue_batches=5)
        leaf.store(10)
        await leaf.written()
        reading = await log.reading()
        kind.server.signal(signal.SIGSTOP)
        try:
            for _ in range(20):
                leaf.store(3, gone=2)
                await asyncio.sleep(0)
            assert leaf.stats.queue_depth <= 5
            assert leaf.stats.dropped_batches["queue_full"] >= 15
        finally:
            kind.server.signal(signal.SIGCONT)
        await eventually(lambda: leaf.stats.states_sent["lost"], "a state behind what is missing")
        await reading.holds(leaf)


@pytest.mark.parametrize("more", [0, 40], ids=["less than was read", "more than was read"])
async def test_a_server_that_begins_again_without_its_data_gets_the_state_in_a_later_epoch(kind, more):
    async with fleet(kind) as log:
        leaf = log.leaf(queue_batches=20)
        for _ in range(30):
            leaf.store(3)
            await leaf.written()
        reading = await log.reading()
        await reading.holds(leaf)
        kind.server.kill()
        kind.server.lose()
        await asyncio.to_thread(kind.server.start)
        await kind.make()
        leaf.store(5)
        await eventually(lambda: leaf.stats.refused["data_lost"], "the writer to notice")
        await eventually(lambda: leaf.stats.states_sent["lost"], "the state in the log before anybody reads again")
        for _ in range(more):
            leaf.store(1)
            await leaf.written()
        await reading.holds(leaf)
        assert reading.follower.epoch == 2
        assert reading.follower.counts["lost"] == 0
        await (await log.reading()).holds(leaf)


async def test_positions_in_a_stream_that_begins_again_are_as_good_as_those_before(kind):
    await kind.make()
    writer = await kind.open().claim(KEY)
    for n in range(9):
        last = await writer.append([b"%d" % n])
    reader = await kind.open().read({KEY: last})
    assert [entry.data for entry in await taken(reader, 1)] == [b"8"]
    await writer.close()
    for name in (kind.stream, f"{kind.stream}-pointers"):
        await kind.api(f"STREAM.DELETE.{name}")
    await kind.make()
    again = await kind.open().claim(KEY)
    at = await again.append([b"a"])
    async with asyncio.timeout(50):
        found: list[Entry] = []
        while not found:
            with contextlib.suppress(UnavailableError):
                found = await reader.take(0.1)
    assert [(entry.position, entry.data) for entry in found] == [(at, b"a")]
    assert at < last
    assert (await reader.ends())[KEY] == await reader.reached(KEY)
    await again.close()
    await reader.close()


async def test_streams_that_are_missing_are_named(kind):
    async with fleet(kind) as log:
        leaf = log.leaf()
        leaf.store(10)
        await leaf.written()
        for name in (kind.stream, f"{kind.stream}-pointers"):
            await kind.api(f"STREAM.DELETE.{name}")

        def missing():
            leaf.store(1)
            return leaf.stats.refused["stream_missing"]

        await eventually(missing, "the server to say so")
        await kind.make()
        await eventually(lambda: leaf.stats.states_sent["lost"], "a state behind what is missing")
        await (await log.reading()).holds(leaf)


async def test_an_append_of_which_nothing_was_heard_is_in_the_log_once(kind):
    await kind.make()
    async with Cutting(kind.server.port).running() as between:
        writer = await insist(lambda: NatsLog(kind.place(between.address)).claim(KEY))
        first = await writer.append([b"a"])
        between.cut = True
        second = await writer.append([b"b", b"c"])
        assert between.cuts == 1
        between.cut = True
        third = await writer.append([b"d"])
        await writer.close()
    reader = await kind.open().read({KEY: START})
    entries = await taken(reader, 4)
    await reader.close()
    assert [entry.data for entry in entries] == [b"a", b"b", b"c", b"d"]
    assert [entries[n].position for n in (0, 2, 3)] == [first, second, third]


async def test_an_append_that_is_larger_than_a_message_is_several(kind):
    await kind.make()
    writer = await kind.open().claim(KEY)
    records = [bytes([n]) * 300_000 for n in range(9)]
    last = await writer.append([*records, *(b"%d" % n for n in range(1500))])
    await writer.close()
    reader = await kind.open().read({KEY: START})
    entries = await taken(reader, 1509)
    await reader.close()
    assert [entry.data for entry in entries] == [*records, *(b"%d" % n for n in range(1500))]
    positions = [entry.position for entry in entries]
    assert positions == sorted(set(positions))
    assert positions[-1] == last
    middle = await kind.open().read({KEY: positions[1000]})
    assert (await taken(middle, 1))[0] == entries[1000]
    await middle.close()


async def test_what_is_no_pointer_is_none(kind):
    await kind.make()
    link = Link(kind.place(kind.server.address))
    await link.ask(f"{kind.stream}-pointers.{KEY}", b"\xff", 5.0)
    await link.close()
    assert await kind.open().pointers() == await kind.open().pointers(KEY) == {}
    writer = await kind.open().claim(KEY)
    assert writer.epoch == 1
    await writer.close()
