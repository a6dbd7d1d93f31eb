"""Tests for outputs with CURVE keys and kvbus's own implementation of ZMTP, which can send the state on subscription.

If a router's key is withdrawn, only the connection of that router ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest
import zmq

from kvbus.daemon.serve import Reloader
from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import eventually, running_bus
from tests.doubles.payloads import payload as batch
from tests.doubles.payloads import store
from tests.doubles.router import PlainSetRouter
from tests.ports import free_port
from tests.security.keys import Keyring, Pair, client_context, server_context


@pytest.fixture
def keys(tmp_path: Path) -> Keyring:
    return Keyring(tmp_path)


class Blocks:
    """A SUB socket that never requests a replay, and the blocks that it has received."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, *, bind: bool = False) -> None:
        self.context = context
        self.view = PlainSetRouter()
        self.seqs: list[int] = []
        self.socket = context.socket(zmq.SUB)
        self.socket.subscribe(b"")
        (self.socket.bind if bind else self.socket.connect)(endpoint)

    def count(self) -> int:
        with contextlib.suppress(zmq.Again):
            while True:
                _, seq, payload = self.socket.recv_multipart(zmq.NOBLOCK)
                self.seqs.append(int.from_bytes(seq, "big"))
                self.view.take(self.seqs[-1], payload)
        return len(self.view.blocks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close(0)
        self.context.term()


async def test_a_binding_router_with_curve_gets_the_state(keys: Keyring) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    output = {
        "endpoint": endpoint,
        "bind": False,
        "replay_endpoint": None,
        "curve_secret_key_file": str(keys.bus.secret_file),
        "curve_server_key_file": str(keys.router.public_file),
    }
    async with (
        running_bus(outputs=[output]) as bus,
        EnginePublisher(bus.engine, bus.engine_replay, bind=True) as engine,
    ):
        await engine.wait_for_subscriber(60)
        engine.publish(batch(store([1])))
        await eventually(lambda: bus.caught_up(0), "a batch relayed")
        with Blocks(server_context(keys.router), endpoint, bind=True) as router:
            await eventually(lambda: router.count() == 1, "the state")


async def test_withdrawing_a_key_ends_only_the_connections_of_this_key(keys: Keyring) -> None:
    keys.allow(keys.router, keys.stranger)
    async with (
        running_bus(output=keys.output) as bus,
        EnginePublisher(bus.engine, bus.engine_replay, bind=True) as engine,
    ):
        await engine.wait_for_subscriber(60)
        engine.publish(batch(store([1])))
        stats = bus.daemon.outputs.stats[0]
        with (
            Blocks(client_context(keys.router, keys.bus), bus.out) as stays,
            Blocks(client_context(keys.stranger, keys.bus), bus.out) as goes,
            requester(keys.router, keys.bus, bus.out_replay) as asks,
            requester(keys.stranger, keys.bus, bus.out_replay) as asked,
        ):
            await eventually(lambda: stays.count() == goes.count() == 1, "the state for both")
            for dealer in (asks, asked):
                dealer.send_multipart([b"", bytes(8)])
                await eventually(lambda dealer=dealer: dealer.poll(0), "an answer")
            broken = asks.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            with contextlib.closing(broken):
                keys.allow(keys.router)
                Reloader(bus.daemon, lambda: bus.daemon.config).reload()
                await eventually(lambda: stats.router_disconnects["revoked"] == 1, "its end")
                await eventually(lambda: stats.refused["unknown_key"] > 1, "its attempts, at both endpoints")
                engine.publish(batch(store([2])))
                await eventually(lambda: stays.count() == 2, "the live batch")
                assert +stats.router_disconnects == {"revoked": 1}
                assert stays.seqs == sorted(set(stays.seqs))
                assert not broken.poll(0)
                assert goes.count() == 1
                asks.disable_monitor()


@contextlib.contextmanager
def requester(pair: Pair, server: Pair, endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    context = client_context(pair, server)
    dealer = context.socket(zmq.DEALER)
    dealer.connect(endpoint)
    try:
        yield dealer
    finally:
        dealer.close(0)
        context.term()
