"""Tests for a reload: sources are added, removed and changed under traffic, and other sources are not disturbed.

They also cover the files that kvbus reads again at SIGHUP.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest

from kvbus.common.errors import KvbusError
from kvbus.config import load
from kvbus.daemon import changing
from kvbus.daemon.daemon import Daemon
from kvbus.http.credentials import line_of, new_token
from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import change_sources, eventually
from tests.doubles.config_map import Volume
from tests.doubles.kvbus_process import Place, Program, run_async
from tests.doubles.payloads import payload as batch
from tests.doubles.payloads import store
from tests.doubles.runtimes import runtime_of
from tests.doubles.socket_routers import RouterOnASet
from tests.ports import ports_in_a_row
from tests.security.keys import Keyring

log = logging.getLogger("tests.fleet")


class Fleet:
    """A bus in this process, with engines that a test starts and stops. Each engine has its own stream for routers.

    Ports: engine n publishes at ``first + 2n`` and serves its replay at the next port. The outputs begin at ``first +
    20``.
    """

    def __init__(self, names: Iterable[str] = "abc", **settings: Any) -> None:
        self.first = ports_in_a_row(60)
        self.out, self.out_replay = self.first + 20, self.first + 40
        self.sources = [self.source(n, name) for n, name in enumerate(names)]
        output = {"name": "routers", "endpoint": at(self.out), "replay_endpoint": at(self.out_replay), "heartbeat": 0}
        self.settings = {
            "outputs": [output | settings.pop("output", {})],
            "http": "127.0.0.1:0",
            "probe_interval": 0.2,
            "replay_timeout": 1.0,
            "shutdown_timeout": 1.0,
            **settings,
        }
        self.daemon = Daemon(self.load(), runtime=runtime_of(settings))
        self.sent: dict[str, int] = {}

    def source(self, n: int, name: str, **more: Any) -> dict[str, Any]:
        return {
            "name": name,
            "endpoint": at(self.first + 2 * n),
            "replay_endpoint": at(self.first + 2 * n + 1),
            **more,
        }

    def load(self) -> Any:
        return load(None, env={}, overrides={"sources": self.sources, **self.settings})

    def engine(self, n: int) -> EnginePublisher:
        return EnginePublisher(at(self.first + 2 * n), at(self.first + 2 * n + 1), bind=True)

    def router(self, slot: int) -> RouterOnASet:
        return RouterOnASet(at(self.out + slot), at(self.out_replay + slot))

    async def reload(self, outcome: str = "applied") -> None:
        """Apply the present lists of sources and key files to the running bus, and check the outcome of this reload."""
        found = "applied"
        try:
            await change_sources(self.daemon, self.load())
        except KvbusError as error:
            log.error("refused: %s", error)  # noqa: TRY400 - tests look for its text
            found = "refused"
        assert found == outcome

    def relayed(self, slot: int, count: int) -> bool:
        source = self.daemon.relay.sources[slot]
        return source.sequencer.next == count and source.state == "live"


def at(port: int) -> str:
    return f"tcp://127.0.0.1:{port}"


@contextlib.asynccontextmanager
async def running(fleet: Fleet) -> AsyncIterator[Fleet]:
    await fleet.daemon.start()
    try:
        yield fleet
    finally:
        await fleet.daemon.close(drain=0)


@contextlib.asynccontextmanager
async def traffic(engine: EnginePublisher) -> AsyncIterator[EnginePublisher]:
    """Let an engine publish a block every few milliseconds until the ``with`` block ends."""

    async def publish() -> None:
        while True:
            engine.publish(batch(store([engine.next_seq + 1])))
            await asyncio.sleep(0.003)

    await engine.wait_for_subscriber(60)
    task = asyncio.create_task(publish())
    try:
        yield engine
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.contextmanager
def following(*routers: RouterOnASet):
    for router in routers:
        router.subscribe()
    try:
        yield
    finally:
        for router in routers:
            router.close()


async def test_kvbus_is_ready_after_its_start_without_an_engine() -> None:
    fleet = Fleet()
    assert fleet.daemon.awaited == "starting"
    async with running(fleet):
        assert not fleet.daemon.awaited


async def test_routers_of_unchanged_sources_notice_no_reload():
    """Engines a and c publish while other sources change, and the routers of a and c are neither disconnected nor
    lose a
    batch.

    The changes: b is removed, d is added, b returns in another slot, and b's name goes to another engine.
    """
    async with running(Fleet("abc")) as fleet, fleet.engine(0) as first, fleet.engine(2) as third:
        relay, a, c = fleet.daemon.relay, fleet.router(0), fleet.router(2)
        with following(a, c):
            await eventually(lambda: fleet.daemon.outputs.stats[0].subscribers == 2, "both routers")
            async with traffic(first), traffic(third):
                await eventually(lambda: all(relay.sources[slot].state == "live" for slot in (0, 2)), "in sync")
                # While kvbus synced with the engines, batches may have come both live and by replay. From here on, none do.
                before = a.read(), c.read()
                await eventually(lambda: a.read() > before[0] + 3 and c.read() > before[1] + 3, "traffic")
                copies = [relay.sources[slot].stats.duplicates for slot in range(3)]

                def untouched() -> list[object]:
                    streams = relay.outputs[0].streams
                    return [relay.sources[0], relay.sources[2], streams[0], streams[2]]

                kept = untouched()
                base = [fleet.source(0, "a"), fleet.source(2, "c", slot=2)]
                for change in (
                    base,
                    [*base, fleet.source(3, "d")],
                    [base[0], fleet.source(1, "b"), base[1], fleet.source(3, "d")],
                    [base[0], fleet.source(4, "b"), base[1]],
                ):
                    fleet.sources = change
                    before = a.next, c.next
                    await fleet.reload()
                    await eventually(
                        lambda before=before: a.read() > before[0] + 3 and c.read() > before[1] + 3, "more"
                    )
                assert kept == untouched()
                assert (a.disconnected(), c.disconnected()) == (0, 0)
                for engine in (first, third):
                    with pytest.raises(TimeoutError):  # neither engine has got a second subscription
                        await engine.wait_for_subscriber(0, count=2)
            for router, engine, slot in ((a, first, 0), (c, third, 2)):
                count = engine.next_seq
                await eventually(lambda slot=slot, count=count: fleet.relayed(slot, count), "all relayed")
                await eventually(lambda router=router, count=count: router.read() == count, "all live")
                # No batch was lost, none came from a replay, and no seq was used for anything but a batch.
                assert len(router.view.blocks) == count
                stats = relay.sources[slot].stats
                assert (stats.missing, stats.restarts, stats.duplicates) == (0, 0, copies[slot])


def one(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "endpoint": f"ipc:///run/{name}", **more}


async def test_a_reload_with_an_address_in_use_changes_nothing(caplog):
    async with running(Fleet("a")) as fleet:
        fleet.sources = [fleet.source(0, "a"), fleet.source(1, "b")]
        in_the_way = await asyncio.start_server(lambda *_: None, "127.0.0.1", fleet.out_replay + 1)
        async with in_the_way:
            await fleet.reload("refused")
        assert f"tcp://127.0.0.1:{fleet.out_replay + 1}" in caplog.text
        assert [source.spec.label for source in fleet.daemon.relay.present] == ["a"]
        await fleet.reload()
        assert [source.spec.label for source in fleet.daemon.relay.present] == ["a", "b"]


async def test_a_later_reload_opens_a_source_whose_address_was_in_use(monkeypatch, caplog):
    monkeypatch.setattr(changing, "BIND_ATTEMPTS", 3)
    async with running(Fleet("a")) as fleet:
        source = fleet.source(1, "b", bind=True)
        fleet.sources = [fleet.source(0, "a"), source]
        in_the_way = await asyncio.start_server(lambda *_: None, "127.0.0.1", fleet.first + 2)
        async with in_the_way:
            await fleet.reload()
        assert "source b is not connected" in caplog.text
        assert not fleet.daemon.source_sockets.is_open(1)
        await fleet.reload()
        assert fleet.daemon.source_sockets.is_open(1)
        async with EnginePublisher(source["endpoint"], None, bind=False) as engine:
            await engine.wait_for_subscriber(60)
            engine.publish(batch(store([1])))
            await eventually(lambda: fleet.daemon.relay.sources[1].stats.batches, "its batch")


# -- as a supervisor does it


def reloads(place: Place, outcome: str) -> float:
    """Return how many reloads of the configuration had this outcome, as the metrics of kvbus show."""
    name = f'kvbus_config_reloads_total{{outcome="{outcome}"}} '
    (line,) = [line for line in place.get("/metrics")[1].splitlines() if line.startswith(name)]
    return float(line.removeprefix(name))


def test_sighup_applies_the_log_level_and_reports_other_changes(tmp_path: Path):
    """At SIGHUP a new log level applies immediately. For another changed key, kvbus logs how to apply it.

    For a file with errors, it logs all errors.
    """

    async def main() -> None:
        place = Place(tmp_path)
        with place.kvbus() as bus:
            await place.ready(bus)
            file = tmp_path / "kvbus.yaml"
            good = file.read_text()

            def overview() -> Any:
                return json.loads(place.get("/overview")[1])

            file.write_text(good[:-1] + ', "log_level": "debug"}')
            bus.process.send_signal(signal.SIGHUP)
            await eventually(lambda: reloads(place, "applied") == 1, "the log level")
            assert overview()["config"]["log_level"] == "debug"
            other = place.config["outputs"][0] | {"journal_batches": 7}
            changed = place.config | {"outputs": [other], "block_size": 32, "log_level": "warning"}
            file.write_text(json.dumps(changed))
            bus.process.send_signal(signal.SIGHUP)
            await eventually(lambda: reloads(place, "refused") == 1, "what takes a restart")
            assert overview()["config_refused"] == ["block_size", "outputs[0].journal_batches"]
            assert "changes block_size, outputs[0].journal_batches: restart kvbus to apply that" in bus.said
            assert overview()["config"]["log_level"] == "warning"
            assert overview()["config"]["block_size"] == "auto"
            file.write_text("sources: []\noutputs: [{layout: diagonal}]\nblock_size: -1\n")
            bus.process.send_signal(signal.SIGHUP)
            await eventually(lambda: reloads(place, "refused") == 2, "the broken one")
            for key in ("outputs[0].layout", "block_size", "sources"):
                assert key in overview()["config_refused"]
            assert place.get("/readyz")[0] == 200
            assert len(place.sources()) == 1
            file.write_text(good)
            bus.process.send_signal(signal.SIGHUP)
            await eventually(lambda: reloads(place, "applied") == 2, "all of it in force")
            assert overview()["config_refused"] == []
            bus.process.terminate()
            assert await bus.ends() == 0, bus.said

    run_async(main())


def test_a_changed_configuration_file_is_applied_without_a_signal(tmp_path: Path):
    """kvbus notices a changed configuration file without a signal.

    It applies the log level, and logs other changed keys once.

    After a thousand changes of the file, the last one applies.
    """

    async def main() -> None:
        place = Place(tmp_path, key_reload_interval=0.05)

        def text(**more: Any) -> str:
            return json.dumps(place.config | more)

        def overview() -> Any:
            return json.loads(place.get("/overview")[1])

        volume = Volume(tmp_path, text())
        with Program(tmp_path, "run", "-c", str(volume.file)) as bus:
            await place.ready(bus)
            volume.swap(text(log_level="debug"))
            await eventually(lambda: overview()["config"]["log_level"] == "debug", "the log level")
            for changed, named in (
                (text()[:-9], f"{volume.file} line 1"),
                (text(shutdown_timeout=7), "shutdown_timeout"),
                (text(nonsense=7), "nonsense"),
            ):
                volume.swap(changed)
                await eventually(lambda named=named: overview()["config_refused"][:1] == [named], named)
                assert "kvbus_config_refused 1.0" in place.get("/metrics")[1]
            for number in range(1000):
                volume.swap(text(shutdown_timeout=7 + number % 2))
            volume.swap(text())
            await eventually(lambda: "kvbus_config_refused 0.0" in place.get("/metrics")[1], "nothing is refused")
            assert place.get("/readyz")[0] == 200
            bus.process.terminate()
            assert await bus.ends() == 0, bus.said
            assert bus.said.count("restart kvbus to apply that") >= 1

    run_async(main())


def test_sighup_reloads_tokens_and_keys_while_discovery_continues(tmp_path: Path):
    """A real process has a file of tokens, a CURVE allow-list, and a discovery file of engines.

    It reads the tokens and the list again only at SIGHUP. The discovery continues on its own.
    """

    async def main() -> None:
        keys, tokens, engines = Keyring(tmp_path), tmp_path / "tokens", tmp_path / "engines.yaml"
        tokens.write_text("# nobody\n")
        engines.write_text("[]")
        found = {"name": "workers", "discover": {"file": {"path": str(engines), "interval": 0.05}}}
        place = Place(tmp_path, key_reload_interval=0, http_tokens_file=str(tokens))
        place.config["sources"].append(found)
        place.config["outputs"][0] |= {"layout": "merged", **keys.output}
        with place.kvbus() as bus:
            await place.ready(bus)
            tokens.write_text(line_of("router-a", new_token(), content=True))
            keys.allow(keys.router, keys.stranger)
            bus.process.send_signal(signal.SIGHUP)
            await eventually(lambda: reloads(place, "applied") == 1, "the reload")
            assert 'kvbus_key_reloads_total{outcome="applied"} 2.0' in place.get("/metrics")[1]
            assert "1 tokens" in bus.said
            assert "the list of routers that may connect has changed" in bus.said
            entry = [{"name": "pod-0", "endpoint": f"ipc://{tmp_path}/pod-0"}]
            engines.with_name("new").write_text(json.dumps(entry))
            engines.with_name("new").rename(engines)
            await eventually(lambda: len(place.sources()) == 2, "an engine found after it")
            bus.process.send_signal(signal.SIGHUP)
            await eventually(lambda: reloads(place, "applied") == 2, "a reload that knows what was found")
            bus.process.terminate()
            assert await bus.ends() == 0, bus.said

    run_async(main())


def test_kvbus_exits_with_78_if_other_users_can_read_its_secret(tmp_path: Path):
    secret = tmp_path / "key"
    secret.touch(mode=0o644)
    place = Place(tmp_path)
    place.config["outputs"][0] |= {"curve_secret_key_file": str(secret), "curve_client_keys": str(tmp_path / "none")}
    with place.kvbus() as bus:
        assert bus.ended() == 78
    assert "outputs[0].curve_secret_key_file" in bus.said
    assert "outputs[0].curve_client_keys" in bus.said
    assert "Traceback" not in bus.said
    with Program(tmp_path, "check", "-c", str(tmp_path / "kvbus.yaml"), name="check") as check:
        assert check.ended() == 78
    with Program(tmp_path, "check", "--without-keys", "-c", str(tmp_path / "kvbus.yaml"), name="check") as check:
        assert check.ended() == 0
