"""Tests for CURVE at a running bus: accepted and refused peers, the counts of refusals, and withdrawn keys."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from itertools import count
from typing import Any, Self

import pytest
import zmq

from kvbus.client import BlockView, Subscriber, Synced
from kvbus.core.outputs.snapshot import REQUEST
from kvbus.core.types import Refused
from kvbus.daemon.serve import Reloader
from kvbus.transport.engine.publisher import EnginePublisher
from kvbus.transport.zmtp.reasons import Reason
from tests.doubles.bus import Bus, eventually, running_bus
from tests.doubles.payloads import payload as batch
from tests.doubles.payloads import store
from tests.doubles.socket_routers import RouterOnASet
from tests.ports import free_port, free_ports
from tests.security.keys import Keyring, client_context, server_context
from tests.typed import there


@pytest.fixture
def keys(tmp_path):
    return Keyring(tmp_path)


@contextlib.asynccontextmanager
async def bus_and_engine(keys: Keyring, **settings: Any) -> AsyncIterator[tuple[Bus, EnginePublisher]]:
    """Yield a bus whose output requires CURVE, and an engine that has published three batches with a block each.

    The bus has relayed these batches.
    """
    output = settings.pop("output", {}) | keys.output
    async with (
        running_bus(output=output, key_reload_interval=0, **settings) as bus,
        EnginePublisher(bus.engine, bus.engine_replay, bind=True) as engine,
    ):
        await engine.wait_for_subscriber(60)
        for n in range(3):
            engine.publish(batch(store([n + 1])))
        await eventually(lambda: bus.caught_up(2), "three batches relayed")
        yield bus, engine


class Router(RouterOnASet):
    """A router on real sockets, with or without CURVE keys."""

    def __init__(self, bus: Bus, context: zmq.Context[zmq.Socket[bytes]] | None = None) -> None:
        super().__init__(bus.out, bus.out_replay, context)
        self.bus = bus

    def __enter__(self) -> Self:
        self.subscribe()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def subscribed(bus: Bus, *routers: Router) -> int:
    """Return the number of routers that are subscribed to the output.

    The function reads the routers' sockets first, because after a reconnection libzmq sends a subscription again only
    if its socket is used.
    """
    for router in routers:
        router.read()
    return bus.daemon.outputs.stats[0].subscribers


def refused(bus: Bus) -> dict[str, int]:
    return {str(reason): count for reason, count in bus.daemon.outputs.stats[0].refused.items() if count}


async def test_a_router_with_a_listed_key_gets_live_stream_and_replay(keys):
    async with bus_and_engine(keys) as (bus, engine):
        with Router(bus, client_context(keys.router, keys.bus)) as router:
            await eventually(lambda: bus.daemon.outputs.stats[0].subscribers, "the subscription")
            assert await router.replay() == [0, 1, 2]
            engine.publish(batch(store([4])))
            await eventually(lambda: router.read() == 4, "the live batch")
            assert len(router.view.blocks) == 4
        assert refused(bus) == {}


async def asks_in_vain(router: Router, bus: Bus, reason: Refused, *also: Reason) -> None:
    """Check that kvbus refuses a router's subscription and its replay request, and counts both refusals with a reason.

    If the keys of router and kvbus do not match, only the side that checks first knows the reason. The other side only
    sees that its connection ends.
    """
    dealer = router.context.socket(zmq.DEALER)
    dealer.connect(bus.out_replay)
    dealer.send_multipart([b"", bytes(8)])
    try:
        await eventually(lambda: sum(refused(bus).values()) >= 2, "two refusals")
        assert set(refused(bus)) <= {reason, Refused.CLOSED, *also}
        assert bus.daemon.outputs.stats[0].subscribers == 0
        assert not dealer.poll(0)
        assert router.read() == 0
    finally:
        dealer.close(0)


async def test_a_router_with_an_unlisted_key_gets_nothing(keys):
    async with bus_and_engine(keys) as (bus, engine):
        with Router(bus, client_context(keys.stranger, keys.bus)) as router:
            await asks_in_vain(router, bus, Refused.KEY)
            engine.publish(batch(store([4])))
            await eventually(lambda: bus.caught_up(3), "the batch relayed")
            assert router.read() == 0


@pytest.mark.parametrize(
    ("client", "server", "reasons"),
    [
        ("", "", [Refused.MECHANISM]),
        ("router", "stranger", [Refused.PROTOCOL, Reason.CURVE]),
    ],
    ids=["no key", "the wrong server key"],
)
async def test_a_router_with_wrong_or_no_keys_is_refused(keys, client, server, reasons):
    async with bus_and_engine(keys) as (bus, _):
        context = client_context(getattr(keys, client), getattr(keys, server)) if client else None
        with Router(bus, context) as router:
            await asks_in_vain(router, bus, *reasons)


async def test_an_empty_allow_list_refuses_every_router(keys):
    keys.allow()
    async with bus_and_engine(keys) as (bus, _):
        with Router(bus, client_context(keys.router, keys.bus)) as router:
            await asks_in_vain(router, bus, Refused.KEY)


async def test_a_curve_router_at_a_plain_output_is_counted(keys):
    async with running_bus() as bus:
        with Router(bus, client_context(keys.router, keys.bus)):
            await eventually(lambda: refused(bus), "the mismatch")
            # Only the side that checks first knows the reason, so either reason is right.
            assert set(refused(bus)) <= {Refused.MECHANISM, Refused.CLOSED}


async def test_each_output_uses_only_its_own_allow_list(keys, tmp_path):
    """A router whose key is only on the list of one output cannot read the other output."""
    ports = free_ports(2)
    other = tmp_path / "others.keys"
    other.write_text(keys.stranger.public.decode())
    outputs = [
        {"name": "a", "endpoint": f"tcp://127.0.0.1:{ports[0]}", **keys.output},
        {"name": "b", "endpoint": f"tcp://127.0.0.1:{ports[1]}", **keys.output, "curve_client_keys": str(other)},
    ]
    async with running_bus(outputs=outputs) as bus:
        context = client_context(keys.stranger, keys.bus)
        sub = context.socket(zmq.SUB)
        try:
            sub.setsockopt(zmq.SUBSCRIBE, b"")
            sub.connect(outputs[0]["endpoint"])
            first, second = bus.daemon.outputs.stats
            await eventually(lambda: first.refused[Refused.KEY], "refused by the first")
            sub.connect(outputs[1]["endpoint"])
            await eventually(lambda: second.subscribers == 1, "let in by the second")
            assert first.subscribers == 0
        finally:
            sub.close(0)
            context.term()


async def test_a_snapshot_endpoint_requires_a_listed_key(keys):
    snapshot = f"tcp://127.0.0.1:{free_port()}"
    async with bus_and_engine(keys, output={"snapshot_endpoint": snapshot}) as (bus, _):
        for pair, answered in ((keys.stranger, False), (keys.router, True)):
            context = client_context(pair, keys.bus)
            dealer = context.socket(zmq.DEALER)
            try:
                dealer.connect(snapshot)
                dealer.send_multipart([REQUEST])
                if answered:
                    await eventually(lambda dealer=dealer: dealer.poll(0), "the snapshot")
                else:
                    await eventually(lambda: refused(bus).get(Refused.KEY), "the refusal")
                    assert not dealer.poll(0)
            finally:
                dealer.close(0)
                context.term()


async def test_the_client_library_reads_an_output_with_keys(keys):
    async with bus_and_engine(keys) as (bus, _):
        view = BlockView()
        async with Subscriber(bus.out, bus.out_replay, curve=keys.router.towards(keys.bus)) as subscriber:
            async with asyncio.timeout(60):
                async for update in subscriber:
                    view.update(update)
                    if isinstance(update, Synced):
                        break
        assert len(view) == 3
    with pytest.raises(ValueError, match="cannot check the key of a publisher that connects"):
        Subscriber(bus.out, bind=True, curve=keys.router.towards(keys.bus))


# -- keys that change


async def test_a_refused_router_is_accepted_after_its_key_is_added(keys):
    """A reload of the allow-list is enough: no process restarts, and other routers stay connected."""
    async with bus_and_engine(keys) as (bus, engine):
        reloader = Reloader(bus.daemon, lambda: bus.daemon.config)
        with (
            Router(bus, client_context(keys.router, keys.bus)) as router,
            Router(bus, client_context(keys.stranger, keys.bus)) as late,
        ):
            stats = bus.daemon.outputs.stats[0]
            await eventually(lambda: stats.subscribers == 1 and stats.refused[Refused.KEY], "one in, one out")
            keys.allow(keys.router, keys.stranger)
            reloader.reload()
            await eventually(lambda: subscribed(bus, late) == 2, "both in")
            engine.publish(batch(store([4])))
            await eventually(lambda: router.read() == late.read() == 4, "the live batch for both")
            assert bus.daemon.process.config_reloads == {"applied": 1}


async def test_a_reload_replaces_the_key_pair_of_kvbus(keys):
    """kvbus reloads its own key pair: it then accepts routers that know the new public key, and no longer the old
    one.
    """
    async with bus_and_engine(keys) as (bus, _):
        reloader = Reloader(bus.daemon, lambda: bus.daemon.config)
        stats = bus.daemon.outputs.stats[0]
        keys.bus.secret_file.write_text(keys.engine.secret_file.read_text())
        reloader.reload()
        await eventually(lambda: bus.daemon.process.config_reloads["applied"], "the reload")
        with Router(bus, client_context(keys.router, keys.engine)) as router:
            assert await router.replay() == [0, 1, 2]
        with Router(bus, client_context(keys.router, keys.bus)):
            await eventually(
                lambda: stats.refused[Refused.PROTOCOL] or stats.refused[Reason.CURVE], "the old key refused"
            )


async def test_changed_key_files_are_reloaded_without_a_signal(keys):
    async with running_bus(output=keys.output, key_reload_interval=0.05) as bus:
        reloader = Reloader(bus.daemon, lambda: bus.daemon.config)
        reloader.watch()
        try:
            with Router(bus, client_context(keys.stranger, keys.bus)) as router:
                stats, process = bus.daemon.outputs.stats[0], bus.daemon.process
                await eventually(lambda: stats.refused[Refused.KEY], "refused")
                bad = keys.allowed.with_name("bad")
                bad.write_text("no key at all")
                bad.rename(keys.allowed)  # a rename, because a file that is empty for a moment would be a valid list
                await eventually(lambda: process.key_reloads["refused"], "the bad file seen")
                assert stats.subscribers == 0
                keys.allow(keys.router, keys.stranger)
                await eventually(lambda: subscribed(bus, router) == 1, "let in")
                assert process.key_reloads == {"refused": 1, "applied": 1}
        finally:
            reloader.close()


async def test_a_bad_key_file_changes_nothing(keys, caplog):
    async with bus_and_engine(keys) as (bus, _):
        reloader = Reloader(bus.daemon, lambda: bus.daemon.config)
        keys.bus.secret_file.chmod(0o644)
        reloader.reload()
        await eventually(lambda: bus.daemon.process.key_reloads["refused"], "the refusal")
        assert "outputs[0].curve_secret_key_file" in caplog.text
        assert "other users can read it (mode 0644)" in caplog.text
        with Router(bus, client_context(keys.router, keys.bus)) as router:
            assert await router.replay() == [0, 1, 2]


# -- engines with CURVE


@contextlib.asynccontextmanager
async def curve_engine(
    live: str, replay: str, context: zmq.Context[Any], *, bind: bool
) -> AsyncIterator[EnginePublisher]:
    try:
        async with EnginePublisher(live, replay, bind=bind, context=context) as engine:
            yield engine
    finally:
        context.term()


async def test_kvbus_reads_an_engine_that_requires_curve(keys):
    async with (
        running_bus(source=keys.source) as bus,
        curve_engine(bus.engine, bus.engine_replay, server_context(keys.engine), bind=True) as engine,
    ):
        await engine.wait_for_subscriber(60)
        engine.publish(batch(store([1])))
        await eventually(lambda: bus.caught_up(0), "the first batch, by the stream or by the first replay")
        for n in (1, 2):
            engine.publish(batch(store([n + 1])), live=n != 1)
        await eventually(lambda: bus.caught_up(2), "a live batch, and the lost one by the replay")
        assert bus.source.stats.recovered == 1


async def test_batches_of_an_engine_with_another_key_are_not_read(keys):
    async with (
        running_bus(source=keys.source) as bus,
        curve_engine(bus.engine, bus.engine_replay, server_context(keys.stranger), bind=True) as engine,
    ):
        await eventually(lambda: sum(bus.source.stats.refused.values()), "the failed handshake")
        engine.publish(batch(store([1])))
        assert bus.source.stats.batches == 0
        assert bus.source.state == "connecting"


async def test_batches_of_an_engine_without_curve_are_not_read(keys):
    async with (
        running_bus(source=keys.source) as bus,
        EnginePublisher(bus.engine, bus.engine_replay, bind=True) as engine,
    ):
        await eventually(lambda: bus.source.stats.refused[Refused.MECHANISM], "the mismatch")
        engine.publish(batch(store([1])))
        assert bus.source.stats.batches == 0


async def test_kvbus_connects_to_an_engine_that_gets_its_keys_later(keys):
    """After some refusals, libzmq never connects to an endpoint again. kvbus replaces its socket and connects again."""
    async with running_bus(source=keys.source) as bus:
        async with EnginePublisher(bus.engine, bus.engine_replay, bind=True):
            await eventually(lambda: bus.source.stats.refused[Refused.MECHANISM], "the mismatch")
        context, found = server_context(keys.engine), []
        engine = EnginePublisher(bus.engine, bus.engine_replay, bind=True, context=context)

        def started() -> bool:
            with contextlib.suppress(Exception):
                engine.start()
                found.append(True)
            return bool(found)

        try:
            await eventually(started, "the address free again")
            await engine.wait_for_subscriber(60)
            engine.publish(batch(store([1])))
            await eventually(lambda: bus.caught_up(0), "the batch")
        finally:
            engine.close()
            context.term()


@pytest.mark.parametrize("allowed", [True, False])
async def test_an_engine_that_connects_to_kvbus_needs_a_listed_key(keys, tmp_path, allowed):
    """The engine connects to kvbus: on the live stream kvbus is the CURVE server, and for replays it is the CURVE
    client.
    """
    engines = tmp_path / "engines.keys"
    engines.write_text((keys.engine if allowed else keys.stranger).public.decode())
    source = {**keys.source, "curve_client_keys": str(engines), "replay_endpoint": None}
    source.pop("curve_server_key_file")
    async with running_bus(bind=True, source=source) as bus:
        context = client_context(keys.engine, keys.bus)
        pub = context.socket(zmq.PUB)
        try:
            pub.connect(bus.engine)
            if not allowed:
                await eventually(lambda: bus.source.stats.refused[Refused.KEY], "the refusal")
                assert bus.source.state == "connecting"
                return

            seqs = count()

            def relayed() -> bool:
                seq = next(seqs)
                pub.send_multipart([b"", seq.to_bytes(8, "big"), batch(store([seq + 1]))])
                return bus.source.stats.stored > 0

            await eventually(relayed, "a batch of the engine")
        finally:
            pub.close(0)
            context.term()


# -- secrets


async def test_logs_and_http_show_no_content_of_key_files(keys, caplog):
    caplog.set_level(logging.DEBUG)
    async with bus_and_engine(keys, source=None or {}) as (bus, _):
        with Router(bus, client_context(keys.stranger, keys.bus)):
            await eventually(lambda: refused(bus), "a refusal")
        host, port = there(bus.daemon.http_address)
        shown = caplog.text + json.dumps(bus.daemon.config.to_dict()) + repr(bus.daemon.keys)
        for path in ("/metrics", "/sources", "/", "/blocks"):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
            answer = (await reader.read(-1)).decode()
            assert "200 OK" in answer.splitlines()[0]
            shown += answer
            writer.close()
            await writer.wait_closed()
    for pair in (keys.bus, keys.router, keys.stranger):
        assert pair.secret.decode() not in shown
    assert keys.stranger.public.decode() not in shown
