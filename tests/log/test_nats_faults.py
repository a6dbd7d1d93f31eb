"""Tests for faults that only NATS has: a missing stream, a stream that begins again, and large appends.

``test_faults.py`` tests the faults that NATS and Redis have in common.
"""

import asyncio
import contextlib
import dataclasses

import pytest
from nats.aio.client import Client

from kvbus.parts.log import nats_client as module
from kvbus.parts.log import nats_reader
from kvbus.parts.log.contract import START, Entry, Pointer, UnavailableError
from kvbus.parts.log.nats_client import Link
from kvbus.parts.log.nats_reader import SHIFT
from tests.doubles.bus import eventually
from tests.log.doors import NatsDoor
from tests.log.fleet import KEY, fleet, taken
from tests.log.kinds import Nats
from tests.log.server import sockets


@pytest.fixture
def kind(nats):
    return Nats(nats)


async def test_a_reader_continues_in_a_nats_stream_that_was_made_again(kind):
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


async def test_missing_nats_streams_are_counted_as_stream_missing(kind):
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


async def test_an_append_larger_than_a_nats_message_is_split(kind):
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


async def interleaved(kind):
    """Append to two streams alternately, and return the positions of the first stream's records."""
    writers = [await kind.open().claim(key) for key in (KEY, f"{KEY}-other")]
    found = []
    for n in range(20):
        for writer in writers:
            position = await writer.append([b"%d" % n])
            found += [position] * (writer is writers[0])
    for writer in writers:
        await writer.close()
    return found


def moved(message, by):
    """Return a NATS message whose stream sequence and consumer sequence are higher by ``by``."""
    words = message.reply.split(".")
    for at in (5, 6):
        words[at] = str(int(words[at]) + by)
    return dataclasses.replace(message, reply=".".join(words), _metadata=None)


class DivergedInbox:
    """Messages as a NATS server sends them if its copy of a stream lacks one message or has it twice.

    Later messages therefore have other sequence numbers than at the other servers.
    """

    def __init__(self, inbox, at, by):
        self._inbox, self._at, self._by, self._again = inbox, at, by, []

    def __getattr__(self, name):
        return getattr(self._inbox, name)

    async def next_msg(self, seconds):
        if self._again:
            return self._again.pop()
        message = await self._inbox.next_msg(seconds)
        at = message.metadata.sequence.stream
        if at == self._at and self._by < 0:
            message = await self._inbox.next_msg(seconds)
        elif at == self._at:
            self._again.append(moved(message, 1))
            return message
        return message if at < self._at else moved(message, self._by)


def diverge(monkeypatch, at, by, consumers):
    """Let the first ``consumers`` consumers read from a server with a diverged copy of the stream.

    Return a list that gets one entry for each consumer that is created.
    """
    made = []

    async def subscribe(self, *args, subscribe=Client.subscribe, **keys):
        inbox = await subscribe(self, *args, **keys)
        if "cb" in keys:  # the client's own subscription for answers
            return inbox
        made.append(inbox)
        return DivergedInbox(inbox, at, by) if len(made) <= consumers else inbox

    monkeypatch.setattr(Client, "subscribe", subscribe)
    return made


@pytest.mark.parametrize("by", [-1, 1], ids=["one is not there", "one is there twice"])
@pytest.mark.parametrize("consumers", [1, 2])
async def test_a_reader_ignores_a_nats_server_whose_messages_differ_from_its_peers(kind, monkeypatch, by, consumers):
    """A NATS server that was cut off may have other messages than its peers, without a gap in its sequence numbers.

    The server does not report this, so the reader must notice it.
    """
    monkeypatch.setattr(nats_reader, "ANOTHER", 0.0)
    await kind.make()
    written = await interleaved(kind)
    reader = await kind.open().read({KEY: written[0], f"{KEY}-other": written[0]})
    made = diverge(monkeypatch, written[7] >> SHIFT, by, consumers)
    found: dict[int, bytes] = {}
    while len(found) < 40:
        for entry in await taken(reader, 1):
            assert found.setdefault(entry.position, entry.data) == entry.data, "each position has one content"
    assert [found[position] for position in written] == [b"%d" % n for n in range(20)]
    assert len(made) == consumers + 1
    await reader.close()


async def test_a_reader_skips_a_message_that_every_nats_server_lacks(kind, monkeypatch):
    monkeypatch.setattr(nats_reader, "ANOTHER", 0.0)
    monkeypatch.setattr(nats_reader, "MOST_TIMES", 3)
    await kind.make()
    written = await interleaved(kind)
    reader = await kind.open().read({KEY: written[0]})
    made = diverge(monkeypatch, written[7] >> SHIFT, -1, 1000)
    found = set()
    while b"19" not in found:
        found |= {entry.data for entry in await taken(reader, 1)}
    assert found == {b"%d" % n for n in range(20)} - {b"7"}
    assert len(made) == 4
    await reader.close()


async def test_deleted_nats_messages_are_not_counted_as_missing(kind, monkeypatch):
    await kind.make()
    written = await interleaved(kind)
    gone = written[3:15:2]
    for position in gone:
        await kind.api(f"STREAM.MSG.DELETE.{kind.stream}", seq=position >> SHIFT)
    asked = []

    async def api(self, subject, *args, api=Link.api, **request):
        asked.append(request.get("deleted_details"))
        return await api(self, subject, *args, **request)

    monkeypatch.setattr(Link, "api", api)
    reader = await kind.open().read({KEY: written[0]})
    found = await taken(reader, 20 - len(gone))
    assert [entry.position for entry in found] == [position for position in written if position not in gone]
    assert asked.count(True) == 1, "what was deleted stays so"
    await reader.close()


async def test_an_unreadable_pointer_in_nats_is_ignored(kind):
    await kind.make()
    link = Link(kind.place(kind.server.address))
    await link.ask(f"{kind.stream}-pointers.{KEY}", b"\xff", 5.0)
    await link.close()
    assert await kind.open().pointers() == await kind.open().pointers(KEY) == {}
    writer = await kind.open().claim(KEY)
    assert await kind.open().pointers() == {KEY: Pointer(writer.epoch)}
    await writer.close()


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_nats_connection_to_a_stopped_server_closes_when_the_server_continues(kind, cancelled, monkeypatch):
    monkeypatch.setattr(module, "STOP", 0.2)
    before = sockets()
    link = Link(kind.place(kind.server.address))
    client = await link.client()
    with kind.server.standing_still():
        waiting: set[asyncio.Future[None]] = set()
        while not waiting:  # until the buffers of both sockets are full
            publishing = asyncio.ensure_future(client.publish("elsewhere", bytes(1_000_000)))
            _, waiting = await asyncio.wait([publishing], timeout=1)
        closing = asyncio.ensure_future(link.close())
        await asyncio.sleep(0)
        if cancelled:
            closing.cancel()
        async with asyncio.timeout(60):
            await asyncio.wait([closing])
        assert sockets() > before, "the client still has something to send"
    await eventually(lambda: sockets() <= before, "its socket to be closed")


async def test_closing_a_tls_connection_to_nats_closes_its_socket(nats, tmp_path):
    """After a connection with TLS is closed, the socket below TLS is closed too.

    TLS first sends its own close, and waits for the server's.
    """
    async with contextlib.aclosing(NatsDoor(nats, tmp_path)) as door:
        before = sockets()
        link = Link(door.place())
        await link.client()
        assert sockets() > before
        await link.close()
        await eventually(lambda: sockets() <= before, "its socket to be closed")


async def test_a_nats_link_closed_while_it_connects_leaves_no_socket(nats, monkeypatch):
    loop, asked, go_on = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    look_up = loop.getaddrinfo

    async def slow(*arguments, **keys):
        asked.set()
        await go_on.wait()
        return await look_up(*arguments, **keys)

    monkeypatch.setattr(loop, "getaddrinfo", slow)
    link = Link(Nats(nats).place(nats.address.replace("127.0.0.1", "localhost")))
    connecting = asyncio.create_task(link.client())
    await asked.wait()
    before = sockets()
    await link.close()
    go_on.set()
    with pytest.raises(UnavailableError):
        await connecting
    await eventually(lambda: sockets() <= before, "its socket to be closed")
