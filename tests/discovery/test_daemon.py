"""Tests for a kvbus daemon that discovers engines on real sockets.

Workers appear, leave, move and flap under traffic. Workers that stay must not be affected.
"""

from __future__ import annotations

import asyncio

import pytest

from kvbus.daemon.keys import read_keys
from tests.discovery.fleet import DiscoveringBus, Worker, running, write
from tests.doubles.bus import eventually
from tests.security.keys import Keyring


@pytest.fixture
def file(tmp_path):
    return tmp_path / "engines.json"


def file_discovery(file):
    return {"file": {"path": str(file), "interval": 0.02}}


async def test_two_replicas_discover_the_same_engines_independently(file):
    """Two replicas of a kvbus discover the same engines.

    Each replica numbers its own streams, and a router reads from only one of the replicas.
    """
    one, two = Worker("pod-1", 1), Worker("pod-2", 2)
    for worker in (one, two):
        await worker.start()
    write(file, [one.entry, two.entry])
    async with running(DiscoveringBus(file_discovery(file))) as first:
        await first.sources("pod-1", "pod-2")
        await first.exact(one, two)
        for worker in (one, two):
            worker.go_on()
        async with running(DiscoveringBus(file_discovery(file))) as late:
            await late.sources("pod-1", "pod-2")
            for bus in (first, late):
                await bus.exact(one, two)
            one.go_on()
            write(file, [one.entry])
            for bus in (first, late):
                await bus.sources("pod-1")
                await bus.exact(one)
        one.go_on()
        await first.exact(one)
        assert first.clears("pod-1") == first.source("pod-1").stats.gaps == 0
    for worker in (one, two):
        await worker.stop()


async def test_an_empty_list_removes_engines_and_an_invalid_list_does_not(file):
    one = Worker("pod-1", 1)
    await one.start()
    write(file, [one.entry])
    async with running(DiscoveringBus(file_discovery(file), discovery_grace=0)) as bus:
        await bus.sources("pod-1")
        file.write_text("[{")
        await eventually(lambda: bus.stats.failures, "a failure counted")
        file.unlink()
        await eventually(lambda: "No such file" in bus.stats.failing, "another failure counted")
        assert set(bus.labels) == {"pod-1"}
        await bus.exact(one)
        write(file, [])
        await bus.sources()
        await bus.exact()
        assert (bus.stats.failing, bus.stats.engines) == ("", 0)
    await one.stop()


async def test_a_worker_that_moves_without_a_restart_keeps_its_blocks(file):
    """A discovered worker moves to another address.

    The replay at the new address shows that the worker has not restarted, so kvbus clears no block.
    """
    one = Worker("pod-1", 1)
    await one.start()
    write(file, [one.entry])
    async with running(DiscoveringBus(file_discovery(file))) as bus:
        await bus.sources("pod-1")
        source = bus.source("pod-1")
        await eventually(lambda: source.sequencer.next > 3, "some batches")
        elsewhere = {**one.entry, "endpoint": one.endpoint.replace("127.0.0.1", "localhost")}
        write(file, [elsewhere])
        await eventually(lambda: bus.stats.changes["moved"], "the move")
        await bus.exact(one)
        assert bus.source("pod-1") is source
        assert bus.daemon.streams[bus.labels["pod-1"]].endpoint == elsewhere["endpoint"]
        assert (bus.clears("pod-1"), source.sequencer.epoch, source.stats.lost) == (0, 0, 0)
    await one.stop()


async def test_a_worker_that_moves_with_a_restart_begins_a_new_epoch(file):
    one = Worker("pod-1", 1)
    await one.start()
    write(file, [one.entry])
    async with running(DiscoveringBus(file_discovery(file))) as bus:
        await bus.sources("pod-1")
        source, slot = bus.source("pod-1"), bus.labels["pod-1"]
        await eventually(lambda: source.sequencer.next > 3, "some batches")
        await one.stop()
        again = Worker("pod-1", 2)
        await again.start()
        write(file, [again.entry])
        await eventually(lambda: bus.stats.changes["moved"], "the move")
        await bus.exact(again)
        assert bus.source("pod-1") is source
        assert bus.labels == {"pod-1": slot}
        await again.stop()


async def test_a_worker_that_is_missing_within_the_grace_time_stays_a_source(file):
    one, two = Worker("pod-1", 1), Worker("pod-2", 2)
    for worker in (one, two):
        await worker.start()
    write(file, [one.entry, two.entry])
    async with running(DiscoveringBus(file_discovery(file), discovery_grace=30)) as bus:
        await bus.sources("pod-1", "pod-2")
        for _ in range(5):
            write(file, [two.entry])
            await eventually(lambda: bus.stats.engines == 1, "one engine listed")
            write(file, [one.entry, two.entry])
            await eventually(lambda: bus.stats.engines == 2, "both listed")
        await bus.exact(one, two)
        assert bus.stats.changes == {"joined": 2}
    for worker in (one, two):
        await worker.stop()


async def test_a_worker_that_is_listed_again_during_its_removal_stays_a_source(file, monkeypatch):
    one = Worker("pod-1", 1)
    await one.start()
    write(file, [one.entry])
    loop, listed = asyncio.get_running_loop(), asyncio.Event()
    async with running(DiscoveringBus(file_discovery(file), discovery_grace=0)) as bus:
        await bus.sources("pod-1")

        def list_again(config):
            if not listed.is_set():
                write(file, [one.entry])
                again = eventually(lambda: bus.stats.engines == 1, "listed again")
                asyncio.run_coroutine_threadsafe(again, loop).result()
                loop.call_soon_threadsafe(listed.set)
            return read_keys(config)

        monkeypatch.setattr("kvbus.daemon.discovery.read_keys", list_again)
        write(file, [])
        await listed.wait()
        async with bus.daemon.changing:
            assert bus.stats.changes == {"joined": 1}
        await bus.exact(one)
        assert bus.stats.changes == {"joined": 1}
    await one.stop()


async def test_a_worker_at_the_address_of_a_removed_worker_is_a_source_immediately(file):
    """A worker with a new name at the address of a removed worker becomes a source immediately.

    It is the same engine under another name. If kvbus kept the source of the old name for the grace time, kvbus would
    announce the engine's blocks twice.
    """
    one = Worker("pod-1", 1)
    await one.start()
    write(file, [one.entry])
    async with running(DiscoveringBus(file_discovery(file), discovery_grace=60)) as bus:
        await bus.sources("pod-1")
        one.name = "pod-1-again"
        write(file, [one.entry])
        await bus.sources("pod-1-again")
        await bus.exact(one)
    await one.stop()


async def test_a_daemon_ends_during_a_discovery(file):
    async with running(DiscoveringBus(file_discovery(file))) as bus:
        await eventually(lambda: bus.stats.failures, "the missing file")
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


async def test_a_restarted_kvbus_begins_with_its_discovered_engines_if_discovery_fails(file, tmp_path):
    """After a restart, kvbus begins with the engines that it had discovered before.

    The sources are the same, so their state on disk is used and no router is cleared.
    """
    workers = [Worker(f"pod-{n}", n) for n in (3, 1, 2)]
    for worker in workers:
        await worker.start()
    write(file, [worker.entry for worker in workers])
    first = DiscoveringBus(file_discovery(file), state_dir=str(tmp_path / "state"))
    async with running(first):
        await first.sources("pod-1", "pod-2", "pod-3")
        write(file, [worker.entry for worker in workers[:2]])
        await first.sources("pod-1", "pod-3")
        await first.exact(*workers[:2])
        slots, seq = first.labels, first.router.next
    file.unlink()
    again = DiscoveringBus(file_discovery(file), state_dir=str(tmp_path / "state"), ports=first.ports)
    assert again.daemon.restored
    assert again.labels == slots
    again.router.next = seq
    again.view.views, again.view.next = first.view.views, seq
    async with running(again):
        await again.sources("pod-1", "pod-3")
        await eventually(lambda: again.stats.failures, "nobody can be asked")
        workers[0].go_on()
        await eventually(lambda: again.source("pod-3").stats.batches > 3, "more batches")
        await again.exact(*workers[:2])
        assert again.clears("pod-1") == again.clears("pod-3") == 0
        write(file, [workers[0].entry])
        await again.sources("pod-3")
        await again.exact(workers[0])
    for worker in workers:
        await worker.stop()


async def test_a_kvbus_without_state_forgets_its_discovered_engines(file, tmp_path, monkeypatch):
    """With `state_dir: null`, kvbus begins with the engines that discovery finds now.

    This also holds if an earlier process has stored its engines in the same directory.
    """
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    one = Worker("pod-1", 1)
    await one.start()
    write(file, [one.entry])
    first = DiscoveringBus(file_discovery(file), state_dir="auto")
    async with running(first):
        await first.sources("pod-1")
    write(file, [])
    for _ in range(2):
        again = DiscoveringBus(file_discovery(file), state_dir=None, ports=first.ports)
        assert again.labels == {}
        write(file, [one.entry])
        async with running(again):
            await again.sources("pod-1")
        write(file, [])
    await one.stop()


async def test_a_file_may_name_an_engine_twice_or_not_at_all(file):
    """The first entry with a name is the engine. A finding names each entry that is not used."""
    one = Worker("pod-1", 1)
    await one.start()
    write(file, ["x", {"name": "pod-1", "endpoint": "nowhere"}, one.entry, {**one.entry, "endpoint": "tcp://a:1"}])
    async with running(DiscoveringBus(file_discovery(file))) as bus:
        await bus.sources("pod-1")

        def invalid() -> list[str]:
            return sorted(
                each.text.partition("invalid value: ")[2] for each in bus.daemon.findings if each.id == "engine_invalid"
            )

        await eventually(lambda: len(invalid()) == 3, "three findings")
        said = invalid()
        assert (
            said[0] == "[0] = 'x': must be a mapping of keys; for example {name: pod-a, endpoint: tcp://10.0.0.3:5557}"
        )
        assert said[1].startswith("[1].endpoint = 'nowhere': ")
        assert said[2] == "[3].name = pod-1: another entry of the list has this name; for example pod-1-2"
        assert bus.stats.left_out["invalid"] == 3
        await bus.exact(one)
    await one.stop()


async def test_kvbus_logs_one_line_about_many_engines_beyond_max_sources(file, caplog):
    write(file, [{"name": f"pod-{n:03}", "endpoint": f"tcp://127.0.0.1:{n + 1}"} for n in range(500)])
    async with running(DiscoveringBus(file_discovery(file), limits={"max_sources": 1})) as bus:
        await eventually(lambda: bus.stats.left_out["max_sources"] == 499, "all but one left out")
        said = (
            "kvbus does not read 499 of the discovered engines (reason max_sources) [sources[0].discover]: raise limits"
        )
        await eventually(lambda: said in caplog.text, "the finding")
        assert caplog.text.count("kvbus does not read ") == 1


async def test_a_bug_in_a_discoverer_removes_no_engine_and_is_retried(file, monkeypatch, caplog):
    one = Worker("pod-1", 1)
    await one.start()
    write(file, [one.entry])
    async with running(DiscoveringBus(file_discovery(file))) as bus:
        await bus.sources("pod-1")
        with monkeypatch.context() as broken:
            broken.setattr("kvbus.parts.discovery.file.publishers", lambda *_: 1 // 0)
            write(file, [one.entry | {"topic": "other"}])
            await eventually(lambda: bus.stats.failing == "a defect, see the log", "the defect")
        assert "ZeroDivisionError" in caplog.text
        write(file, [one.entry])
        await eventually(lambda: not bus.stats.failing, "another try")
        await bus.exact(one)
    await one.stop()


async def test_an_error_during_a_change_of_sources_is_counted_and_retried(file, monkeypatch, caplog):
    """kvbus counts an unexpected error while it changes its sources, and tries again.

    The error comes from an engine without ranks. A discoverer of another project may return such an engine, because the
    contract does not forbid it.
    """
    monkeypatch.setattr("kvbus.daemon.discovery.LAST_PAUSE", 0.05)
    one, two = Worker("pod-1", 1), Worker("pod-2", 2)
    for worker in (one, two):
        await worker.start()
    write(file, [one.entry])
    async with running(DiscoveringBus(file_discovery(file))) as bus:
        await bus.sources("pod-1")
        with monkeypatch.context() as broken:
            broken.setattr("kvbus.parts.discovery.file.publishers", lambda *_: ())
            write(file, [one.entry, {"name": "pod-3", "endpoint": "tcp://127.0.0.1:1"}])
            await eventually(lambda: bus.stats.changes["refused"] > 3, "several tries")
        assert caplog.text.count("cannot become sources yet: a defect, IndexError") == 1
        assert "Traceback" in caplog.text
        await bus.exact(one)
        write(file, [one.entry, two.entry])
        await bus.sources("pod-1", "pod-2")
        await bus.exact(one, two)
    for worker in (one, two):
        await worker.stop()


async def test_engines_become_sources_when_their_key_files_are_readable(file, tmp_path, caplog):
    """kvbus logs once that it cannot read the key files of discovered engines, and tries again with the next set of
    engines.
    """
    one = Worker("pod-1", 1)
    await one.start()
    write(file, [one.entry])
    keys = Keyring(tmp_path)
    keys.engine.public_file.rename(tmp_path / "elsewhere")
    async with running(DiscoveringBus(file_discovery(file), source=keys.source)) as bus:
        await eventually(lambda: "the engines found cannot become sources yet" in caplog.text, "the refusal")
        assert "No such file" in caplog.text
        assert bus.labels == {}
        (tmp_path / "elsewhere").rename(keys.engine.public_file)
        write(file, [one.entry, {"name": "pod-2", "endpoint": "tcp://127.0.0.1:1"}])
        await eventually(lambda: set(bus.labels) == {"pod-1", "pod-2"}, "sources with their keys")
        assert caplog.text.count("cannot become sources yet") == 1
    await one.stop()
