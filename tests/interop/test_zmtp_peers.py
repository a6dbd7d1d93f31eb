"""Tests for kvbus's own implementation of ZMTP with peers on JeroMQ (Java) and on Rust's ``zeromq``.

The engine uses libzmq.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import pytest
import zmq

from kvbus.core.stats import OutputStats
from kvbus.daemon.serve import Reloader
from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import Bus, eventually, running_bus
from tests.doubles.engine import Engine
from tests.doubles.link import Link
from tests.doubles.socket_routers import END
from tests.ports import free_port, free_ports
from tests.security.keys import Keyring, Pair, client_context

from .go_peers import SECONDS_ENV

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from .zmtp_peers import ForeignPeer, Library

log = logging.getLogger(__name__)

SILENCE: Final = float(os.environ.get(SECONDS_ENV, "4"))
STALL: Final = float(os.environ.get("TEST_INTEROP_STALL", min(SILENCE, 20.0)))
PACE: Final = 0.05
"""Seconds between two batches while a peer does not read."""

HEARTBEAT: Final = "heartbeat=300"
"""JeroMQ's option for the time between two PINGs: 300 milliseconds.

JeroMQ waits three seconds for the answer, even on a busy machine.
"""

TOPIC: Final = "kv@engine@m"

pytestmark = [pytest.mark.zmtp_peers, pytest.mark.timeout(SILENCE + STALL + 300)]


@asynccontextmanager
async def circuit(*, batches: int = 200, blocks: int = 600, **settings: Any) -> AsyncIterator[tuple[Bus, Engine]]:
    """Run a bus and an engine that has published ``batches`` batches."""
    output = {"topic": "kv@{source}@m", **settings.pop("output", {})}
    async with (
        running_bus(output=output, **settings) as bus,
        EnginePublisher(bus.engine, bus.engine_replay, bind=True) as publisher,
    ):
        engine = Engine(publisher, blocks=blocks)
        await eventually(lambda: bus.source.state == "live", "the bus in sync with an engine that is new")
        await relay(bus, engine, batches)
        yield bus, engine


async def relay(bus: Bus, engine: Engine, count: int) -> None:
    """Publish ``count`` batches of the engine, no faster than the bus reads them."""
    for _ in range(0, count, 50):
        await engine.publish(min(count, 50))
        await eventually(lambda: bus.caught_up(engine.publisher.next_seq - 1), "what was published")


async def wait_until_exact(bus: Bus, engine: Engine, *peers: ForeignPeer, output: int = 0) -> None:
    """Wait until each peer holds exactly the engine's blocks and has received every batch of the output."""
    truth = engine.settle()
    await eventually(lambda: bus.caught_up(engine.publisher.next_seq - 1), "every batch relayed")
    stream = bus.daemon.relay.outputs[output].streams[0]
    for peer in peers:
        await eventually(
            lambda peer=peer: peer.messages and peer.seqs[-1] == stream.next_seq - 1, f"{peer.child.name} up to date"
        )
        assert set(peer.view.blocks) == truth
        assert peer.view.violations == []


def has_consecutive_seqs(peer: ForeignPeer) -> bool:
    """Return whether the peer has received batches with consecutive seqs, without a gap or repetition."""
    seqs = peer.seqs
    return seqs == list(range(seqs[0], seqs[0] + len(seqs)))


def curve(client: Pair, server: Pair) -> str:
    """Return the command-line option that gives JeroMQ the keys of a CURVE client."""
    return f"curve={server.public.decode()},{client.public.decode()},{client.secret.decode()}"


def refusals(stats: OutputStats) -> set[str]:
    """Return the reasons for which kvbus refused handshakes.

    Do not return the reasons for handshakes that JeroMQ breaks off or does not begin.
    """
    return {reason for reason, count in stats.refused.items() if count} - {"left", "broken", "handshake_timeout"}


def stats_of(bus: Bus) -> OutputStats:
    return bus.daemon.outputs.stats[0]


async def subscribers(bus: Bus, count: int) -> None:
    await eventually(lambda: stats_of(bus).subscribers == count, f"{count} subscribers")


async def test_a_foreign_subscriber_gets_the_state_and_then_every_batch(library: Library) -> None:
    """The peer gets the same bytes as a SUB of libzmq.

    A second peer joins late. A third peer, which subscribes to another topic, gets nothing.
    """
    async with AsyncExitStack() as stack:
        bus, engine = await stack.enter_async_context(circuit(batches=2000, blocks=5000))
        first = await stack.enter_async_context(library.subscriber(bus.out, TOPIC))
        other = await stack.enter_async_context(library.subscriber(bus.out, "kv@other"))
        context: zmq.Context[zmq.Socket[bytes]] = stack.enter_context(zmq.Context())
        beside = stack.enter_context(context.socket(zmq.SUB))
        beside.setsockopt(zmq.RCVHWM, 0)
        beside.subscribe(TOPIC)
        beside.connect(bus.out)
        await subscribers(bus, 3)
        await wait_until_exact(bus, engine, first)
        assert first.view.clears == 1
        begin = len(first.messages)
        await relay(bus, engine, 500)
        late = await stack.enter_async_context(library.subscriber(bus.out, TOPIC))
        await subscribers(bus, 4)
        await relay(bus, engine, 100)
        await wait_until_exact(bus, engine, first, late)
        assert (has_consecutive_seqs(first), has_consecutive_seqs(late)) == (True, True)
        assert (first.view.clears, late.view.clears) == (1, 1)
        live = first.messages[begin:]
        assert len(live) >= 600
        there: list[list[bytes]] = []

        def read() -> bool:
            while beside.poll(0):
                there.append(beside.recv_multipart())
            return there[-1:] == live[-1:]

        await eventually(read, "the same at libzmq")
        assert there[-len(live) :] == live
        assert other.messages == []
        assert +stats_of(bus).router_disconnects == {}


@pytest.mark.parametrize("how", ["connect", "bind"])
async def test_a_foreign_subscriber_reconnects_after_a_cut_and_a_restart_of_kvbus(
    library: Library, how: str, tmp_path: Path
) -> None:
    """The peer connects again after the network has closed its connection, and after kvbus has restarted."""
    bound, between, *others = free_ports(5)
    there, way, source, replay, answers = (f"tcp://127.0.0.1:{port}" for port in (bound, between, *others))
    link = Link("router", between, bound)
    output = {"endpoint": way, "bind": False, "replay_endpoint": None}
    settings: dict[str, Any] = {
        "source": {"endpoint": source, "replay_endpoint": replay},
        "output": output if how == "bind" else {"endpoint": there, "replay_endpoint": answers},
        "state_dir": str(tmp_path / "state"),
    }
    async with (
        EnginePublisher(source, replay, bind=True) as publisher,
        library.subscriber(there if how == "bind" else way, how=how) as peer,
    ):
        engine = Engine(publisher)
        # The link is open only while kvbus runs, because Rust's zeromq does not dial again after a broken handshake.
        async with running_bus(**settings) as bus, link:
            await subscribers(bus, 1)
            await relay(bus, engine, 200)
            await wait_until_exact(bus, engine, peer)
            for end in range(1, 4):
                assert link.cut(reset=False) == 1
                await relay(bus, engine, 50)
                await eventually(lambda end=end: stats_of(bus).states_sent["subscribed"] == 1 + end, "another state")
                await wait_until_exact(bus, engine, peer)
            await peer.count("disconnected", 3)  # some libraries report this from another thread
        await engine.publish(50)
        async with running_bus(**settings) as bus, link:
            await subscribers(bus, 1)
            await relay(bus, engine, 50)
            await wait_until_exact(bus, engine, peer)
        assert peer.seqs == sorted(set(peer.seqs))


@pytest.mark.slow
async def test_a_foreign_peer_keeps_its_connection_during_silence(library: Library, tmp_path: Path) -> None:
    """No connection ends while nothing is sent.

    One peer connects to kvbus, kvbus connects to a second one, and a third one requests a replay.

    JeroMQ also sends heartbeats, with and without CURVE.
    """
    keys = Keyring(tmp_path)
    ends = [f"tcp://127.0.0.1:{free_port()}" for _ in range(4)]
    outputs: list[dict[str, Any]] = [
        {"name": "listens", "endpoint": ends[0], "replay_endpoint": ends[3], "heartbeat": 0},
        {"name": "dials", "endpoint": ends[1], "heartbeat": 0, "bind": False},
        {"name": "keys", "endpoint": ends[2], "heartbeat": 0, **keys.output},
    ]
    kinds: list[tuple[int, str, tuple[str, ...]]] = [(0, "connect", ()), (1, "bind", ())]
    if library.name == "jeromq":
        kinds += [(0, "connect", (HEARTBEAT,)), (2, "connect", (HEARTBEAT, curve(keys.router, keys.bus)))]
    async with AsyncExitStack() as stack:
        peers = [
            await stack.enter_async_context(library.subscriber(ends[output], "", *options, how=how))
            for output, how, options in kinds
        ]
        bus, engine = await stack.enter_async_context(circuit(outputs=outputs))

        async def all_exact() -> None:
            for (output, _, _), peer in zip(kinds, peers, strict=True):
                await wait_until_exact(bus, engine, peer, output=output)

        expected = Counter(output for output, _, _ in kinds)
        all_stats = bus.daemon.outputs.stats
        await eventually(lambda: all(all_stats[at].subscribers == n for at, n in expected.items()), "the subscribers")
        await all_exact()
        options = [HEARTBEAT] if library.name == "jeromq" else []
        requester = await stack.enter_async_context(library.requester(ends[3], b"", bytes(8), options=options))
        await eventually(lambda: requester.messages and END in requester.messages[-1], "an answer")
        every = [*peers, requester]
        given = [(len(peer.messages), peer.said["disconnected"]) for peer in every]
        await asyncio.sleep(SILENCE)
        assert given == [(len(peer.messages), peer.said["disconnected"]) for peer in every]
        await relay(bus, engine, 1)
        await all_exact()
        assert [(+stats.router_disconnects, refusals(stats)) for stats in all_stats] == [({}, set())] * 3
        assert [has_consecutive_seqs(peer) for peer in peers] == [True] * len(peers)


@pytest.mark.slow
@pytest.mark.parametrize("library", ["libzmq", "jeromq", "zeromq-rs"], indirect=True)
async def test_a_stalled_foreign_subscriber_is_exact_when_it_reads_again(library: Library) -> None:
    async with circuit(output={"send_hwm": 50}) as (bus, engine), library.subscriber(bus.out) as peer:
        await subscribers(bus, 1)
        await wait_until_exact(bus, engine, peer)
        loop = asyncio.get_running_loop()
        begin = loop.time()
        peer.child.send(signal.SIGSTOP)
        while stats_of(bus).dropped_batches["slow_router"] < 500:
            await relay(bus, engine, 100)
        while loop.time() < begin + STALL:
            await relay(bus, engine, 1)
            await asyncio.sleep(PACE)
        assert peer.child.state() == "T"
        dropped = stats_of(bus).dropped_batches["slow_router"]
        peer.child.send(signal.SIGCONT)
        begin = loop.time()
        await eventually(lambda: stats_of(bus).states_sent["lost"] == 1, "its state")
        sent = loop.time() - begin
        await wait_until_exact(bus, engine, peer)  # the peer must first read megabytes, and this process too
        figures = (library.name, STALL, dropped, sent, loop.time() - begin)
        log.info("%s: stalled for %g s, %d batches dropped; state sent after %.2f s, exact after %.2f s", *figures)
        await relay(bus, engine, 100)
        await wait_until_exact(bus, engine, peer)
        assert +stats_of(bus).states_sent == {"subscribed": 1, "lost": 1}
        assert +stats_of(bus).router_disconnects == {}


def answer(
    endpoint: str,
    frames: list[bytes],
    count: int | None = None,
    make_context: Callable[[], zmq.Context[zmq.Socket[bytes]]] = zmq.Context,
) -> list[list[bytes]]:
    """Send a request from libzmq's DEALER, and return the answer: ``count`` messages, or all messages up to END."""
    with make_context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(endpoint)
        dealer.send_multipart(frames)
        found: list[list[bytes]] = []
        while len(found) != count and not (found and END in found[-1]):
            assert dealer.poll(60_000)
            found.append(dealer.recv_multipart())
        return found


@pytest.mark.parametrize("profile", ["vllm", "sglang"])
async def test_a_foreign_requester_gets_the_same_replay_answers_as_libzmq(library: Library, profile: str) -> None:
    output = {"journal_batches": 100, "profile": profile}
    async with circuit(output=output, batches=1000) as (bus, _):
        newest = bus.daemon.relay.outputs[0].streams[0].next_seq - 1
        wanted = [[b"", (newest - past).to_bytes(8, "big")] for past in (newest, 50, 0, -1)]
        wanted += [wanted[1][1:], [b"", b"nothing"]]
        for frames in wanted:
            expected = await asyncio.to_thread(answer, bus.out_replay, frames)
            async with library.requester(bus.out_replay, *frames) as peer:
                await peer.count("message", len(expected))
                assert peer.messages == expected
            if frames[0] == b"":  # a REQ sends the delimiter itself, and reads one message
                async with library.requester(bus.out_replay, *frames[1:], how="req") as peer:
                    await peer.count("message")
                    assert peer.messages == [expected[0][1:]]
        assert refusals(stats_of(bus)) == set()


async def test_a_foreign_requester_gets_the_same_snapshots_as_libzmq(library: Library) -> None:
    snapshots = f"tcp://127.0.0.1:{free_port()}"
    async with circuit(output={"snapshot_endpoint": snapshots}) as (_, _):
        (expected,) = await asyncio.to_thread(answer, snapshots, [b"snapshot"], 1)
        for how in ("dealer", "req"):
            async with library.requester(snapshots, b"snapshot", how=how) as peer:
                await peer.count("message")
                (found,) = peer.messages
                assert found[1:] == expected[1:]
                assert len(found) > 2


with_keys = pytest.mark.parametrize("library", ["jeromq"], indirect=True)  # Rust's zeromq has no CURVE


@with_keys
async def test_a_foreign_subscriber_with_an_allowed_curve_key_is_exact(library: Library, tmp_path: Path) -> None:
    keys = Keyring(tmp_path)
    right = curve(keys.router, keys.bus)
    async with (
        circuit(output=keys.output, batches=2000, blocks=5000) as (bus, engine),
        library.subscriber(bus.out, TOPIC, right) as peer,
    ):
        await subscribers(bus, 1)
        await relay(bus, engine, 200)
        await wait_until_exact(bus, engine, peer)
        async with library.subscriber(bus.out, TOPIC, right, HEARTBEAT) as late:
            await subscribers(bus, 2)
            await relay(bus, engine, 200)
            await wait_until_exact(bus, engine, peer, late)
            assert has_consecutive_seqs(late)
        assert has_consecutive_seqs(peer)
        frames = [b"", bytes(8)]
        expected = await asyncio.to_thread(
            answer, bus.out_replay, frames, make_context=lambda: client_context(keys.router, keys.bus)
        )
        assert len(expected) > 400
        async with library.requester(bus.out_replay, *frames, options=[right]) as requester:
            await requester.count("message", len(expected))
            assert requester.messages == expected
        assert refusals(stats_of(bus)) == set()


@with_keys
@pytest.mark.slow
async def test_kvbus_refuses_and_counts_foreign_peers_with_wrong_curve_keys(library: Library, tmp_path: Path) -> None:
    """kvbus refuses and counts peers with wrong keys.

    It accepts a key that is later added to the allow-list, without a restart.
    """
    keys = Keyring(tmp_path)
    stranger, wrong = curve(keys.stranger, keys.bus), curve(keys.router, keys.engine)
    async with (
        circuit(output=keys.output) as (bus, engine),
        library.subscriber(bus.out, TOPIC, wrong) as mistaken,
        library.requester(bus.out_replay, b"", bytes(8), options=[stranger]) as requester,
        library.subscriber(bus.out, TOPIC, stranger) as later,
    ):
        refused = stats_of(bus).refused
        await eventually(
            lambda: refused["unknown_key"] >= 4 and refused["curve"], "two attempts of each stranger, one of the other"
        )
        assert mistaken.messages == later.messages == requester.messages == []
        keys.allow(keys.router, keys.stranger)
        Reloader(bus.daemon, lambda: bus.daemon.config).reload()
        await subscribers(bus, 1)
        await relay(bus, engine, 100)
        await wait_until_exact(bus, engine, later)
        assert has_consecutive_seqs(later)
        keys.allow(keys.router)
        Reloader(bus.daemon, lambda: bus.daemon.config).reload()
        await subscribers(bus, 0)
        assert +stats_of(bus).router_disconnects == {"revoked": 1}
        assert refusals(stats_of(bus)) == {"unknown_key", "curve"}
        assert mistaken.messages == []


@with_keys
async def test_kvbus_connects_to_a_foreign_subscriber_with_curve(library: Library, tmp_path: Path) -> None:
    keys = Keyring(tmp_path)
    bound = f"tcp://127.0.0.1:{free_port()}"
    output = {
        "endpoint": bound,
        "bind": False,
        "replay_endpoint": None,
        "curve_secret_key_file": str(keys.bus.secret_file),
        "curve_server_key_file": str(keys.router.public_file),
    }
    server = f"curve-server={keys.router.public.decode()},{keys.router.secret.decode()}"
    async with circuit(output=output) as (bus, engine), library.subscriber(bound, TOPIC, server, how="bind") as peer:
        await subscribers(bus, 1)
        await relay(bus, engine, 200)
        await wait_until_exact(bus, engine, peer)
        assert has_consecutive_seqs(peer)


async def test_kvbus_refuses_a_foreign_subscriber_without_required_curve_keys(library: Library, tmp_path: Path) -> None:
    async with circuit(output=Keyring(tmp_path).output) as (bus, _), library.subscriber(bus.out) as peer:
        await eventually(lambda: stats_of(bus).refused["mechanism"] >= 1, "its attempt")
        assert peer.messages == []
