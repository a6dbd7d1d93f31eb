"""Tests that replace the processes around a log one after the other, also by other versions, while engines publish.

Afterwards no router has a wrong block.
"""

from __future__ import annotations

import contextlib
import re

import msgspec

from kvbus.parts.log.record import SCHEMA, Stream
from tests.doubles.bus import eventually
from tests.log.kinds import Kafka, Nats, Redis
from tests.log.later import NEXT
from tests.log.processes import ADDITIVE, BREAKING, FORMER, NOW
from tests.log.rolling import PATIENCE, RECORDS, Region

FIELDS = 11
"""Number of fields of a record that this version writes."""

UNREAD = "a schema that this version does not read"


@contextlib.asynccontextmanager
async def region(kind, server, directory):
    with contextlib.ExitStack() as stack:
        await kind.make()
        made = Region(kind, server, directory, stack)
        await made.start()
        yield made


async def fields_of_records(kind):
    """Return, by worker, how many fields the records of its stream have, from the newest state on.

    Records of versions that add fields have more fields, so the number shows which versions wrote the records.
    """
    log = kind.open()
    pointers = await log.pointers()
    reader = await log.read({key: pointer.position for key, pointer in pointers.items()})
    found: dict[str, set[int]] = {Stream.parse(key).worker: set() for key in pointers}
    while not all(found.values()):
        for entry in await reader.take(1.0):
            if entry.position >= pointers[entry.key].position:
                found[Stream.parse(entry.key).worker].add(len(msgspec.msgpack.decode(entry.data)))
    await reader.close()
    return found


async def test_upgrades_that_only_add_fields_can_have_any_order(kafka, tmp_path):
    kind = Kafka(kafka)
    async with region(kind, kafka, tmp_path) as here:
        (leaf, other_leaf), (one, other) = here.leaves, here.aggregators
        for process in (leaf, one):
            await here.replace(process, ADDITIVE)
            await here.quiet()
        await here.restart_server()
        await here.quiet()
        for process in (other, other_leaf):
            await here.replace(process, ADDITIVE)
            await here.quiet()
        for process in (one, leaf):
            await here.replace(process, NOW)
            await here.quiet()
        assert await fields_of_records(kind) == {"pod-0/engine": {FIELDS}, "pod-1/engine": {FIELDS + 2}}
        for leaf in here.leaves:
            here.dropped.update(leaf.counts("kvbus_output_dropped_batches_total"))
        assert here.dropped.keys() <= {"log_unavailable"}, "while the server was away, and counted"
        for each in here.aggregators:
            assert each.counts(RECORDS).keys() <= {"known", "double", "old_epoch"}


async def test_records_of_a_later_schema_are_refused_until_readers_are_upgraded(redis, tmp_path):
    assert NEXT > SCHEMA
    async with region(Redis(redis), redis, tmp_path) as here:
        (leaf, other_leaf), (one, other) = here.leaves, here.aggregators
        topic = here.topics[0]
        await here.replace(leaf, BREAKING)  # the wrong order: no reader can read the new records yet
        here.pause()
        for router in here.routers:
            await eventually(lambda router=router: topic not in router.held, f"no block at {router.at}", PATIENCE)
        await here.quiet(topic, one, other)
        for each in (one, other):
            counted = each.counts(RECORDS)
            assert counted["other_schema"] > 0
            assert (counted["expired"], counted.keys() & {"malformed", "damaged"}) == (1, set())
            assert UNREAD in each.said
        await here.replace(one, BREAKING)
        await here.quiet(topic, other)
        await here.replace(other, BREAKING)
        await here.quiet()
        await here.replace(other_leaf, BREAKING)
        await here.quiet()
        for process in (leaf, other_leaf, one, other):  # the way back: writers first
            await here.replace(process, NOW)
            await here.quiet()
        assert all("other_schema" not in each.counts(RECORDS) for each in (one, other))


async def test_a_writer_of_the_former_schema_is_refused_until_it_is_upgraded(nats, tmp_path):
    async with region(Nats(nats), nats, tmp_path) as here:
        leaf, (one, other) = here.leaves[0], here.aggregators
        topic = here.topics[0]
        await here.replace(leaf, FORMER)
        here.pause()
        for router in here.routers:
            await eventually(lambda router=router: topic not in router.held, f"no block at {router.at}", PATIENCE)
        await here.quiet(topic, one, other)
        for each in (one, other):
            counted = each.counts(RECORDS)
            assert counted["other_schema"] > 0
            assert (counted["expired"], counted.keys() & {"malformed", "damaged"}) == (1, set())
            assert re.search(rf"pod-0%2Fengine\.0' has records of {UNREAD}", each.said)
        await here.replace(leaf, NOW)
        await here.quiet()
