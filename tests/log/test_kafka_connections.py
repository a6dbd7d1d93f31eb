"""Tests that no connection to a Kafka broker stays open after the task that made it.

The task may succeed, fail or be cancelled.
"""

import asyncio

import pytest
from aiokafka.conn import AIOKafkaConnection
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.protocol.transaction import AddPartitionsToTxnRequest

from kvbus.common import tasks
from kvbus.parts.log import kafka as log_module
from kvbus.parts.log import kafka_client as module
from kvbus.parts.log.contract import START
from tests.log.fleet import KEY
from tests.log.kinds import Kafka, insist


class RecordedConnections:
    """A patch that records the connections to the broker, and delays each request of one type by some seconds.

    By default these are requests for information about topics.
    """

    def __init__(self, monkeypatch, question=MetadataRequest, seconds=0.1):
        self.made: set[AIOKafkaConnection] = set()
        self.asks = asyncio.Event()
        send = AIOKafkaConnection.send

        async def held(connection, request, expect_response=True):
            self.made.add(connection)
            if isinstance(request, question):
                self.asks.set()
                await asyncio.sleep(seconds)
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
async def test_cancelling_the_start_of_a_kafka_client_leaves_no_connection(kind, what, monkeypatch):
    held, log = RecordedConnections(monkeypatch), kind.open()
    attempt = {"claim": lambda: log.claim(KEY), "pointers": log.pointers, "read": lambda: log.read({KEY: START})}[what]
    task = asyncio.ensure_future(attempt())
    await held.asks.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert held.made
    assert held.open == []


async def test_a_kafka_client_that_does_not_stop_in_time_leaves_no_connection(kind, monkeypatch):
    held = RecordedConnections(monkeypatch)
    reader = await kind.open().read({KEY: START})
    await reader.take(0.1)
    assert held.open
    monkeypatch.setattr(module, "STOP", 0.0)
    await reader.close()
    assert held.open == []


async def test_cancelling_the_close_of_a_kafka_client_leaves_no_connection(kind, monkeypatch):
    held = RecordedConnections(monkeypatch)
    ending: asyncio.Queue[asyncio.Task[None]] = asyncio.Queue()

    async def watched(work, seconds):
        task = asyncio.ensure_future(work)
        ending.put_nowait(task)
        await tasks.close_within(task, seconds)

    reader = await kind.open().read({KEY: START})
    await reader.take(0.1)
    assert held.open
    monkeypatch.setattr(module, "close_within", watched)
    closing = asyncio.ensure_future(reader.close())
    ended = await ending.get()
    closing.cancel()
    await asyncio.wait([closing])
    assert held.open == []
    await asyncio.wait([ended])


async def test_a_given_up_kafka_producer_leaves_no_task_that_reconnects(kind, monkeypatch):
    before = asyncio.all_tasks()
    writer = await kind.open().claim(KEY)
    held = RecordedConnections(monkeypatch, AddPartitionsToTxnRequest, seconds=1.0)
    appending = asyncio.ensure_future(writer.append([b"record"]))
    await held.asks.wait()
    under_way = asyncio.all_tasks() - before - {appending}
    for place in (log_module, module):
        monkeypatch.setattr(place, "STOP", 0.02)
    await writer.close()
    appending.cancel()
    _, left = await asyncio.wait({appending, *under_way}, timeout=60)
    assert left == set()
    assert held.open == []
