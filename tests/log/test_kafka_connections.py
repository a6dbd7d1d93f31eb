"""No connection to a broker is left open, however what it was made for has ended."""

import asyncio

import pytest
from aiokafka.conn import AIOKafkaConnection
from aiokafka.protocol.metadata import MetadataRequest

from kvbus import tasks
from kvbus.log import kafka_client as module
from kvbus.log.contract import START
from tests.log.fleet import KEY
from tests.log.kinds import Kafka, insist


class Held:
    """Connections, each of which holds its question about topics back for a moment."""

    def __init__(self, monkeypatch):
        self.made: set[AIOKafkaConnection] = set()
        self.asks = asyncio.Event()
        send = AIOKafkaConnection.send

        async def held(connection, request, expect_response=True):
            self.made.add(connection)
            if isinstance(request, MetadataRequest):
                self.asks.set()
                await asyncio.sleep(0.1)
            return await send(connection, request, expect_response)

        monkeypatch.setattr(AIOKafkaConnection, "send", held)

    @property
    def open(self):
        return [connection for connection in self.made if connection.connected()]


@pytest.fixture
async def kind(kafka):
    made = Kafka(kafka)
    await made.make()
    await insist(made.open().pointers)
    return made


@pytest.mark.parametrize("what", ["claim", "pointers", "read"])
async def test_who_is_cancelled_while_a_client_begins_leaves_none(kind, what, monkeypatch):
    held, log = Held(monkeypatch), kind.open()
    attempt = {"claim": lambda: log.claim(KEY), "pointers": log.pointers, "read": lambda: log.read({KEY: START})}[what]
    task = asyncio.ensure_future(attempt())
    await held.asks.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert held.made
    assert held.open == []


async def test_a_client_that_does_not_end_in_time_leaves_none(kind, monkeypatch):
    held = Held(monkeypatch)
    reader = await kind.open().read({KEY: START})
    await reader.take(0.1)
    assert held.open
    monkeypatch.setattr(module, "STOP", 0.0)
    await reader.close()
    assert held.open == []


async def test_a_client_whose_end_nobody_waits_for_leaves_none(kind, monkeypatch):
    held = Held(monkeypatch)
    ending: asyncio.Queue[asyncio.Task[None]] = asyncio.Queue()

    async def watched(work, seconds):
        task = asyncio.ensure_future(work)
        ending.put_nowait(task)
        return await tasks.finish(task, seconds)

    reader = await kind.open().read({KEY: START})
    await reader.take(0.1)
    assert held.open
    monkeypatch.setattr(module, "finish", watched)
    closing = asyncio.ensure_future(reader.close())
    ended = await ending.get()
    closing.cancel()
    await asyncio.wait([closing])
    assert held.open == []
    await asyncio.wait([ended])
