"""Streams erased from NATS and Redis: nothing of them can be read afterwards, and the others are as they were.

What Kafka deletes is not of one stream alone: ``test_kafka_erase.py``.
"""

import asyncio
import json

import pytest
from click.testing import CliRunner

from kvbus.cli import main
from kvbus.parts.log import nats_erase, redis_erase
from kvbus.parts.log.redis_client import names
from kvbus.parts.outputs import appending
from kvbus.parts.outputs.log_output import stream_of
from tests.log.fleet import KEY, fleet
from tests.log.kinds import Nats, Redis
from tests.transport.loops import eventually

OTHER_TOPIC = "meta/Llama-3.1␟pod.b/engine␟0".encode()
OTHER = stream_of("eu", OTHER_TOPIC, 0).key


class ErasedNats(Nats):
    erase, look = staticmethod(nats_erase.erase), staticmethod(nats_erase.look)
    away = "cannot use the log at tcp://127.0.0.1:9"

    async def nothing_but_the_end_is_left(self):
        info = await self.api(f"STREAM.INFO.{self.stream}", subjects_filter=f"{self.stream}.{KEY}")
        assert info["state"]["subjects"] == {f"{self.stream}.{KEY}": 1}


class ErasedRedis(Redis):
    erase, look = staticmethod(redis_erase.erase), staticmethod(redis_erase.look)
    away = "ConnectionError"

    async def nothing_but_the_end_is_left(self):
        records, pointer = names(self.place(""), KEY)
        async with self.server.client() as client:
            assert set(await client.hgetall(pointer)) == {"token", "ended", "last"}
            assert 0 < await client.ttl(pointer) <= 86_400
            assert await client.xlen(records) == 1
            assert 0 < await client.ttl(records) <= 300


@pytest.fixture(params=["nats", "redis"])
def kind(request):
    server = request.getfixturevalue(request.param)
    return {"nats": ErasedNats, "redis": ErasedRedis}[request.param](server)


async def test_a_worker_is_erased_its_writer_is_told_and_the_next_one_begins_anew(kind, caplog, monkeypatch):
    monkeypatch.setattr(appending, "LEASE", 1000.0)  # no record but those of the blocks, however long this takes
    place = kind.place(kind.server.address)
    async with fleet(kind) as log:
        one, other = log.leaf(), log.leaf(topic=OTHER_TOPIC)
        for leaf in (one, other):
            leaf.store(50)
            await leaf.written()
        readings = [await log.reading(), await log.reading(key=OTHER)]
        for reading, leaf in zip(readings, (one, other), strict=True):
            await reading.holds(leaf)
        before = await kind.look(place)
        assert before.streams[KEY].records == 1
        assert before.streams[KEY].bytes > 50
        assert await kind.erase(place, before, [KEY], states_too=False) == []
        assert set((await kind.look(place)).streams) == {OTHER}
        await kind.nothing_but_the_end_is_left()
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
        assert fresh.follower.counts["old_epoch"] == 0


async def test_the_command_lists_asks_and_erases(kind, tmp_path):
    keys = kind.settings()
    output = {"type": next(iter(keys)), "endpoint": f"tcp://{kind.server.address}", **keys}
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
        assert set((await kind.look(kind.place(kind.server.address))).streams) == {OTHER}
        assert "there is no such stream" in (await ran("--worker", "pod.a", "--yes")).output
    config.write_text(config.read_text().replace(kind.server.address, "127.0.0.1:9"))
    done = await ran("--worker", "pod.b")
    assert (done.exit_code, kind.away in done.output) == (69, True)
