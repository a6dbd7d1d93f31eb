"""What NATS alone can do to streams, see ``test_faults.py``: streams that are missing or begin again, large appends."""

import asyncio
import contextlib
import gc
import warnings

import pytest

from kvbus.parts.log import nats_client as module
from kvbus.parts.log.contract import START, Entry, UnavailableError
from kvbus.parts.log.nats_client import Link
from tests.log.fleet import KEY, fleet, taken
from tests.log.kinds import Nats
from tests.transport.loops import eventually


@pytest.fixture
def kind(nats):
    return Nats(nats)


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


@pytest.mark.parametrize("kept", ["out of time", "cancelled"])
def test_a_connection_is_closed_though_its_client_does_not_end_in_time(kind, kept, monkeypatch):
    """As where a server that stands still takes nothing more, and the client waits until it does."""

    async def ends():
        link = Link(kind.place(kind.server.address))
        client = await link.client()
        vars(client)["_flush_pending"] = asyncio.Event().wait  # as if the server took nothing
        closing = asyncio.ensure_future(link.close())
        await asyncio.sleep(0)
        if kept == "cancelled":
            closing.cancel()
        await asyncio.wait([closing])

    monkeypatch.setattr(module, "STOP", 0.1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        asyncio.run(ends())
        gc.collect()
    assert [str(each.message) for each in said if each.category is ResourceWarning] == []
