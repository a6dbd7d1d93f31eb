"""Streams erased from NATS: nothing of them can be read afterwards, and the others are as they were."""

import asyncio
import json

import pytest
from click.testing import CliRunner

from kvbus.cli import main
from kvbus.log.nats_erase import erase, look
from kvbus.outputs.log_output import stream_of
from tests.log.fleet import KEY, fleet
from tests.log.kinds import Nats
from tests.transport.loops import eventually

OTHER_TOPIC = "meta/Llama-3.1␟pod.b/engine␟0".encode()
OTHER = stream_of("eu", OTHER_TOPIC, 0).key


@pytest.fixture
def kind(nats):
    return Nats(nats)


async def test_a_worker_is_erased_its_writer_is_told_and_the_next_one_begins_anew(kind, caplog):
    place = kind.place(kind.server.address)
    async with fleet(kind) as log:
        one, other = log.leaf(), log.leaf(topic=OTHER_TOPIC)
        for leaf in (one, other):
            leaf.store(50)
            await leaf.written()
        readings = [await log.reading(), await log.reading(key=OTHER)]
        for reading, leaf in zip(readings, (one, other), strict=True):
            await reading.holds(leaf)
        before = await look(place)
        assert before.streams[KEY].records == 1
        assert before.streams[KEY].bytes > 50
        assert await erase(place, before, [KEY], states_too=False) == []
        assert set((await look(place)).streams) == {OTHER}
        info = await kind.api(f"STREAM.INFO.{kind.stream}", subjects_filter=f"{kind.stream}.{KEY}")
        assert info["state"]["subjects"] == {f"{kind.stream}.{KEY}": 1}
        assert set(await kind.open().pointers()) == {OTHER}
        await readings[0].until(lambda: not readings[0].blocks)
        one.store(1)
        await eventually(lambda: "or erased" in caplog.text, "the writer to say so")
        one.store(1)
        assert one.stats.dropped_batches == {"fenced": 2}
        other.store(5, gone=2)
        await readings[1].holds(other)
        again = log.leaf()
        again.store(7)
        await again.written()
        fresh = await log.reading()
        await fresh.holds(again)
        assert fresh.follower.epoch == 1


async def test_the_command_lists_asks_and_erases(kind, tmp_path):
    output = {"type": "nats", "endpoint": f"tcp://{kind.server.address}", **kind.settings()}
    config = tmp_path / "kvbus.yaml"
    config.write_text(json.dumps({"model": "m", "sources": [{"endpoint": "ipc:///e"}], "outputs": [output]}))

    async def ran(*args):
        return await asyncio.to_thread(CliRunner().invoke, main, ["log", "erase", "-c", str(config), *args])

    async with fleet(kind) as log:
        for topic in (OTHER_TOPIC, None):
            leaf = log.leaf() if topic is None else log.leaf(topic=topic)
            leaf.store(5)
            await leaf.written()
            await leaf.close()
        for args, code in (("--dry-run", 0), ("--worker=pod.a", 2)):
            done = await ran("--worker", "pod.a", args)
            assert (done.exit_code, KEY in done.output, OTHER in done.output) == (code, True, False)
        done = await ran("--worker", "pod.a", "--yes")
        assert (done.exit_code, "nothing of these streams is left" in done.output) == (0, True)
        assert set((await look(kind.place(kind.server.address))).streams) == {OTHER}
        assert "there is no such stream" in (await ran("--worker", "pod.a", "--yes")).output
    config.write_text(config.read_text().replace(kind.server.address, "127.0.0.1:9"))
    done = await ran("--worker", "pod.b")
    assert (done.exit_code, "cannot use the log at tcp://127.0.0.1:9" in done.output) == (69, True)
