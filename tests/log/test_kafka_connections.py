"""No connection to a broker is left open, however what it was made for has ended."""

import asyncio

import pytest
from aiokafka.conn import AIOKafkaConnection
from aiokafka.protocol.metadata import MetadataRequest

from kvbus.parts.log import kafka as log_module
from kvbus.parts.log import kafka_client as module
from kvbus.parts.log.contract import START
from tests.log.fleet import KEY
from tests.log.kinds import Kafka, insist
from tests.transport.loops import eventually


class Held:
    """Connections, each of which holds one kind of question back for a moment: about topics, or another one."""

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


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_client_that_does_not_end_in_time_ends_by_itself(kind, cancelled, monkeypatch):
    held = Held(monkeypatch)
    reader = await kind.open().read({KEY: START})
    await reader.take(0.1)
    assert held.open
    monkeypatch.setattr(module, "STOP", 0.0)
    closing = asyncio.ensure_future(reader.close())
    await asyncio.sleep(0)
    if cancelled:
        closing.cancel()
    await asyncio.wait([closing])
    await eventually(lambda: not held.open, "its connections to be closed")


async def test_a_producer_that_is_given_up_ends_when_the_next_one_of_its_stream_fences_it(kind, monkeypatch):
    """Its own end waits until the broker has answered for what it sends."""
    before = asyncio.all_tasks()
    log = kind.open()
    writer = await log.claim(KEY)
    for place in (log_module, module):
        monkeypatch.setattr(place, "STOP", 0.02)
    with kind.broker.standing_still():
        appending = asyncio.ensure_future(writer.append([b"record"]))
        await asyncio.sleep(0.1)
        await writer.close()
        appending.cancel()
        await asyncio.wait([appending])
        assert asyncio.all_tasks() > before, "it still sends"
    monkeypatch.undo()
    following = await insist(lambda: log.claim(KEY))
    await following.append([b"another"])
    await following.close()
    await eventually(lambda: asyncio.all_tasks() <= before, "every task to end")
