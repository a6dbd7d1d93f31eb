"""Streams erased from Kafka: nothing of them can be read afterwards, and who shares their partition stays exact."""

import asyncio
import contextlib
import json

import pytest
from click.testing import CliRunner

from kvbus.cli import main
from kvbus.parts.log.inventory import over
from kvbus.parts.log.kafka import KafkaLog
from kvbus.parts.log.kafka_erase import erase, look
from kvbus.parts.outputs.log_output import stream_of
from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.payloads import payload, store
from tests.log.fleet import KEY, fleet
from tests.log.kinds import Kafka
from tests.system.bus import running_bus
from tests.transport.loops import eventually

OTHER_TOPIC = "meta/Llama-3.1␟pod.b/engine␟0".encode()
OTHER = stream_of("eu", OTHER_TOPIC, 0).key
TOKEN = 123_456_789
ENCODED = b"\xce" + TOKEN.to_bytes(4, "big")
"""That token as it stands in msgpack."""


async def records_of(place, topic):
    """Key and value of everything that can be read."""
    async with contextlib.aclosing(KafkaLog(place).everything(topic)) as records:
        return [(record.key.decode(), record.value) async for record in records]


async def keys_of(place, topic):
    """Streams of which more can be read than their ends."""
    return {key for key, value in await records_of(place, topic) if not over(value)}


async def ends_of(place, topic):
    return [key for key, value in await records_of(place, topic) if over(value)]


async def erased(place, *, states_too=False):
    return await erase(place, await look(place), [KEY], states_too=states_too)


async def next_state(leaf):
    """Batches are let go, and the state follows."""
    before = leaf.stats.states_sent["lost"]
    for _ in range(20):
        leaf.store(1)
    await eventually(lambda: leaf.stats.states_sent["lost"] > before, "a state")


@pytest.fixture
def kind(kafka):
    return Kafka(kafka, partitions=1)


async def test_a_worker_is_erased_once_no_other_needs_what_is_before_its_end(kind, caplog):
    place = kind.place(kind.broker.address)
    async with fleet(kind) as log:
        one, other = log.leaf(), log.leaf(topic=OTHER_TOPIC, queue_batches=5)
        for leaf in (one, other):
            leaf.store(50)
            await leaf.written()
        one.store(5)
        await one.written()
        readings = [await log.reading(), await log.reading(key=OTHER)]
        for reading, leaf in zip(readings, (one, other), strict=True):
            await reading.holds(leaf)

        (first,) = await erased(place)
        assert first.states == (OTHER,)
        assert first.reached < first.wanted
        assert KEY in await keys_of(place, kind.topic)
        assert (await records_of(place, place.pointers))[-1] == (KEY, None)
        await readings[0].until(lambda: not readings[0].blocks)
        await (await log.reading(key=OTHER)).holds(other)
        one.store(1)
        await eventually(lambda: "or erased" in caplog.text, "the writer to say so")
        one.store(1)
        assert one.stats.dropped_batches == {"fenced": 2}

        await next_state(other)
        (second,) = await erased(place)
        assert (second.states, second.reached) == ((), second.wanted)
        assert await keys_of(place, kind.topic) == {OTHER}
        assert await ends_of(place, kind.topic) == [KEY], "once, for readers to see"
        assert set(await kind.open().pointers()) == set((await look(place)).streams) == {OTHER}
        await (await log.reading(key=OTHER)).holds(other)

        again = log.leaf()
        again.store(7)
        await again.written()
        fresh = await log.reading()
        await fresh.holds(again)
        assert fresh.follower.counts["old_epoch"] == 0


async def test_states_of_others_go_on_request_and_come_again(kind):
    place = kind.place(kind.broker.address)
    async with fleet(kind) as log:
        other, one = log.leaf(topic=OTHER_TOPIC, queue_batches=5), log.leaf()
        other.store(50)
        await other.written()
        one.store(5)
        await one.written()
        reading = await log.reading(key=OTHER)
        await reading.holds(other)
        (done,) = await erased(place, states_too=True)
        assert (done.states, done.reached) == ((OTHER,), done.wanted)
        assert await keys_of(place, kind.topic) <= {OTHER}
        await reading.holds(other)
        await next_state(other)
        await (await log.reading(key=OTHER)).holds(other)
        assert reading.follower.counts["lost"] == 0


async def two_written(log):
    """The other stream's leaf and ours, each with blocks in the log."""
    leaves = log.leaf(topic=OTHER_TOPIC), log.leaf()
    for leaf in leaves:
        leaf.store(5)
        await leaf.written()
    return leaves


async def test_a_gone_stream_and_one_whose_state_is_later_hold_nothing_up(kind):
    place = kind.place(kind.broker.address)
    async with fleet(kind) as log:
        other, _ = await two_written(log)
        other.driver.retire(0)
        await other.close()
        assert (await look(place)).needs(OTHER) is None
        (done,) = await erased(place)
        assert (done.states, done.reached) == ((), done.wanted)
        assert await keys_of(place, kind.topic) == set()
        assert await ends_of(place, kind.topic) == [OTHER, KEY], "each is behind what was told"


async def test_the_command_lists_asks_and_erases(kind, tmp_path):
    await kind.make()
    output = {"type": "kafka", "endpoint": f"tcp://{kind.broker.address}", "kafka": {"topic": kind.topic}}
    config = tmp_path / "kvbus.yaml"
    config.write_text(json.dumps({"model": "m", "sources": [{"endpoint": "ipc:///e"}], "outputs": [output]}))

    async def ran(*args):
        command = ["log", "erase", "-c", str(config), *args]
        return await asyncio.to_thread(CliRunner().invoke, main, command)

    place = kind.place(kind.broker.address)
    async with fleet(kind) as log:
        for leaf in await two_written(log):
            await leaf.close()
        worker = ("--worker", "pod.a", "--cluster", "eu", "--of-model", "meta/Llama-3.1")
        assert (await ran()).exit_code == 2
        for args, code in (((*worker, "--dry-run"), 0), (worker, 2)):
            done = await ran(*args)
            assert (done.exit_code, KEY in done.output, OTHER in done.output) == (code, True, False)
            assert await keys_of(place, kind.topic) == {KEY, OTHER}
        for wrong in (("--worker", "pod"), ("--worker", "pod.a", "--cluster", "us")):
            assert "there is no such stream" in (await ran(*wrong, "--yes")).output
        done = await ran(*worker, "--yes")
        assert (done.exit_code, "run it again after state_every" in done.output) == (1, True)
        done = await ran(*worker, "--states-too", "--yes")
        assert (done.exit_code, OTHER in done.output) == (0, True)
        assert await keys_of(place, kind.topic) == set()
        assert (await ran("--worker", "pod.b/engine", "--yes")).exit_code == 0
        assert await kind.open().pointers() == {}
    config.write_text(config.read_text().replace(kind.topic, "not-there"))
    done = await ran(*worker)
    assert (done.exit_code, "there is no such topic" in done.output) == (69, True)


@pytest.mark.parametrize("tokens", [None, "keep"])
async def test_tokens_are_in_no_record_unless_asked_for(kind, tokens):
    await kind.make()
    place = kind.place(kind.broker.address)
    output = {
        "type": "kafka",
        "endpoint": f"tcp://{kind.broker.address}",
        "replay_endpoint": None,
        "kafka": {"topic": kind.topic},
        **({} if tokens is None else {"token_ids": tokens}),
    }
    async with (
        running_bus(output=output, model="m") as bus,
        EnginePublisher(bus.engine, bus.engine_replay, bind=True) as engine,
    ):
        stats = bus.daemon.outputs.stats[0]
        for wait in (lambda: stats.states_sent["subscribed"], lambda: stats.batches):  # a state, then a batch behind it
            engine.publish(payload(store([engine.next_seq + 1], tokens=[TOKEN] * 16)))
            await eventually(lambda: bus.caught_up(engine.next_seq - 1), "what was published")
            await eventually(wait, "it in the log")
    values = [value for _, value in await records_of(place, kind.topic)]
    assert len(values) >= 2
    assert any(ENCODED in value for value in values) is (tokens == "keep")
