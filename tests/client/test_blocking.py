"""Tests for the client library's subscriber that needs no asyncio: a plain loop reads it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvbus.client import (
    BlockingSubscriber,
    BlockView,
    Received,
    Subscriber,
    SubscriberClosedError,
    Synced,
    Timing,
    Update,
)
from kvbus.transport.engine.publisher import EnginePublisher
from tests.client.blocks import batch, removed, stored
from tests.ports import free_ports

QUIET = Timing(confirm_s=60)


@pytest.fixture
def publisher() -> Iterator[EnginePublisher]:
    opened = EnginePublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", bind=True)
    opened.start()
    yield opened
    opened.close()


def subscribed(publisher: EnginePublisher) -> BlockingSubscriber:
    return BlockingSubscriber(Subscriber(publisher.endpoint, publisher.replay_endpoint, timing=QUIET))


def test_leaving_a_loop_over_updates_closes_the_subscriber(publisher):
    for number in range(3):
        publisher.publish(batch(stored(number)))
    view = BlockView()
    subscriber = subscribed(publisher)
    seqs = []
    for update in subscriber:
        view.update(update)
        if isinstance(update, Received):
            seqs.append(update.seq)
        if isinstance(update, Synced):
            break
    assert seqs == [0, 1, 2]
    assert {block.hash for block in view} == {0, 1, 2}
    with pytest.raises(SubscriberClosedError):
        subscriber.receive()
    subscriber.close()


def test_a_receive_that_times_out_loses_no_update(publisher):
    publisher.publish(batch(stored(1)))
    with subscribed(publisher) as subscriber:
        assert [type(subscriber.receive()) for _ in range(2)] == [Received, Synced]
        with pytest.raises(TimeoutError):
            subscriber.receive(timeout=0.01)
        asyncio.run(publisher.wait_for_subscriber(60))
        publisher.publish(batch(removed(1)))
        assert [update.seq for update in (subscriber.receive(60),) if isinstance(update, Received)] == [1]
        publisher.publish(batch())
        publisher.publish(batch())
        assert isinstance(next(iter(subscriber)), Received)  # leaving a loop over the subscriber does not close it
        assert subscriber.receive().kind == "batch"


def test_ctrl_c_ends_a_waiting_receive():
    (port,) = free_ports(1)
    program = f"""
from kvbus.client import BlockingSubscriber, Subscriber, Timing
print("waiting", flush=True)
try:
    for update in BlockingSubscriber(Subscriber("tcp://127.0.0.1:{port}", timing=Timing(unreachable_s=0.1))):
        print(update.kind, flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["waiting\n", "unreachable\n"]
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert out == "interrupted\n"
    assert process.returncode == 0


def test_a_ctrl_c_that_asyncio_forgets_raises_keyboard_interrupt() -> None:
    """A Ctrl-C always raises KeyboardInterrupt, even if asyncio's Runner forgets it.

    Runner.run resets its count of interrupts after it has installed its handler, so an interrupt in between is
    forgotten.
    """

    class Interrupted(Subscriber):
        async def receive(self) -> Update:
            raise asyncio.CancelledError

    subscriber = BlockingSubscriber(Interrupted("tcp://127.0.0.1:1"))
    with pytest.raises(KeyboardInterrupt):
        subscriber.receive()
    subscriber.close()
