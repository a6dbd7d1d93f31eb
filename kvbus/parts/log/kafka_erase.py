"""The end of streams in Kafka: what a topic holds of them, and its removal.

Kafka deletes a partition's records only up to an offset, whosever they are. So the records of other streams go too, and
where one has its state among them, a reader that begins cannot rebuild it until its writer's next state. An erasure
stops short of such a state unless it is asked not to.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection

from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete

from kvbus.parts.log.inventory import Erased, Held, Inventory, count, finish
from kvbus.parts.log.kafka import KafkaLog
from kvbus.parts.log.kafka_client import client_options
from kvbus.parts.log.kafka_errors import cause, said
from kvbus.parts.log.place import Place


async def look(place: Place) -> Inventory:
    """Read both topics from their beginning to their end.

    Raises:
        UnavailableError: they cannot be read.
    """
    wrong = await cause(place)  # sooner than the client, which waits for a topic to appear
    if wrong is not None:
        raise wrong
    log = KafkaLog(place)
    found = Inventory(pointers=await log.pointers())
    async with contextlib.aclosing(log.everything(place.topic)) as records:
        async for record in records:
            key = (record.key or b"").decode(errors="replace")
            held = found.streams.setdefault(key, Held(record.partition, first=record.offset))
            count(held, record.offset, record.value or b"")
    found.leave_out_erased()
    return found


async def erase(place: Place, before: Inventory, keys: Collection[str], *, states_too: bool) -> list[Erased]:
    """End these streams, and delete their records as far as that may be.

    Whoever writes one is fenced. Readers are sent its end, its pointer goes, and so does every record before that end,
    which stays for readers to see.

    Args:
        place: where the log is.
        before: what it holds.
        keys: of the streams.
        states_too: delete the states of other streams that are among the records.

    Raises:
        FencedError: somebody has claimed one of the streams meanwhile; run it again.
        UnavailableError: the broker did not do it all; run it again.
    """
    log = KafkaLog(place)
    for key in keys:
        if not before.ended(key):  # one more end would be one more record to delete
            await finish(log, key)
    found = await look(place)
    ends: dict[int, int] = {}
    for key in keys:
        held = found.streams.get(key)
        if held is not None:
            ends[held.partition] = max(held.content + 1, ends.get(held.partition, 0))
    done = []
    for partition, end in sorted(ends.items()):
        states = {
            key: need
            for key, held in found.streams.items()
            if held.partition == partition and (need := found.needs(key)) is not None and need < end
        }
        reached = end if states_too else min([end, *states.values()])
        done.append(Erased(partition, end, reached, tuple(sorted(states))))
    await _delete(place, {each.partition: each.reached for each in done})
    return done


async def _delete(place: Place, before: dict[int, int]) -> None:
    async with said(place):
        admin = AIOKafkaAdminClient(**client_options(place, place.options()))
        try:
            await admin.start()
            wanted = {TopicPartition(place.topic, number): RecordsToDelete(offset) for number, offset in before.items()}
            await admin.delete_records(wanted)
        finally:
            await admin.close()
