"""Tests for the listener of kvbus's own ZMTP with real peers: current libzmq, and bare sockets with older ZMTP
versions.
"""

import asyncio
import contextlib
import socket

import pytest
import zmq

from kvbus.common.errors import BindError
from kvbus.transport.zmtp.endpoint import Listener
from kvbus.transport.zmtp.mechanism import Role
from kvbus.transport.zmtp.protocol import Limits
from kvbus.transport.zmtp.reasons import Reason
from kvbus.transport.zmtp.settings import Settings
from kvbus.transport.zmtp.wire import command, encode_message
from tests.doubles.bus import eventually
from tests.ports import free_port
from tests.transport.loops import both_loops, read_all, turns
from tests.transport.zmtp.curves import Pair
from tests.transport.zmtp.peers import Recorder, greeting, hello, hello_2, ready

ANY = "tcp://127.0.0.1:0"
ROOMY = Settings(limits=Limits(frame_bytes=2**24, message_bytes=2**24))


US, THEM, OTHER = Pair(), Pair(), Pair()


def secured(curve):
    """Return the CURVE keys of a listener, and the libzmq options with which two peers connect to it.

    Without ``curve``, return None and no options.
    """
    if not curve:
        return None, {}, {}
    return US.accepts(THEM, OTHER), THEM.as_client(US), OTHER.as_client(US)


@contextlib.asynccontextmanager
async def listening(role=Role.PUB, endpoint=ANY, *, settings=None, keys=None, **options):
    """Yield a listener, with CURVE if there are keys, and a handler that records the events of its peers."""
    seen = Recorder(**options)
    mechanism = None if keys is None else keys.mechanism
    listener = Listener(endpoint, role, seen, settings=settings or Settings(), refused=seen.refuse, mechanism=mechanism)
    try:
        yield listener, seen
    finally:
        listener.close()
        await turns()
        assert not listener.peers


@contextlib.asynccontextmanager
async def bare(endpoint, data=b"", *, buffer=None):
    """Yield the reader and writer of a plain TCP connection. ``buffer`` is the size of its receive buffer in bytes."""
    raw = socket.socket()
    if buffer is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    raw.connect(("127.0.0.1", int(endpoint.rpartition(":")[2])))
    reader, writer = await asyncio.open_connection(sock=raw)
    writer.write(data)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def received(sub, count):
    got: list[list[bytes]] = []

    def all_there():
        got.extend(read_all(sub))
        return len(got) >= count

    await eventually(all_there, f"{count} messages")
    return got


@both_loops
@pytest.mark.parametrize(("scheme", "curve"), [("tcp", False), ("ipc", False), ("tcp", True)])
async def test_libzmq_subscribers_get_the_messages_of_their_topics(dial, tmp_path, scheme, curve):
    endpoint = ANY if scheme == "tcp" else f"ipc://{tmp_path}/kv"
    keys, one, other = secured(curve)
    async with listening(endpoint=endpoint, settings=ROOMY, keys=keys) as (listener, seen):
        sub = dial(zmq.SUB, listener.endpoint, SUBSCRIBE=b"a", RCVHWM=0, **one)
        xsub = dial(zmq.XSUB, listener.endpoint, RCVHWM=0, **other)
        xsub.send(b"\x01")
        await eventually(lambda: len(seen.topics) == 2, "both subscriptions")
        sizes = [0, 1, 222, 223, 255, 256, 257, 70_000, 5_000_000]
        sent = [[b"a" + bytes([n % 9]), n.to_bytes(8, "big"), b"p" * sizes[n % 8]] for n in range(1000)]
        sent.append([b"a", b"", b"x" * sizes[-1], b"", b"end"])
        for frames in sent:
            seen.send(*frames)
        seen.send(b"b", b"for one alone")
        assert await received(sub, len(sent)) == sent
        assert await received(xsub, len(sent) + 1) == [*sent, [b"b", b"for one alone"]]
        assert {peer.socket_type for peer in seen.peers} == {b"SUB", b"XSUB"}
        assert {peer.version for peer in seen.peers} == {(3, 1)}
        assert {peer.key for peer in seen.peers} == ({THEM.public, OTHER.public} if curve else {b""})
        assert all(peer.address.startswith("127.0.0.1:" if scheme == "tcp" else "unix") for peer in seen.peers)
        sub.unsubscribe(b"a")
        await eventually(lambda: seen.topics[-1] == ("-", b"a"), "the cancelled subscription")
        sub.close()
        await eventually(lambda: seen.ends == [Reason.LEFT], "the peer's end")
        xsub.close()
        await eventually(lambda: seen.ends == [Reason.LEFT] * 2, "the other's end")
        assert seen.refused == []


@both_loops
async def test_a_message_can_be_sent_to_a_single_peer(dial):
    async with listening() as (listener, seen):
        subs = [dial(zmq.SUB, listener.endpoint, SUBSCRIBE=b"") for _ in range(3)]
        await eventually(lambda: len(seen.topics) == 3, "their subscriptions")
        for peer in seen.peers:
            peer.write(encode_message([b"for", str(peer.id).encode()]))
        got = [(await received(sub, 1))[0][1] for sub in subs]
        assert sorted(got) == sorted(str(peer.id).encode() for peer in seen.peers)
        assert len(set(got)) == 3


@both_loops
@pytest.mark.parametrize(("kind", "curve"), [(zmq.DEALER, False), (zmq.REQ, False), (zmq.DEALER, True)])
async def test_requests_of_libzmq_clients_are_read_and_answered(dial, kind, curve):
    keys, one, _ = secured(curve)
    async with listening(Role.ROUTER, settings=ROOMY, keys=keys, echo=True) as (listener, seen):
        asking = dial(kind, listener.endpoint, IDENTITY=b"me", **one)
        for frames in ([b"short"], [b"x" * 300, b"", b"y" * 3_000_000]):
            asking.send_multipart(frames)
            await eventually(lambda: asking.poll(0), "the answer")
            assert asking.recv_multipart() == frames
        assert [peer.identity for peer in seen.peers] == [b"me"]


@both_loops
async def test_20000_requests_on_one_connection_arrive_in_order(dial):
    async with listening(Role.ROUTER, echo=True) as (listener, _):
        asking = dial(zmq.DEALER, listener.endpoint, SNDHWM=0, RCVHWM=0)
        sent = [[b"", n.to_bytes(8, "big")] for n in range(20_000)]
        for frames in sent:
            asking.send_multipart(frames)
        assert await received(asking, len(sent)) == sent


@both_loops
async def test_heartbeats_of_libzmq_are_answered(dial):
    async with listening() as (listener, seen):
        beats = {"HEARTBEAT_IVL": 20, "HEARTBEAT_TIMEOUT": 100_000, "HEARTBEAT_TTL": 100_000}
        sub = dial(zmq.SUB, listener.endpoint, SUBSCRIBE=b"", **beats)
        await eventually(lambda: seen.topics, "the subscription")
        (peer,) = seen.peers
        pongs = peer.written_bytes + 20 * len(command(b"PONG"))
        await eventually(lambda: peer.written_bytes >= pongs, "twenty answers")
        assert seen.ends == []
        seen.send(b"still there")
        assert await received(sub, 1) == [[b"still there"]]
        assert len(seen.peers) == 1


@both_loops
async def test_a_subscriber_with_zmtp_3_0_gets_messages():
    first = hello(b"SUB", minor=0)
    async with listening() as (listener, seen), bare(listener.endpoint, first) as (reader, writer):
        writer.write(encode_message([b"\1kv"]))
        await eventually(lambda: seen.topics == [("+", b"kv")], "the subscription")
        seen.send(b"kv", b"x" * 300)
        expected = encode_message([b"kv", b"x" * 300])
        ours = greeting() + ready(b"PUB")
        assert await reader.readexactly(len(ours + expected)) == ours + expected
        assert seen.peers[0].version == (3, 0)


@both_loops
@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x01\x00", Reason.GREETING),
        (b"GET / HTTP/1.1\r\n\r\n", Reason.GREETING),
        (b"\x16\x03\x01" + bytes(500), Reason.GREETING),
        (greeting(mechanism=b"CURVE"), Reason.MECHANISM),
        (hello(b"PULL"), Reason.SOCKET_TYPE),
        (hello_2(2), Reason.VERSION),
    ],
)
async def test_a_peer_with_another_protocol_is_refused_immediately(data, reason):
    settings = Settings(handshake_timeout=1000)
    async with listening(settings=settings) as (listener, seen), bare(listener.endpoint, data) as (reader, _):
        with contextlib.suppress(ConnectionError):
            answer = await reader.read()
            assert (b"\x05ERROR" in answer) == (reason in {Reason.SOCKET_TYPE, Reason.MECHANISM})
        await eventually(lambda: seen.refused == [reason], "the refusal")
        assert seen.peers == []
        assert listener.half_open == 0


@both_loops
async def test_a_libzmq_socket_of_an_unsuitable_type_is_refused(dial):
    async with listening(Role.ROUTER) as (listener, seen):
        dial(zmq.SUB, listener.endpoint)
        await eventually(lambda: Reason.SOCKET_TYPE in seen.refused, "the refusal")
        assert seen.peers == []


@both_loops
async def test_unfinished_handshakes_end_at_the_handshake_timeout():
    settings = Settings(handshake_timeout=0.05)
    async with listening(settings=settings) as (listener, seen), contextlib.AsyncExitStack() as stack:
        for n in range(4):
            await stack.enter_async_context(bare(listener.endpoint, hello(b"SUB")[: 7 * n]))
        await eventually(lambda: seen.refused == [Reason.HANDSHAKE_TIMEOUT] * 4, "their end")
        assert listener.half_open == 0


@both_loops
async def test_a_port_scan_is_counted_as_refused():
    async with listening() as (listener, seen):
        async with bare(listener.endpoint):
            pass
        await eventually(lambda: seen.refused, "the probe's end")
        # the probe may close before or after kvbus's greeting arrives
        assert seen.refused in ([Reason.LEFT], [Reason.BROKEN])


@both_loops
async def test_a_peer_beyond_max_peers_is_refused_until_a_peer_leaves(dial):
    async with listening(settings=Settings(max_peers=2)) as (listener, seen):
        first = [dial(zmq.SUB, listener.endpoint) for _ in range(2)]
        await eventually(lambda: len(seen.peers) == 2, "two peers")
        third = dial(zmq.SUB, listener.endpoint, SUBSCRIBE=b"late", RECONNECT_IVL=10)
        await eventually(lambda: seen.refused.count(Reason.TOO_MANY_PEERS) > 1, "the third one refused")
        assert len(seen.peers) == 2
        first[0].close()
        # after a reconnection, libzmq sends its subscriptions only when its application calls it
        await eventually(lambda: not third.poll(0) and seen.topics == [("+", b"late")], "room for the third one")


@both_loops
async def test_concurrent_handshakes_do_not_exceed_max_peers():
    async with (
        listening(settings=Settings(max_peers=1)) as (listener, seen),
        bare(listener.endpoint, greeting()) as (_, one),
        bare(listener.endpoint, greeting()) as (_, two),
    ):
        await eventually(lambda: listener.half_open == 2, "both in their handshake")
        one.write(ready(b"SUB"))
        two.write(ready(b"SUB"))
        await eventually(lambda: seen.refused == [Reason.TOO_MANY_PEERS], "one of them refused")
        assert len(seen.peers) == 1


@both_loops
async def test_a_peer_that_kvbus_disconnects_gets_no_more_messages(dial):
    async with listening() as (listener, seen):
        sub = dial(zmq.SUB, listener.endpoint, SUBSCRIBE=b"", RECONNECT_IVL=-1)
        await eventually(lambda: seen.topics, "the subscription")
        peer = seen.peers[0]
        peer.close("slow_router")
        peer.close("for another reason")
        assert peer.closed
        peer.write(encode_message([b"too late"]))
        await eventually(lambda: seen.ends, "its end")
        assert seen.ends == ["slow_router"]
        assert (peer.unread_bytes, peer.waiting_bytes) == (0, 0)
        assert not sub.poll(50)


@both_loops
async def test_closing_frees_the_endpoint_and_ends_every_peer(dial):
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    async with listening(endpoint=endpoint) as (listener, seen):
        dial(zmq.SUB, endpoint)
        await eventually(lambda: seen.peers, "the peer")
        with pytest.raises(BindError):
            Listener(endpoint, Role.PUB, seen)
        async with bare(endpoint):
            await eventually(lambda: listener.half_open, "one in its handshake")
            listener.close()
            Listener(endpoint, Role.PUB, seen).close()
            await eventually(lambda: seen.ends == [Reason.CLOSED], "its end")
        assert seen.refused == []


@both_loops
@pytest.mark.parametrize("linger", [0.0, 30.0])
async def test_queued_messages_are_sent_after_the_close_only_with_a_linger(linger):
    size = 8_000_000
    async with listening() as (listener, seen), bare(listener.endpoint, hello(b"SUB")) as (reader, _):
        await eventually(lambda: seen.peers, "the peer")
        seen.peers[0].write(encode_message([b"x" * size]))
        listener.close(linger)
        got = bytearray()
        with contextlib.suppress(ConnectionError):
            got += await reader.read(100)
            while data := await reader.read(2**20):
                got += data
        assert (len(got) > size) == bool(linger)


@both_loops
async def test_a_linger_ends_even_if_the_peer_never_reads():
    async with listening() as (listener, seen), bare(listener.endpoint, hello(b"SUB")):
        await eventually(lambda: seen.peers, "the peer")
        seen.peers[0].write(bytes(50_000_000))
        listener.close(0.1)
        await eventually(lambda: seen.ends == [Reason.CLOSED], "its end, though it never reads")


@both_loops
async def test_a_handler_that_raises_ends_only_the_connection_of_its_peer(dial, raised):
    async with listening(Role.ROUTER, echo=True) as (listener, seen):
        good = dial(zmq.DEALER, listener.endpoint)
        bad = dial(zmq.DEALER, listener.endpoint, RECONNECT_IVL=-1)
        await eventually(lambda: len(seen.peers) == 2, "both")
        seen.broken = ValueError("broken")
        bad.send(b"x")
        await eventually(lambda: seen.ends == [Reason.INTERNAL], "the end of one")
        assert [str(error) for error in raised] == ["broken"]
        raised.clear()
        seen.broken = None
        good.send(b"y")
        assert await received(good, 1) == [[b"y"]]


@both_loops
async def test_a_listener_accepts_again_after_it_had_no_descriptor(dial, monkeypatch):
    async with listening() as (listener, seen):
        real = socket.socket.accept
        failing = True

        def accept(self):
            if failing:
                raise OSError(24, "Too many open files")
            return real(self)

        monkeypatch.setattr(socket.socket, "accept", accept)
        dial(zmq.SUB, listener.endpoint, SUBSCRIBE=b"")
        await eventually(lambda: seen.refused.count(Reason.NO_DESCRIPTOR) > 1, "two rests")
        failing = False
        await eventually(lambda: seen.topics, "the one that waited")
