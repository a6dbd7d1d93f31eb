"""Tests for live streams of engines on other ZeroMQ libraries than libzmq, to which kvbus connects with its own ZMTP."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from kvbus.core.types import Refused
from kvbus.transport.curve import Curve, generate
from kvbus.transport.sockets import PeerPolicy
from tests.doubles.bus import eventually
from tests.ports import free_port
from tests.transport.loops import u64
from tests.transport.test_dialled import FRAME, PLAIN, Stream, dialled

from .test_zmtp_peers import HEARTBEAT, SILENCE, with_keys

if TYPE_CHECKING:
    from .zmtp_peers import ForeignPeer, Library

pytestmark = [pytest.mark.zmtp_peers, pytest.mark.timeout(SILENCE + 300)]

SIZES = (0, 1, 254, 255, 256, 5_000, 60_000)


async def first_batch(peer: ForeignPeer, stream: Stream) -> int:
    """Let the publisher send until a batch arrives, because its subscription takes effect some time after the handshake.

    Return the number of batches that arrived.
    """

    def arrives() -> bool:
        peer.publish(b"", b"first", b"x")
        return stream.seen[-1:] == [[b"", b"first", b"x"]]

    await eventually(arrives, "a first batch")
    peer.publish(b"", b"marker", b"x")
    await eventually(lambda: stream.seen[-1] == [b"", b"marker", b"x"], "the end of these batches")
    return len(stream.batches)


async def read_all(peer: ForeignPeer, stream: Stream, count: int = 500) -> None:
    """Let the publisher send batches, and check that each one arrives unchanged and in order."""
    begin = await first_batch(peer, stream)
    sent = [[b"kv@engine", u64(n), bytes(SIZES[n % len(SIZES)])] for n in range(count)]
    for frames in sent:
        peer.publish(*frames)
    await eventually(lambda: len(stream.batches) == begin + count, "every batch")
    assert stream.batches[begin:] == sent


async def test_kvbus_reads_every_batch_of_a_foreign_publisher_also_after_its_restart(library: Library) -> None:
    async with dialled(f"tcp://127.0.0.1:{free_port()}") as stream:
        for life in range(2):
            async with library.publisher(stream.endpoint) as peer:
                await read_all(peer, stream)
            await eventually(lambda life=life: len(stream.ups) == 2 * (life + 1), "the publisher's end")
        assert stream.ups == [True, False] * 2
        assert set(stream.refused) <= {Refused.CLOSED}  # the publisher's end may break a handshake


@pytest.mark.slow
async def test_a_foreign_publisher_keeps_its_connection_during_silence(library: Library) -> None:
    """JeroMQ also sends heartbeats, which kvbus answers."""
    options = [HEARTBEAT] if library.name == "jeromq" else []
    stream_endpoint = f"tcp://127.0.0.1:{free_port()}"
    async with dialled(stream_endpoint) as stream, library.publisher(stream_endpoint, *options) as peer:
        begin = await first_batch(peer, stream)
        await asyncio.sleep(SILENCE)
        peer.publish(b"", b"last", b"x")
        await eventually(lambda: len(stream.batches) == begin + 1, "a batch after the silence")
        assert stream.ups == [True]


@with_keys
async def test_kvbus_reads_an_encrypted_stream_of_a_foreign_publisher(library: Library) -> None:
    engine, ours = generate(), generate()
    policy = PeerPolicy(FRAME, Curve(*ours, server=engine[0]))
    server = f"curve-server={engine[0].decode()},{engine[1].decode()}"
    where = f"tcp://127.0.0.1:{free_port()}"
    async with dialled(where, policy) as stream, library.publisher(where, server, HEARTBEAT) as peer:
        await read_all(peer, stream)


@with_keys
async def test_kvbus_names_another_mechanism_of_a_foreign_publisher(library: Library) -> None:
    engine = generate()
    server = f"curve-server={engine[0].decode()},{engine[1].decode()}"
    async with dialled(f"tcp://127.0.0.1:{free_port()}", PLAIN) as stream, library.publisher(stream.endpoint, server):
        await eventually(lambda: stream.refused, "the refusal")
        assert set(stream.refused) <= {Refused.MECHANISM, Refused.CLOSED}
        assert stream.seen == []
