"""Tests for the client library's Subscriber over real sockets, on asyncio and on uvloop."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec
import pytest
import zmq

from kvbus.client import (
    BlockView,
    Gap,
    Lost,
    Reachable,
    Received,
    Rejected,
    Snapshot,
    Subscriber,
    SubscriberClosedError,
    Synced,
    Timing,
    Unreachable,
)
from kvbus.client import subscriber as subscriber_module
from kvbus.client.sequence import Sequence
from kvbus.common.errors import BindError
from kvbus.core.sequencing.actions import Ask
from kvbus.core.types import Reason
from kvbus.core.wire.codec import decode_batch
from kvbus.core.wire.encoding import encode_batch
from kvbus.core.wire.schema import BlockStored
from kvbus.transport.client.subscriber import StreamSockets
from kvbus.transport.engine.publisher import EnginePublisher
from tests.ports import free_ports
from tests.transport.loops import COUNTING, collect, reads
from tests.typed import there

# only tests of the confirmation of a silent connection use a short time for it: in other tests, the confirmation would
# compete with the batches that the test publishes
QUICK = Timing(connect_s=5, idle_s=0.2, confirm_s=60)
TOKENS = msgspec.Raw(msgspec.msgpack.encode([1, 2]))
SEQ = (7).to_bytes(8, "big")


def payload(*hashes, ts=1.0, padding=0):
    events = [BlockStored((block,), None, TOKENS, 2) for block in hashes]
    if padding:
        events[0].token_ids = msgspec.Raw(msgspec.msgpack.encode([1] * padding))
    return encode_batch(events, ts, 0)


def run(loop_factory, main):
    async def guarded():
        async with asyncio.timeout(60):
            await main()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(guarded())
    collect()  # an unclosed socket or context causes a warning, which fails the test


@pytest.fixture(params=list(COUNTING.values()), ids=list(COUNTING))
def loops(request):
    return lambda main: run(request.param, main)


def engine(**options):
    return EnginePublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", bind=True, **options)


def subscribed(publisher, timing=QUICK, **options):
    return Subscriber(publisher.endpoint, publisher.replay_endpoint, timing=timing, **options)


async def until(subscriber, kind, view=None):
    """Receive updates until one of the class ``kind`` has come. Return all received updates in order."""
    seen: list[Any] = []
    while not seen or not isinstance(seen[-1], kind):
        seen.append(await subscriber.receive())
        if view is not None:
            view.update(seen[-1])
    return seen


async def in_step(publisher, subscriber):
    """Wait until the subscriber has read the replay answer and the publisher has received the subscription."""
    await until(subscriber, Synced)
    await publisher.wait_for_subscriber()


@pytest.mark.parametrize("framing", ["3", "4", "sim"])
def test_a_subscriber_gets_replayed_batches_and_then_live_batches(loops, framing):
    async def main():
        async with engine(framing=framing, topic=b"kv@a@m") as publisher:
            for seq in range(3):
                publisher.publish(payload(seq))
            async with subscribed(publisher) as subscriber:
                history = await until(subscriber, Synced)
                assert [update.seq for update in history] == [0, 1, 2, 2]
                assert all(update.replayed for update in history[:3])
                await publisher.wait_for_subscriber()
                publisher.publish(payload(3))
                (live,) = await until(subscriber, Received)
                assert (live.seq, live.topic) == (3, b"kv@a@m")
                assert list(live.batch.events[0].block_hashes) == [3]

    loops(main)


def test_a_publisher_that_starts_late_becomes_reachable(loops):
    async def main():
        (port,) = free_ports(1)
        endpoint = f"tcp://127.0.0.1:{port}"
        async with Subscriber(endpoint, timing=Timing(unreachable_s=0.05)) as subscriber:
            assert (await until(subscriber, Unreachable))[-1].endpoint == endpoint
            async with EnginePublisher(endpoint, None, bind=True) as publisher:
                await until(subscriber, Reachable)
                await publisher.wait_for_subscriber()

    loops(main)


def test_a_binding_subscriber_receives_from_a_connecting_publisher(loops):
    async def main():
        async with Subscriber("tcp://127.0.0.1:*", bind=True, timing=QUICK) as subscriber:
            publisher = EnginePublisher(there(subscriber.endpoint), None, bind=False)
            async with publisher:
                await publisher.wait_for_subscriber()
                publisher.publish(payload(5))
                update = await subscriber.receive()
                assert isinstance(update, Received)
                assert (update.seq, update.replayed) == (0, False)

    loops(main)


def test_malformed_messages_are_rejected_with_their_reason(loops):
    async def main():
        async with engine() as publisher, subscribed(publisher) as subscriber:
            await in_step(publisher, subscriber)
            publisher.send_frames(b"only one")
            publisher.send_frames(b"t", b"seq?", payload())
            publisher.publish(b"\xc1")
            publisher.publish(payload(1))
            assert await subscriber.receive() == Rejected(None, b"only one", Reason.FRAME_COUNT)
            assert await subscriber.receive() == Rejected(None, b"t", Reason.SEQ_WIDTH)
            assert await subscriber.receive() == Rejected(0, b"", Reason.NOT_MSGPACK)
            assert (await subscriber.receive()).seq == 1

    loops(main)


def test_a_subscriber_receives_again_after_an_oversize_message(loops):
    async def main():
        async with engine() as publisher, subscribed(publisher, max_message_bytes=1000) as subscriber:
            await in_step(publisher, subscriber)
            publisher.publish(payload(0))
            publisher.send_frames(b"", SEQ, b"x" * 2000)
            await until(subscriber, Received)
            # The connection breaks here, and the socket of the next connection sends a second subscription.
            connected = asyncio.ensure_future(publisher.wait_for_subscriber(count=2))
            receiving = asyncio.ensure_future(until(subscriber, Received))
            await connected
            publisher.publish(payload(1))
            assert (await receiving)[-1].seq == 1

    loops(main)


def test_a_burst_arrives_completely_while_other_tasks_run(loops):
    async def main():
        async with engine() as publisher, subscribed(publisher) as subscriber:
            await in_step(publisher, subscriber)
            turns = 0

            async def other():
                nonlocal turns
                while True:
                    turns += 1
                    await asyncio.sleep(0)

            for seq in range(3000):
                publisher.publish(payload(seq))
            task = asyncio.ensure_future(other())
            seen: list[Any] = []
            while len(seen) < 3000:
                update = await subscriber.receive()
                if isinstance(update, Received):
                    seen.append(update.seq)
            task.cancel()
            assert seen == list(range(3000))
            assert turns > 5

    loops(main)


def test_cancelling_a_receive_loses_no_update(loops):
    async def main():
        async with engine() as publisher, subscribed(publisher) as subscriber:
            await in_step(publisher, subscriber)
            waiting = asyncio.ensure_future(subscriber.receive())
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            publisher.publish(payload(0))
            assert (await subscriber.receive()).seq == 0

    loops(main)


def test_a_closing_subscriber_does_not_send_its_due_replay_request(loops, monkeypatch):
    """A closed subscriber must not send a request: the request would open a connection that nobody closes.

    An open connection would keep the ZeroMQ context from ending.
    """
    sent = []

    async def main():
        async with engine() as publisher:
            subscriber = subscribed(publisher)
            await until(subscriber, Synced)
            waiting = asyncio.ensure_future(subscriber.receive())
            await asyncio.sleep(0)
            monkeypatch.setattr(Sequence, "tick", lambda *_: [Ask(99, 0)])
            monkeypatch.setattr(StreamSockets, "ask", lambda *_: sent.append(_))
            await subscriber.aclose()
            with pytest.raises(SubscriberClosedError):
                await waiting

    loops(main)
    assert not sent


def test_closing_a_subscriber_ends_a_waiting_receive(loops):
    async def main():
        async with engine() as publisher:
            subscriber = subscribed(publisher)
            await until(subscriber, Synced)
            waiting = asyncio.ensure_future(subscriber.receive())
            await asyncio.sleep(0)
            await subscriber.aclose()
            with pytest.raises(SubscriberClosedError):
                await waiting
            with pytest.raises(SubscriberClosedError):
                await subscriber.receive()
            await subscriber.aclose()

    loops(main)


def test_leaving_the_async_for_loop_closes_the_sockets(loops, monkeypatch):
    closed = []
    close = StreamSockets.aclose

    async def noted(self):
        closed.append(self)
        await close(self)

    monkeypatch.setattr(StreamSockets, "aclose", noted)

    async def main():
        async with engine() as publisher:
            publisher.publish(payload(0))

            async def follow():
                async for _ in subscribed(publisher):
                    pass

            task = asyncio.ensure_future(follow())
            await publisher.wait_for_subscriber()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert len(closed) == 1

    loops(main)


def test_two_tasks_cannot_share_a_subscriber(loops):
    async def main():
        async with engine() as publisher, subscribed(publisher) as subscriber:
            await in_step(publisher, subscriber)
            first = asyncio.ensure_future(subscriber.receive())
            await asyncio.sleep(0)
            with pytest.raises(RuntimeError, match="another task"):
                await subscriber.receive()
            publisher.publish(payload(0))
            assert (await first).seq == 0

    loops(main)


def test_unread_batches_do_not_make_the_loop_spin(loops):

    async def main():
        async with engine() as publisher, subscribed(publisher) as subscriber:
            await in_step(publisher, subscriber)
            before = reads()
            for seq in range(50):
                publisher.publish(payload(seq))
            while reads() == before:  # noqa: ASYNC110 - receiving would consume the message
                await asyncio.sleep(0)
            before = reads()
            for _ in range(200):
                await asyncio.sleep(0)
            assert reads() - before < 100
            assert (await subscriber.receive()).seq == 0

    loops(main)


def test_a_subscriber_can_replay_without_a_live_endpoint(loops):
    async def main():
        async with engine() as publisher:
            publisher.publish(payload(0))
            async with Subscriber(None, publisher.replay_endpoint, timing=QUICK) as subscriber:
                assert [update.kind for update in await until(subscriber, Synced)] == ["batch", "synced"]

    loops(main)


@pytest.mark.parametrize(
    "endpoints", [("nonsense", None), ("tcp://127.0.0.1:5557", "tcp://no-port"), (None, None, "nonsense")]
)
def test_malformed_endpoints_are_named_and_the_context_is_closed(loops, endpoints, monkeypatch):
    made = []

    class Recorded(zmq.Context):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr(zmq, "Context", Recorded)

    async def main():
        live, replay, *asked = endpoints
        subscriber = Subscriber(live, replay, snapshot_endpoint=asked[0] if asked else None)
        with pytest.raises(ValueError, match=r"nonsense|no-port"):
            subscriber.open()
        assert [context.closed for context in made] == [True]

    loops(main)


def test_replay_sockets_are_not_opened_before_the_first_request(loops, monkeypatch):
    """The subscriber opens no connection to a replay endpoint before its first request.

    kvbus would count a connection that ends immediately as a failed handshake.
    """
    kinds = []

    class Recorded(zmq.Context):
        def socket(self, socket_type, *args, **options):
            kinds.append(socket_type)
            return super().socket(socket_type, *args, **options)

    async def main():
        monkeypatch.setattr(zmq, "Context", Recorded)
        subscriber = Subscriber("ipc://@live", "ipc://@replay", snapshot_endpoint="tcp://127.0.0.1:9")
        subscriber.open()
        assert zmq.DEALER not in kinds
        await subscriber.aclose()
        assert zmq.SUB in kinds

    loops(main)


@pytest.mark.parametrize("bind", [False, True])
def test_a_subscriber_refuses_a_port_above_65535(loops, bind):
    async def main():
        with pytest.raises(ValueError, match="port must be at most 65535"):
            Subscriber("tcp://127.0.0.1:80000", bind=bind).open()

    loops(main)


def test_binding_a_used_address_raises_bind_error(loops):
    async def main():
        async with Subscriber("tcp://127.0.0.1:*", bind=True) as first:
            second = Subscriber(first.endpoint, bind=True)
            with pytest.raises(BindError):
                second.open()

    loops(main)


def test_a_subscriber_without_any_endpoint_is_refused():
    with pytest.raises(ValueError, match="endpoint"):
        Subscriber(None)


# -- snapshots

ID = b"publisher 16 byt"


@contextlib.contextmanager
def snapshots():
    """A ROUTER socket that stands for a snapshot endpoint, and its endpoint.

    The test itself reads and answers the requests.
    """
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")
        yield router, f"tcp://127.0.0.1:{port}"


async def answer(router, seq, *chunks, delimiter=()):
    while not router.poll(0):  # noqa: ASYNC110 - the socket has no event to wait for
        await asyncio.sleep(0)
    client, *request = router.recv_multipart()
    assert request == [b"snapshot"]
    router.send_multipart([client, *delimiter, seq.to_bytes(8, "big", signed=True), ID, *chunks])


def live(publisher, seq, block):
    publisher.send_frames(b"", seq.to_bytes(8, "big") + ID, payload(block))


@pytest.mark.parametrize("delimiter", [[], [b""]])
def test_a_subscriber_gets_a_snapshot_of_many_chunks_and_then_live_batches(loops, delimiter):
    async def main():
        view = BlockView()
        with snapshots() as (router, endpoint):
            async with (
                engine() as publisher,
                Subscriber(publisher.endpoint, snapshot_endpoint=endpoint, timing=QUICK) as subscriber,
            ):
                served = asyncio.ensure_future(answer(router, 40, *map(payload, range(100)), delimiter=delimiter))
                seen = await until(subscriber, Synced, view)
                await served
                assert [update.kind for update in seen] == ["snapshot", "synced"]
                assert {block.hash for block in view} == set(range(100))
                await publisher.wait_for_subscriber()
                live(publisher, 41, 100)
                await until(subscriber, Received, view)
                # Batch 42 is missing here. Without a replay, the subscriber requests another snapshot.
                live(publisher, 43, 7)
                served = asyncio.ensure_future(answer(router, 43, payload(7)))
                assert isinstance((await until(subscriber, Snapshot, view))[0], Gap)
                await served
                assert {block.hash for block in view} == {7}

    loops(main)


def test_an_unavailable_snapshot_is_replaced_by_a_replay(loops):
    async def main():
        with snapshots() as (router, endpoint):
            async with engine() as publisher:
                publisher.publish(payload(0))
                async with subscribed(publisher, snapshot_endpoint=endpoint) as subscriber:
                    served = asyncio.ensure_future(answer(router, -2))
                    assert [update.kind for update in await until(subscriber, Synced)] == ["batch", "synced"]
                    await served

    loops(main)


def test_an_unreadable_chunk_of_a_snapshot_is_rejected(loops):
    async def main():
        with snapshots() as (router, endpoint):
            async with Subscriber(None, snapshot_endpoint=endpoint, timing=QUICK) as subscriber:
                served = asyncio.ensure_future(answer(router, 3, payload(1), b"\xc1", payload(2)))
                taken, *rest = await until(subscriber, Synced)
                await served
                assert [list(event.block_hashes) for batch in taken.batches for event in batch.events] == [[1], [2]]
                assert rest == [Rejected(3, b"", Reason.NOT_MSGPACK), Synced(3)]

    loops(main)


def test_cancelling_the_decoding_of_a_snapshot_loses_no_block(loops, monkeypatch):
    decoded = []

    def noted(chunk):
        decoded.append(chunk)
        return decode_batch(chunk)

    monkeypatch.setattr(subscriber_module, "decode_batch", noted)

    async def main():
        with snapshots() as (router, endpoint):
            async with Subscriber(None, snapshot_endpoint=endpoint, timing=QUICK) as subscriber:
                served = asyncio.ensure_future(answer(router, 3, *map(payload, range(50))))
                receiving = asyncio.ensure_future(subscriber.receive())
                while len(decoded) < 20:  # noqa: ASYNC110 - no event announces that a chunk was decoded
                    await asyncio.sleep(0)
                receiving.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await receiving
                await served
                assert len(decoded) < 50
                taken = await subscriber.receive()
                assert isinstance(taken, Snapshot)
                assert await subscriber.receive() == Synced(3)
                stored = [event for batch in taken.batches for event in batch.events if isinstance(event, BlockStored)]
                assert [list(event.block_hashes) for event in stored] == [[block] for block in range(50)]

    loops(main)


async def test_by_topic_reports_a_gap_only_for_the_topic_that_has_it() -> None:
    async with Subscriber("tcp://127.0.0.1:1", by_topic=True) as subscriber:
        payload = encode_batch([], 0.0, 0)
        subscriber.on_live([b"b", bytes(8), payload])
        subscriber.on_connection(up=True)
        for name, seq in ((b"a", 5), (b"b", 1), (b"a", 6), (b"a", 9), (b"b", 2)):
            subscriber.on_live([name, seq.to_bytes(8, "big"), payload])
        updates = [await subscriber.receive() for _ in range(subscriber.pending)]
        seen = [(update.topic, update.seq) for update in updates if isinstance(update, Received)]
        assert seen == [(b"b", 0), (b"a", 5), (b"b", 1), (b"a", 6), (b"a", 9), (b"b", 2)]
        (lost,) = (update for update in updates if isinstance(update, Lost))
        assert (lost.topic, lost.first, lost.last) == (b"a", 7, 8)
        assert {update.topic for update in updates if isinstance(update, Gap)} <= {b"a"}
        subscriber.on_connection(up=False)
        assert (subscriber.epoch, subscriber.duplicates) == (0, 0)


def test_by_topic_with_a_replay_endpoint_is_refused() -> None:
    with pytest.raises(ValueError, match="with by_topic there can be no replay"):
        Subscriber("tcp://127.0.0.1:1", "tcp://127.0.0.1:2", by_topic=True)
