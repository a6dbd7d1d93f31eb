"""Tests for tenants who share one output, as attackers: each requests all data, and gets only what its key may read.

The peers use libzmq with CURVE. One engine serves both tenants, which are distinguished by cache salt. The tests keep
every frame that a tenant receives. No frame may contain data of the other tenant: no token, no hash, and no number that
the other tenant's traffic has changed.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any, Self

import aiohttp
import pytest
import zmq
from zmq.utils import z85

from kvbus.common.errors import ConfigError
from kvbus.config import load
from kvbus.core.outputs.snapshot import REQUEST
from kvbus.daemon.keys import read_keys
from kvbus.daemon.outputs import peer_policy_of
from kvbus.daemon.serve import Reloader
from kvbus.parts.outputs.contract import ViewDriver
from kvbus.transport.engine.publisher import EnginePublisher
from kvbus.transport.zmtp.reasons import Reason
from tests.doubles.bus import Bus, eventually, running_bus
from tests.doubles.payloads import cleared, payload, removed, store, tokens_of
from tests.doubles.socket_routers import RouterOnASet
from tests.ports import free_port, ports_in_a_row
from tests.security.keys import Keyring, Pair, client_context
from tests.system.test_reload import Fleet, running

HASHES = {"a": range(10**9, 10**9 + 500), "b": range(2 * 10**9, 2 * 10**9 + 500)}


class Keys(Keyring):
    """Key pairs of kvbus and its routers: tenants a and b, and a router that may read everything."""

    def __init__(self, directory: Any) -> None:
        super().__init__(directory)
        self.pairs = {name: Pair(directory, name) for name in ("a", "b", "all")}
        self.write(a="salts=a", b="salts=b", all="")

    def write(self, **lines: str) -> None:
        """Replace the allow-list. The keyword arguments are the rights of each router, by the router's name."""
        text = "".join(f"{self.pairs[name].public.decode()} {name} {rights}\n" for name, rights in lines.items())
        new = self.directory / "routers.keys.new"
        new.write_text(text)
        new.rename(self.allowed)


@pytest.fixture
def keys(tmp_path: Any) -> Keys:
    return Keys(tmp_path)


class Tenant(RouterOnASet):
    """A router of a tenant. It keeps every frame that it receives, and gets the state when it subscribes."""

    rebuilds = False

    def __init__(self, bus: Bus, keys: Keys, name: str) -> None:
        super().__init__(bus.out, bus.out_replay, client_context(keys.pairs[name], keys.bus))
        self.name = name
        self.seen: list[bytes] = []
        self.seqs: list[int] = []

    def __enter__(self) -> Self:
        self.subscribe()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, seq: int, payload: bytes) -> None:
        self.seen.append(payload)
        self.seqs.append(seq)
        super()._take(seq, payload)

    @property
    def waiting(self) -> bool:
        """Return whether a message waits in the router's live socket."""
        return self._live is not None and self._live.poll(0) != 0

    def also(self, endpoint: str) -> None:
        """Connect the router's live socket to one more endpoint."""
        assert self._live is not None
        self._live.connect(endpoint)

    @property
    def blocks(self) -> set[Any]:
        return {block for _, _, block in self.view.blocks}

    async def holds(self, expected: set[int]) -> None:
        def equal() -> bool:
            self.read()
            return self.blocks == expected

        await eventually(equal, f"{self.name} holds {len(expected)} blocks")


class Rebuilds(Tenant):
    """A router of a tenant that gets its blocks only from replays, and no state on subscription."""

    rebuilds = True


class Engine:
    """An engine that publishes chains of blocks of both tenants. As in vLLM, the extra keys contain the cache salt."""

    def __init__(self, publisher: EnginePublisher) -> None:
        self.publisher = publisher
        self.live: dict[str, list[int]] = {"a": [], "b": []}
        self.next = {name: iter(hashes) for name, hashes in HASHES.items()}
        self.seq = -1

    def store(self, name: str, count: int = 3) -> None:
        """Publish a new chain of blocks of a tenant, in one batch."""
        hashes = [next(self.next[name]) for _ in range(count)]
        self.publish(store(hashes, extra_keys=[[name], *[None] * (count - 1)]))
        self.live[name] += hashes

    def grow(self, name: str) -> None:
        """Publish one more block after a tenant's newest block, in an event without the tenant's cache salt."""
        parent, block = self.live[name][-1], next(self.next[name])
        self.publish(store([block], parent))
        self.live[name].append(block)

    def remove(self, name: str) -> None:
        self.publish(removed([self.live[name].pop()]))

    def clear(self) -> None:
        self.publish(cleared())
        self.live = {"a": [], "b": []}

    def publish(self, *events: Any) -> None:
        self.publisher.publish(payload(*events))
        self.seq += 1

    def of(self, *names: str) -> set[int]:
        return {block for name in names for block in self.live[name]}


def others(name: str) -> list[bytes]:
    """Return byte strings that a tenant must never receive: the other tenant's hashes, and the tokens of each of
    its blocks.
    """
    (other,) = {"a", "b"} - {name}
    found = []
    for block in HASHES[other]:
        found.append(b"\xce" + block.to_bytes(4, "big"))
        found.append(b"".join(b"\xce" + token.to_bytes(4, "big") for token in tokens_of(block)[:3]))
    return found


def nothing_of_others(tenant: Tenant) -> None:
    everything = b"".join(tenant.seen)
    assert not [each for each in others(tenant.name) if each in everything]


@contextlib.asynccontextmanager
async def tenants_bus(keys: Keys, **settings: Any) -> AsyncIterator[tuple[Bus, Engine]]:
    output = settings.pop("output", {}) | keys.output
    async with (
        running_bus(output=output, key_reload_interval=0, **settings) as bus,
        EnginePublisher(bus.engine, bus.engine_replay, bind=True) as publisher,
    ):
        await publisher.wait_for_subscriber(60)
        yield bus, Engine(publisher)


def some_traffic(engine: Engine) -> None:
    for name in ("a", "b", "b", "a", "b"):
        engine.store(name)
        engine.grow(name)
    engine.remove("a")
    engine.remove("b")


async def metrics_of(bus: Bus) -> str:
    assert bus.daemon.http_address is not None
    host, port = bus.daemon.http_address
    async with aiohttp.ClientSession() as session, session.get(f"http://{host}:{port}/metrics") as answer:
        return await answer.text()


async def relayed(bus: Bus, engine: Engine) -> None:
    await eventually(lambda: bus.caught_up(engine.seq), "everything relayed")


async def test_each_tenant_gets_only_its_own_blocks_and_seqs(keys: Keys) -> None:
    async with tenants_bus(keys) as (bus, engine):
        some_traffic(engine)
        await relayed(bus, engine)
        with Tenant(bus, keys, "a") as a, Tenant(bus, keys, "b") as b, Tenant(bus, keys, "all") as everyone:
            for router, names in ((a, "a"), (b, "b"), (everyone, "ab")):
                await router.holds(engine.of(*names))
            some_traffic(engine)
            engine.clear()
            some_traffic(engine)
            for router, names in ((a, "a"), (b, "b"), (everyone, "ab")):
                await router.holds(engine.of(*names))
            for router in (a, b, everyone):
                assert router.seqs == list(range(router.seqs[0], router.seqs[-1] + 1))
            assert a.seqs[-1] < b.seqs[-1] < everyone.seqs[-1]
            newest = a.next
            for start in (0, 1, newest // 2, newest - 1, newest, newest + 1, everyone.next, 2**40, 2**63):
                await a.replay(start)
            nothing_of_others(a)
            nothing_of_others(b)
            await a.holds(engine.of("a"))
            metrics = await metrics_of(bus)
            for metric in ("queue_batches", "behind_seconds", "dropped_batches"):
                assert f'kvbus_router_{metric}{{output="routers",router="a"}} 0.0' in metrics


async def test_the_snapshot_of_a_tenant_has_only_its_own_blocks(keys: Keys) -> None:
    port = free_port()
    async with tenants_bus(keys, output={"snapshot_endpoint": f"tcp://127.0.0.1:{port}"}) as (bus, engine):
        some_traffic(engine)
        await relayed(bus, engine)
        for name in ("a", "b"):
            context = client_context(keys.pairs[name], keys.bus)
            dealer = context.socket(zmq.DEALER)
            try:
                dealer.connect(f"tcp://127.0.0.1:{port}")
                dealer.send(REQUEST)
                await eventually(lambda dealer=dealer: dealer.poll(0), "the snapshot")
                reply = dealer.recv_multipart()
            finally:
                dealer.close(0)
                context.destroy(0)
            everything = b"".join(reply)
            assert not [each for each in others(name) if each in everything]
            assert all(b"\xce" + block.to_bytes(4, "big") in everything for block in engine.of(name))


async def test_a_router_of_a_tenant_rebuilds_its_view_by_a_replay(keys: Keys) -> None:
    """A tenant's router joins late and requests a replay from seq 0, which the journal no longer has.

    It gets all blocks that it may read.
    """
    async with tenants_bus(keys, output={"journal_batches": 2, "on_subscribe": "nothing"}) as (bus, engine):
        some_traffic(engine)
        await relayed(bus, engine)
        with Rebuilds(bus, keys, "a") as a:
            await a.replay(0)
            await eventually(lambda: bus.daemon.output_stats[0].subscribers, "the subscription")
            some_traffic(engine)
            await relayed(bus, engine)

            sent = bus.daemon.relay.outputs[1].streams[0]
            while a.next < sent.next_seq:
                await eventually(lambda: a.waiting, "a batch")
                await a.follow()
            assert a.blocks == engine.of("a")
            nothing_of_others(a)


async def test_revoking_a_key_immediately_disconnects_only_its_router(
    keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with tenants_bus(keys) as (bus, engine):
        some_traffic(engine)
        await relayed(bus, engine)
        daemon = bus.daemon
        with Tenant(bus, keys, "a") as a, Tenant(bus, keys, "b") as b, Tenant(bus, keys, "all") as everyone:
            for router, names in ((a, "a"), (b, "b"), (everyone, "ab")):
                await router.holds(engine.of(*names))
            before = {view.name: view.peer for view in daemon.drivers[0].routers}
            assert set(before) == {"a", "b", "all"}
            requester = a.request(0)
            await eventually(lambda: requester.poll(0), "an answer")
            keys.write(b="salts=b", all="")
            await reloaded(daemon)
            stats = daemon.output_stats[0]
            await eventually(lambda: stats.routers == 2, "a is gone")
            await eventually(lambda: stats.refused[str(Reason.KEY)] >= 2, "and is not let in again, nor its requests")
            engine.store("a")
            some_traffic(engine)
            await b.holds(engine.of("b"))
            await everyone.holds(engine.of("a", "b"))
            assert {view.name: view.peer for view in daemon.drivers[0].routers if view.left is None} == {
                name: before[name] for name in ("b", "all")
            }
            assert stats.router_disconnects == dict(stats.router_disconnects) | {"revoked": 1}
            seen = len(a.seen)
            a.read()
            assert len(a.seen) == seen
            requester.close(0)
        assert [view.name for view in daemon.drivers[0].routers if view.left == "revoked"] == ["a"]
    assert "router a (127.0.0.1:" in caplog.text
    assert not any(pair.public.decode() in caplog.text for pair in keys.pairs.values())


async def reloaded(daemon: Any) -> None:
    """Reload the files of keys and rights, and wait until kvbus has applied them."""
    before = daemon.process.config_reloads.total()
    reloader = Reloader(daemon, lambda: daemon.config)
    reloader.reload()
    await eventually(lambda: daemon.process.config_reloads.total() > before, "the list read again")
    reloader.close()


async def test_a_router_whose_rights_change_reconnects_to_another_view(keys: Keys) -> None:
    async with tenants_bus(keys) as (bus, engine):
        some_traffic(engine)
        await relayed(bus, engine)
        with Tenant(bus, keys, "a") as a, Tenant(bus, keys, "b") as b:
            await a.holds(engine.of("a"))
            await b.holds(engine.of("b"))
            (peer,) = (view.peer for view in bus.daemon.drivers[0].routers if view.name == "b")
            keys.write(a="salts=b", b="salts=b", all="")
            await reloaded(bus.daemon)
            some_traffic(engine)
            await a.holds(engine.of("b"))
            await b.holds(engine.of("b"))
            keys.write(a="salts=a,b", b="salts=b", all="")
            await reloaded(bus.daemon)
            some_traffic(engine)
            await a.holds(engine.of("a", "b"))
            await b.holds(engine.of("b"))
            assert peer in {view.peer for view in bus.daemon.drivers[0].routers if view.left is None}
            assert len(bus.daemon.views.of_output(0)) == 2


async def test_an_unreadable_allow_list_changes_no_rights(keys: Keys, caplog: pytest.LogCaptureFixture) -> None:
    async with tenants_bus(keys) as (bus, engine):
        some_traffic(engine)
        await relayed(bus, engine)
        with Tenant(bus, keys, "a") as a:
            await a.holds(engine.of("a"))
            keys.write(a="salt=a hunter2", all="")
            await reloaded(bus.daemon)
            assert bus.daemon.process.key_reloads["refused"] == 1
            assert "line 1: an unknown right" in caplog.text
            assert "hunter2" not in caplog.text
            engine.store("b")
            engine.store("a")
            await a.holds(engine.of("a"))
            nothing_of_others(a)


async def test_the_port_of_a_rank_refuses_a_key_without_its_right(keys: Keys) -> None:
    keys.write(a="sources=engine/1", b="sources=other", all="")
    first_port = ports_in_a_row(8)
    engine, engine_replay, out, out_replay = (f"tcp://127.0.0.1:{first_port + at}" for at in range(0, 8, 2))
    source = {"endpoint": engine, "replay_endpoint": engine_replay, "data_parallel_size": 2}
    output = {"endpoint": out, "replay_endpoint": out_replay} | keys.output
    async with (
        running_bus(output=output, source=source, key_reload_interval=0) as bus,
        EnginePublisher(engine, engine_replay, bind=True) as publisher,
    ):
        await publisher.wait_for_subscriber(60)
        bus.out, bus.out_replay = out, out_replay
        first = Engine(publisher)
        first.store("a")
        await relayed(bus, first)
        with Tenant(bus, keys, "a") as a, Tenant(bus, keys, "b") as b, Tenant(bus, keys, "all") as everyone:
            await everyone.holds(first.of("a"))
            await eventually(lambda: bus.daemon.output_stats[0].refused[str(Reason.KEY)] >= 2, "both are refused")
            for router in (a, b):
                router.also(f"tcp://127.0.0.1:{first_port + 5}")
            await eventually(lambda: bus.daemon.output_stats[0].routers == 2, "the port of rank 1")
            assert [view.name for view in bus.daemon.drivers[0].routers] == ["all", "a"]
            assert (a.read(), b.read()) == (0, 0)


async def test_each_view_continues_after_a_restart_with_saved_state(keys: Keys, tmp_path: Any) -> None:
    """After a restart with its saved state, kvbus continues the stream of each tenant with that tenant's blocks.

    The engine has removed the first block of each chain before the restart. Only this block named the tenant, so only
    the saved state shows to which tenant the other blocks belong.
    """
    settings: dict[str, Any] = {"state_dir": str(tmp_path / "state")}
    async with running_bus(output=keys.output, key_reload_interval=0, **settings) as bus:
        source = {"endpoint": bus.engine, "replay_endpoint": bus.engine_replay}
        out = {"endpoint": bus.out, "replay_endpoint": bus.out_replay}
        async with EnginePublisher(bus.engine, bus.engine_replay, bind=True) as publisher:
            await publisher.wait_for_subscriber(60)
            engine = Engine(publisher)
            for name in ("a", "b"):
                engine.store(name, 1)
                engine.grow(name)
                engine.publish(removed([engine.live[name].pop(0)]))
            await relayed(bus, engine)
            with Tenant(bus, keys, "a") as a:
                await a.holds(engine.of("a"))
                await bus.daemon.close(drain=0)
                async with running_bus(
                    output=keys.output | out, source=source, key_reload_interval=0, **settings
                ) as again:
                    assert again.daemon.restored
                    engine.grow("a")
                    engine.grow("b")
                    await a.holds(engine.of("a"))
                    with Tenant(bus, keys, "a") as late:
                        await late.holds(engine.of("a"))
                        nothing_of_others(late)
                    assert a.seqs == sorted(set(a.seqs)), "the numbering goes on"
                    nothing_of_others(a)


async def test_a_key_with_a_pattern_may_read_matching_new_sources(keys: Keys) -> None:
    """A pattern in the allow-list gives the key a right to all matching sources, also to sources that are added later.

    If a source that does not match the pattern later gets the slot of a matching one, the key has no right to it.
    """
    keys.write(a="sources=mine-*", all="")
    fleet = Fleet(["mine-1", "other-1"], output=keys.output, key_reload_interval=0)
    async with running(fleet):
        assert ports_open_to(fleet, "a", keys) == {0}
        fleet.sources.append(fleet.source(2, "mine-2"))
        await fleet.reload()
        assert ports_open_to(fleet, "a", keys) == {0, 2}
        fleet.sources[2] = fleet.source(2, "other-2")
        fleet.sources[1] = fleet.source(1, "mine-3")
        await fleet.reload()
        assert ports_open_to(fleet, "a", keys) == {0, 1}
        async with fleet.engine(1) as publisher:
            await publisher.wait_for_subscriber(60)
            engine = Engine(publisher)
            engine.store("a")
            context = client_context(keys.pairs["a"], keys.bus)
            router = RouterOnASet(
                f"tcp://127.0.0.1:{fleet.out + 1}", f"tcp://127.0.0.1:{fleet.out_replay + 1}", context
            )
            router.rebuilds = False  # type: ignore[misc]
            router.subscribe()
            await eventually(lambda: router.read() and len(router.view.blocks) == 3, "the new source's blocks")
            router.close()


def ports_open_to(fleet: Fleet, name: str, keys: Keys) -> set[int]:
    """Return the slots of sources that a router's key may read: their ports accept the key, and its view has their
    streams.
    """
    (driver,) = fleet.daemon.drivers
    policy = peer_policy_of(fleet.daemon.config, 0, fleet.daemon.keys, fleet.daemon.views)
    key = z85.decode(keys.pairs[name].public)
    admitted = {slot for slot in driver.streams if key in policy.clients(slot)}
    assert isinstance(driver, ViewDriver)
    assert {slot for number, slot in driver.views if number == policy.views[key]} == admitted
    return admitted


@pytest.mark.parametrize(
    ("output", "wrong"),
    [
        ({"layout": "per_topic", "topic": "kv@{source}", "replay_endpoint": None}, "layout per_source or merged"),
        ({"bind": False}, "cannot limit what a key reads"),
    ],
)
def test_rights_that_an_output_cannot_enforce_are_refused(keys: Keys, output: dict[str, Any], wrong: str) -> None:
    files = keys.output | ({"curve_server_key_file": str(keys.router.public_file)} if "bind" in output else {})
    ports = {"endpoint": "tcp://127.0.0.1:6000", "replay_endpoint": "tcp://127.0.0.1:6001"}
    overrides = {"sources": [{}], "outputs": [ports | files | output]}
    config = load(None, env={}, overrides=overrides)
    with pytest.raises(ConfigError, match=wrong):
        read_keys(config)
    keys.write(a="", b="")
    read_keys(config)


async def test_the_key_of_an_engine_can_publish_only_as_its_worker(keys: Keys, tmp_path: Any) -> None:
    """An engine's key can publish only as the worker whose list has the key, on the port of every rank.

    A key that the list restricts to one rank can publish only as this rank. The same holds after a reconnection.
    """
    one, two, rank = (Pair(tmp_path, name) for name in ("one", "two", "rank"))
    first_port = ports_in_a_row(5)
    ports = range(first_port, first_port + 5)
    lists = {
        "a": f"{one.public.decode()} one\n",
        "b": f"{two.public.decode()} two\n{rank.public.decode()} sources=b/1\n",
    }
    sources = []
    for name, port in (("a", ports[0]), ("b", ports[2])):
        listed = tmp_path / f"{name}.keys"
        listed.write_text(lists[name])
        sources.append(
            {
                "name": name,
                "endpoint": f"tcp://127.0.0.1:{port}",
                "bind": True,
                "data_parallel_size": 2,
                "curve_secret_key_file": str(keys.bus.secret_file),
                "curve_client_keys": str(listed),
            }
        )
    output = {"endpoint": f"tcp://127.0.0.1:{ports[4]}", "layout": "merged", "replay_endpoint": None}
    async with running_bus(sources=sources, output=output) as bus:
        at = {"a/0": ports[0], "a/1": ports[1], "b/0": ports[2], "b/1": ports[3]}
        for pair, may in ((one, {"a/0", "a/1"}), (two, {"b/0", "b/1"}), (rank, {"b/1"})):
            for _ in range(2):
                for label, port in at.items():
                    await dials(bus, pair, keys, label, port, let_in=label in may)


async def dials(bus: Bus, pair: Pair, keys: Keys, label: str, port: int, *, let_in: bool) -> None:
    """Connect a publisher with a key to the port of a source, as an engine would.

    With ``let_in``, check that kvbus receives a batch of the publisher. Otherwise check that kvbus receives none, and
    counts a refusal.
    """
    (source,) = (source for source in bus.daemon.relay.sources if source.spec.label == label)
    before, refusals = source.stats.batches, source.stats.refused.total()
    context = client_context(pair, keys.bus)
    publisher = context.socket(zmq.PUB)
    publisher.connect(f"tcp://127.0.0.1:{port}")

    def heard() -> bool:
        publisher.send_multipart([b"", bytes(8), payload(store([1]))])
        return source.stats.batches > before

    try:
        if let_in:
            await eventually(heard, f"{label} hears its engine")
        else:
            await eventually(lambda: heard() or source.stats.refused.total() > refusals, f"{label} refuses a stranger")
            assert source.stats.batches == before
    finally:
        publisher.close(0)
        context.destroy(0)


async def test_seqs_never_go_back_when_rights_change_while_kvbus_is_stopped(keys: Keys, tmp_path: Any) -> None:
    """A router's seqs never go back when new rights give it another view.

    This also holds if both views existed before the change, because the seqs of the other view may be lower.
    """
    settings: dict[str, Any] = {"state_dir": str(tmp_path / "state"), "key_reload_interval": 0}
    async with running_bus(output=keys.output, **settings) as bus:
        source = {"endpoint": bus.engine, "replay_endpoint": bus.engine_replay}
        out = {"endpoint": bus.out, "replay_endpoint": bus.out_replay}
        async with EnginePublisher(bus.engine, bus.engine_replay, bind=True) as publisher:
            await publisher.wait_for_subscriber(60)
            engine = Engine(publisher)
            engine.store("b")
            for _ in range(20):
                engine.store("a", 1)
            await relayed(bus, engine)
            with Tenant(bus, keys, "a") as a:
                await a.holds(engine.of("a"))
                await bus.daemon.close(drain=0)
                keys.write(a="salts=b", b="salts=a", all="")
                async with running_bus(output=keys.output | out, source=source, **settings) as again:
                    assert not again.daemon.restored
                    await a.holds(engine.of("b"))
                    engine.store("b")
                    await a.holds(engine.of("b"))
