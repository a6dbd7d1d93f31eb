"""Tests that break the connection between a writer and its log's server at every possible point of their traffic."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar

import pytest
from aiokafka import errors
from aiokafka.conn import AIOKafkaConnection

from kvbus.parts.log.contract import START
from kvbus.parts.log.record import read
from tests.doubles.bus import eventually
from tests.doubles.link import Link
from tests.log.fleet import fleet, stream_of
from tests.log.kinds import Kafka, Nats, Redis, insist
from tests.ports import free_port

AT_ONCE = 6
"""Number of points of the traffic that are cut in parallel, each in a stream of its own."""

_cutting: ContextVar[KafkaCutting | None] = ContextVar("_cutting", default=None)
"""The object that cuts Kafka connections in this context; None: no connection is cut."""


class KafkaCutting:
    """An object that cuts a Kafka connection at one point of its traffic, as a cutting :class:`Link` does.

    It cuts in the client, because a broker sends its clients to the broker's own address, past a link.
    """

    def __init__(self) -> None:
        self.cuts = self.chunks = self.cut_at = 0

    def count_and_cut(self, connection: AIOKafkaConnection) -> None:
        """Count a request or answer, and close the connection if it is the one to cut."""
        self.chunks += 1
        if self.chunks == self.cut_at:
            self.cuts += 1
            connection.close()
            raise errors.KafkaConnectionError("cut")

    async def answered(self, connection, answer):
        """Return the answer to a request. If the connection is to be cut at this answer, raise an error instead."""
        found = await answer
        self.count_and_cut(connection)
        return found

    @staticmethod
    def install(monkeypatch) -> None:
        """Patch Kafka's client: each request passes through the KafkaCutting that is set in its context
        (`_cutting`), if any.
        """
        send = AIOKafkaConnection.send

        def cutting(connection, request, *args, **keys):
            found = _cutting.get()
            if found is None:
                return send(connection, request, *args, **keys)
            found.count_and_cut(connection)
            return found.answered(connection, send(connection, request, *args, **keys))

        monkeypatch.setattr(AIOKafkaConnection, "send", cutting)


@contextlib.contextmanager
def here(cutting: Link | KafkaCutting) -> Iterator[None]:
    """Apply the cuts of ``cutting`` to the connections that tasks make in this ``with`` block."""
    token = _cutting.set(cutting if isinstance(cutting, KafkaCutting) else None)
    try:
        yield
    finally:
        _cutting.reset(token)


@contextlib.asynccontextmanager
async def between(kind) -> AsyncIterator[tuple]:
    """Yield a link or a KafkaCutting that cuts a writer's connections, and a function that opens the log through it."""
    if isinstance(kind, Kafka):
        yield KafkaCutting(), kind.open
        return
    async with Link("log", free_port(), kind.server.port) as link:
        yield link, lambda: type(kind.open())(kind.place(link.address))


async def read_records(kind, key):
    """Return all records of a stream in the log, in their order."""
    reader = await insist(lambda: kind.open().read({key: START}))
    try:
        end, found = (await reader.ends())[key], []
        while await reader.reached(key) < end:
            found += [read(entry.data) for entry in await reader.take(0.1)]
        return found
    finally:
        await reader.close()


async def script(log, at):
    """Write a short stream to the log, and cut the connection at piece ``at`` of the data that it carries.

    Pieces are counted from 1. The stream has a state of several records, batches, and the record that ends it. Return
    whether so many pieces came that the connection was cut.
    """
    async with between(log.kind) as (cutting, place):
        cutting.cut_at = at
        topic = f"m␟pod-{at}/engine␟0".encode()
        key = stream_of("eu", topic, 0).key
        with here(cutting):
            leaf = log.leaf(place(), topic=topic)
        leaf.store(300)
        await leaf.written()
        reading = await log.reading(START, key)
        for _ in range(2):
            leaf.store(5, gone=4)
            await eventually(lambda: not leaf.driver.busy, "an append, or its end")
        await reading.holds(leaf)
        stats = leaf.stats
        assert stats.batches + sum(stats.dropped_batches.values()) == 2
        assert not stats.dropped_batches["fenced"]
        await leaf.close(linger=20.0)
        contents = defaultdict(set)
        records = await read_records(log.kind, key)
        for record in records:
            contents[record.epoch, record.seq].add(record.payload)
        assert all(len(each) == 1 for each in contents.values()), "an epoch was handed out twice"
        epochs = [record.epoch for record in records]
        assert epochs == sorted(epochs)
        assert reading.follower.counts["lost"] == 0
        return cutting.cuts > 0


async def run_cut(log, at):
    """Write a short stream to the log, and cut the writer's connection at piece ``at`` of its data (:func:`script`).

    If this fails, add ``at`` to the error as a note.
    """
    try:
        async with asyncio.timeout(150):
            return await script(log, at)
    except BaseException as error:
        error.add_note(f"cut at {at}")
        raise


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kafka", "nats", "redis"])
async def test_a_connection_cut_at_any_point_loses_no_block(name, request, monkeypatch):
    KafkaCutting.install(monkeypatch)
    kind = {"kafka": Kafka, "nats": Nats, "redis": Redis}[name](request.getfixturevalue(name))
    async with fleet(kind) as log:
        cuts = [True]
        while all(cuts):
            some = range(len(cuts), len(cuts) + AT_ONCE)
            cuts += await asyncio.gather(*(run_cut(log, at) for at in some))
        assert cuts.index(False) > 15, "so many points at least"
