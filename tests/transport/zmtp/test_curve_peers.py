"""Tests for CURVE with libzmq sockets as clients and as servers, on asyncio and on uvloop."""

import asyncio
import contextlib

import pytest
import zmq

from kvbus.transport.zmtp.curve import Client
from kvbus.transport.zmtp.mechanism import Role
from kvbus.transport.zmtp.reasons import Reason
from kvbus.transport.zmtp.settings import Settings
from kvbus.transport.zmtp.wire import encode_message
from tests.doubles.bus import eventually
from tests.transport.loops import both_loops
from tests.transport.zmtp.curves import HELLO, SUB, Pair, sealed, take
from tests.transport.zmtp.peers import hello
from tests.transport.zmtp.test_dialler import dialling
from tests.transport.zmtp.test_listener import bare, received
from tests.transport.zmtp.test_listener import listening as any_listening

HASTY = Settings(handshake_timeout=0.5)
"""Settings with a handshake timeout of 0.5 s. kvbus closes the connection of a peer with wrong keys after this time."""
US, THEM, OTHER = Pair(), Pair(), Pair()


def listening(keys, role=Role.PUB, **options):
    """Open a listener with CURVE keys (None: without CURVE), and a handler that records the events of its peers."""
    return any_listening(role, keys=keys, **options)


@pytest.fixture
def bound(context):
    """A function that binds a SUB as a CURVE server, or without CURVE."""
    made = []

    def one(keys, endpoint="tcp://127.0.0.1:*"):
        socket = context.socket(zmq.SUB)
        made.append(socket)
        socket.linger = 0
        socket.subscribe(b"")
        if keys is not None:
            keys.as_server(socket)
        socket.bind(endpoint)
        return socket, socket.last_endpoint.decode()

    yield one
    for socket in made:
        socket.close()


@both_loops
async def test_encrypted_messages_of_one_write_are_counted_with_their_encrypted_size(dial):
    async with listening(US.accepts(THEM)) as (listener, seen):
        sub = dial(zmq.SUB, listener.endpoint, SUBSCRIBE=b"", **THEM.as_client(US))
        await eventually(lambda: seen.topics, "the subscription")
        (peer,) = seen.peers
        messages = [[b"kv", bytes(n)] for n in range(300)]
        data = b"".join(map(encode_message, messages))
        peer.write(data)
        assert await received(sub, 300) == messages
        assert peer.written_bytes > len(data) + 33 * 600 - 1
        await eventually(lambda: peer.acknowledged_bytes == peer.written_bytes, "the acknowledgement")


@both_loops
@pytest.mark.parametrize("server", [OTHER, None])
async def test_a_router_with_wrong_keys_gets_nothing(bound, server):
    sub, endpoint = bound(server)
    async with dialling(endpoint, keys=THEM.dials(US)) as (_, seen):
        await eventually(lambda: len(seen.refused) > 1, "two attempts")
        assert seen.peers == []
    assert not sub.poll(0)


async def shake(reader, writer):
    """Make a client's handshake on a bare connection. Return its CURVE mechanism and all bytes that it has sent."""
    peer = Client(THEM.dials(US), SUB)
    said = HELLO + peer.start()
    writer.write(said)
    await reader.readexactly(len(HELLO))
    initiate = take(peer, await reader.readexactly(170))
    writer.write(initiate)
    head = await reader.readexactly(2)
    assert take(peer, head + await reader.readexactly(head[1])) == b""
    return peer, said + initiate


@both_loops
async def test_a_replayed_message_ends_its_connection():
    async with listening(US.accepts(THEM)) as (listener, seen), bare(listener.endpoint) as (reader, writer):
        peer, _ = await shake(reader, writer)
        subscribes = sealed(peer, encode_message([b"\1kv"]))
        writer.write(subscribes)
        await eventually(lambda: seen.topics == [("+", b"kv")], "the subscription")
        writer.write(subscribes)
        await eventually(lambda: seen.ends == [Reason.NONCE], "the end")
        assert await reader.read() == b""


@both_loops
async def test_the_replayed_bytes_of_a_connection_are_refused():
    async with listening(US.accepts(THEM), settings=HASTY) as (listener, seen):
        async with bare(listener.endpoint) as (reader, writer):
            peer, said = await shake(reader, writer)
            said += sealed(peer, encode_message([b"\1kv"]))
        await eventually(lambda: len(seen.ends) == 1, "the first one's end")
        async with bare(listener.endpoint, said):
            await eventually(lambda: seen.refused == [Reason.CURVE], "the refusal")
        assert len(seen.ends) == 1


@both_loops
async def test_a_peer_with_wrong_keys_stays_connected_until_the_handshake_timeout():
    """kvbus keeps the connection of a peer with wrong keys until the handshake timeout.

    If kvbus closed the connection immediately, libzmq would connect again ten times a second.
    """
    loop = asyncio.get_running_loop()
    forged = HELLO + Client(THEM.dials(OTHER), SUB).start()
    async with listening(US.accepts(THEM), settings=HASTY) as (listener, seen):
        before = loop.time()
        async with bare(listener.endpoint, forged + bytes(100_000)) as (reader, _):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == HELLO
            assert loop.time() - before >= HASTY.handshake_timeout
            await eventually(lambda: seen.refused == [Reason.CURVE], "the refusal")


@both_loops
async def test_waiting_peers_with_wrong_keys_do_not_keep_other_peers_out():
    settings = Settings(handshake_timeout=1000, max_half_open=2)
    forged = HELLO + Client(THEM.dials(OTHER), SUB).start()
    async with listening(US.accepts(THEM), settings=settings) as (listener, seen), contextlib.AsyncExitStack() as stack:
        for n in range(5):
            reader, _ = await stack.enter_async_context(bare(listener.endpoint, forged))
            assert await reader.readexactly(len(HELLO)) == HELLO
            await eventually(lambda n=n: len(seen.refused) == max(0, n - 1), "the oldest one's end")
        assert set(seen.refused) == {Reason.CURVE}
        assert listener.half_open == 2
        reader, writer = await stack.enter_async_context(bare(listener.endpoint))
        await shake(reader, writer)
        assert len(seen.peers) == 1


@both_loops
async def test_floods_of_bad_handshakes_do_not_keep_clients_out(dial):
    """kvbus serves clients with a valid key while other peers send many incomplete, forged and unencrypted handshakes."""
    settings = Settings(handshake_timeout=2.0, max_half_open=8)
    greeted = HELLO + Client(THEM.dials(US), SUB).start()
    forged = HELLO + Client(THEM.dials(OTHER), SUB).start()
    async with listening(US.accepts(THEM), settings=settings) as (listener, seen):
        sub = dial(zmq.SUB, listener.endpoint, SUBSCRIBE=b"", **THEM.as_client(US))
        await eventually(lambda: seen.topics, "the subscription")
        seen.refused.clear()  # on a busy machine the subscriber may need several attempts
        async with contextlib.AsyncExitStack() as stack:
            for n in range(60):
                data = (greeted, forged, hello(b"SUB"), HELLO, greeted + greeted[64:])[n % 5]
                await stack.enter_async_context(bare(listener.endpoint, data))
                seen.send(n.to_bytes(8, "big"))
                assert listener.half_open <= 8
            assert await received(sub, 60) == [[n.to_bytes(8, "big")] for n in range(60)]
            await eventually(lambda: len(seen.refused) == 60, "their ends")
        expected = {Reason.CURVE, Reason.MECHANISM, Reason.COMMAND, Reason.HANDSHAKE_TIMEOUT, Reason.HALF_OPEN}
        assert set(seen.refused) <= expected
        assert {Reason.CURVE, Reason.MECHANISM, Reason.COMMAND} <= set(seen.refused)
        assert seen.ends == []
        late = dial(zmq.SUB, listener.endpoint, SUBSCRIBE=b"", **THEM.as_client(US))
        await eventually(lambda: len(seen.topics) == 2, "one more")
        seen.send(b"you")
        assert await received(late, 1) == [[b"you"]]
