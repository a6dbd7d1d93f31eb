"""Tests for EnginePublisher with plain ZeroMQ peers, which check the exact bytes of its messages."""

import asyncio
import struct

import pytest
import zmq

from kvbus.common.errors import BindError
from kvbus.core.wire.frames import END_SEQ
from kvbus.transport.client.raw import RawSubscriber
from kvbus.transport.engine.publisher import EnginePublisher, binds
from tests.doubles import replay_faults
from tests.typed import there

ANY = "tcp://127.0.0.1:*"


def u64(value):
    return struct.pack(">Q", value)


class Dealer:
    """A minimal replay client. Its calls block, so tests run it in a thread."""

    def __init__(self, endpoint, hwm=1000):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.RCVHWM, hwm)
        self.socket.setsockopt(zmq.IPV6, 1)
        self.socket.setsockopt(zmq.RCVTIMEO, 60_000)
        self.socket.connect(endpoint)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close(0)
        self.context.term()

    def ask(self, start):
        self.socket.send_multipart([b"", u64(start)])

    def until_end(self):
        frames = [self.socket.recv_multipart()]
        while frames[-1][-2] != END_SEQ:
            frames.append(self.socket.recv_multipart())
        return frames

    def nothing_more(self, ms=50):
        return not self.socket.poll(ms)


def replay(endpoint, start):
    with Dealer(endpoint) as dealer:
        dealer.ask(start)
        return dealer.until_end()


@pytest.mark.parametrize(
    ("endpoint", "bound"),
    [
        ("tcp://*:5557", True),
        ("tcp://[::]:5557", True),
        ("ipc:///tmp/x", True),
        ("inproc://x", True),
        ("tcp://0.0.0.0:5557", True),
        ("tcp://127.0.0.1:5557", False),
        ("tcp://kvbus:5557", False),
    ],
)
def test_an_engine_binds_wildcards_and_connects_to_concrete_hosts(endpoint, bound):
    assert binds(endpoint) is bound


async def test_live_messages_carry_topic_big_endian_seq_and_payload():
    async with EnginePublisher(ANY, None, topic=b"kv") as engine, RawSubscriber(engine.endpoint) as sub:
        await engine.wait_for_subscriber(60)
        assert [engine.publish(b"a"), engine.publish(b"b")] == [0, 1]
        assert await sub.recv() == [b"kv", u64(0), b"a"]
        assert await sub.recv() == [b"kv", u64(1), b"b"]


async def test_a_replay_has_the_batches_lost_live_but_no_skipped_seq():
    async with EnginePublisher(ANY, ANY) as engine, RawSubscriber(engine.endpoint) as sub:
        await engine.wait_for_subscriber(60)
        engine.publish(b"0")
        assert engine.skip() == 1
        engine.publish(b"2", live=False)
        engine.publish(b"3")
        assert [(await sub.recv())[1] for _ in range(2)] == [u64(0), u64(3)]
        answer = await asyncio.to_thread(replay, engine.replay_endpoint, 0)
        assert [frames[2:] for frames in answer[:-1]] == [[u64(0), b"0"], [u64(2), b"2"], [u64(3), b"3"]]


async def test_a_buffered_batch_can_be_sent_again():
    async with EnginePublisher(ANY, None) as engine, RawSubscriber(engine.endpoint) as sub:
        await engine.wait_for_subscriber(60)
        engine.publish(b"0", live=False)
        engine.publish(b"1")
        engine.send_again(0)
        assert [(await sub.recv())[2] for _ in range(2)] == [b"1", b"0"]
        with pytest.raises(KeyError, match="seq 7"):
            engine.send_again(7)


@pytest.mark.parametrize(
    ("framing", "data", "end"),
    [
        ("3", [b"", u64(1), b"b"], [b"", END_SEQ, b""]),
        ("4", [b"", b"topic", u64(1), b"b"], [b"", b"", END_SEQ, b""]),
        ("sim", [b"", b"topic", u64(1), b"b"], [b"", b"", END_SEQ, b""]),
    ],
)
async def test_replay_answers_use_the_configured_framing(framing, data, end):
    async with EnginePublisher(ANY, ANY, topic=b"topic", framing=framing) as engine:
        engine.publish(b"a")
        engine.publish(b"b")
        assert await asyncio.to_thread(replay, engine.replay_endpoint, 1) == [data, end]


async def test_replay_of_a_trimmed_buffer_starts_at_its_oldest_batch():
    async with EnginePublisher(ANY, ANY, buffer_steps=3) as engine:
        for _ in range(10):
            engine.publish(b"x")
        answer = await asyncio.to_thread(replay, engine.replay_endpoint, 0)
        assert [frames[2] for frames in answer] == [u64(7), u64(8), u64(9), END_SEQ]


async def test_a_request_without_the_delimiter_is_ignored():
    async with EnginePublisher(ANY, ANY) as engine:
        engine.publish(b"x")

        def ask():
            with Dealer(engine.replay_endpoint) as dealer:
                dealer.socket.send(u64(0))  # a request without the empty delimiter frame
                dealer.socket.send_multipart([b"", b"short"])
                dealer.ask(0)
                return dealer.until_end(), dealer.nothing_more()

        answer, quiet = await asyncio.to_thread(ask)
        assert len(answer) == 2
        assert quiet
        assert engine.replay_requests == 1


async def test_a_slow_client_with_a_low_high_water_mark_loses_no_frame():
    count = 6000
    async with EnginePublisher(ANY, ANY) as engine:
        for _ in range(count):
            engine.publish(b"x" * 500)

        def ask():
            with Dealer(engine.replay_endpoint, hwm=10) as slow:
                slow.ask(0)
                assert slow.socket.poll(60_000)
                # The first client reads nothing. A second client gets its complete answer in this time.
                other = replay(engine.replay_endpoint, 0)
                return slow.until_end(), other

        slow, other = await asyncio.to_thread(ask)
        assert [frames[2] for frames in slow[:-1]] == [u64(n) for n in range(count)]
        assert slow == other


async def test_a_client_that_leaves_during_its_answer_does_not_stop_the_server():
    async with EnginePublisher(ANY, ANY) as engine:
        for _ in range(5000):
            engine.publish(b"x" * 500)

        def ask():
            with Dealer(engine.replay_endpoint, hwm=1) as gone:
                gone.ask(0)
                assert gone.socket.poll(60_000)
            return replay(engine.replay_endpoint, 4999)

        assert len(await asyncio.to_thread(ask)) == 2


def drained(fault, take):
    """Request a replay of three batches from a publisher with a fault.

    Return the seqs of the first `take` messages, and whether no other message follows.
    """
    with EnginePublisherForThreads() as engine:
        engine.replay_fault = fault
        with Dealer(engine.replay_endpoint) as dealer:
            dealer.ask(0)
            got = [int.from_bytes(dealer.socket.recv_multipart()[2], "big") for _ in range(take)]
            return got, dealer.nothing_more()


class EnginePublisherForThreads(EnginePublisher):
    def __init__(self):
        super().__init__(ANY, ANY)

    def __enter__(self):
        self.start()
        for _ in range(3):
            self.publish(b"x")
        return self

    def __exit__(self, *_):
        self.close()


@pytest.mark.parametrize(
    ("fault", "seqs"),
    [
        (list, [0, 1, 2, "end"]),
        (replay_faults.silent, []),
        (replay_faults.empty, ["end"]),
        (replay_faults.no_end, [0, 1, 2]),
        (replay_faults.duplicate, [0, 0, 1, 1, 2, 2, "end"]),
        (replay_faults.interleave, [0, 0, 1, 1, 2, 2, "end", "end"]),
    ],
)
def test_each_replay_fault_changes_the_answer(fault, seqs):
    want = [2**64 - 1 if seq == "end" else seq for seq in seqs]
    assert drained(fault, len(want)) == (want, True)


def test_the_fault_endless_repeats_the_answer_without_end():
    got, quiet = drained(replay_faults.endless, 50)
    assert got == [0, 1, 2] * 16 + [0, 1]
    assert not quiet


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
async def test_a_restart_keeps_the_endpoints_and_drops_seqs_and_buffer(transport, tmp_path):
    live, replays = (ANY, ANY) if transport == "tcp" else (f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/replay")
    async with EnginePublisher(live, replays) as engine, RawSubscriber(engine.endpoint) as sub:
        await engine.wait_for_subscriber(60)
        before = engine.endpoint, engine.replay_endpoint
        engine.publish(b"old")
        assert (await sub.recv())[2] == b"old"
        engine.restart()
        assert (engine.endpoint, engine.replay_endpoint) == before
        assert engine.buffered == 0
        # the publisher had dropped the connection, so the subscriber subscribes again
        await engine.wait_for_subscriber(60)
        assert engine.publish(b"new") == 0
        assert await sub.recv() == [b"", u64(0), b"new"]
        answer = await asyncio.to_thread(replay, engine.replay_endpoint, 0)
        assert [frames[2] for frames in answer] == [u64(0), END_SEQ]


async def test_an_engine_can_connect_to_a_bound_subscriber():
    async with RawSubscriber(ANY, bind=True) as sub, EnginePublisher(sub.endpoint, ANY) as engine:
        assert not engine.bind
        await engine.wait_for_subscriber(60)
        engine.publish(b"x")
        assert (await sub.recv())[2] == b"x"


async def test_used_and_malformed_endpoints_raise_different_errors():
    async with EnginePublisher(ANY, ANY) as engine:
        second = EnginePublisher(ANY, engine.replay_endpoint)
        with pytest.raises(BindError, match=r"cannot listen on tcp://127\.0\.0\.1:"):
            second.start()
        with pytest.raises(ValueError, match="cannot bind tcp://nonsense"):
            EnginePublisher("tcp://nonsense", None, bind=True).start()


async def test_an_engine_and_its_replay_may_be_at_an_ipv6_address():
    async with EnginePublisher("tcp://[::1]:*", "tcp://[::1]:*") as engine, RawSubscriber(engine.endpoint) as sub:
        await engine.wait_for_subscriber(60)
        engine.publish(b"x")
        assert (await sub.recv())[2] == b"x"
        assert len(await asyncio.to_thread(replay, engine.replay_endpoint, 0)) == 2


@pytest.mark.parametrize("bind", [True, False])
async def test_a_port_above_65535_is_refused(bind):
    with pytest.raises(ValueError, match="port must be at most 65535"):
        EnginePublisher("tcp://127.0.0.1:80000", None, bind=bind).start()
    with pytest.raises(ValueError, match="port must be at most 65535"):
        RawSubscriber("tcp://127.0.0.1:80000", bind=bind).start()


async def test_port_0_binds_to_a_free_port():
    async with EnginePublisher("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", bind=True) as engine:
        assert not engine.endpoint.endswith(":0")
        assert not there(engine.replay_endpoint).endswith(":0")


async def test_waiting_for_a_subscriber_that_never_connects_times_out():
    async with EnginePublisher(ANY, None) as engine:
        with pytest.raises(TimeoutError):
            await engine.wait_for_subscriber(0.01)


async def test_a_restart_over_ipc_keeps_its_socket_files(tmp_path):
    live, replays = f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/replay"
    async with EnginePublisher(live, replays) as engine:
        for _ in range(20):
            engine.restart()
            async with RawSubscriber(live):
                await engine.wait_for_subscriber(60)
            engine.publish(b"x")
            assert len(await asyncio.to_thread(replay, replays, 0)) == 2


async def test_sockets_can_share_a_context_inproc():
    context = zmq.Context()
    try:
        async with (
            EnginePublisher("inproc://live", "inproc://replay", context=context) as engine,
            RawSubscriber(engine.endpoint, context=context) as sub,
        ):
            await engine.wait_for_subscriber(60)
            engine.publish(b"x")
            assert (await sub.recv())[2] == b"x"
    finally:
        context.term()


def test_publishing_before_the_start_is_refused():
    with pytest.raises(RuntimeError, match="not started"):
        EnginePublisher(ANY, None).publish(b"x")
