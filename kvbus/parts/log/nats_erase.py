"""The end of streams in NATS: what JetStream holds of them, and its removal. No other stream is touched."""

from __future__ import annotations

from collections.abc import Collection

from kvbus.parts.log.inventory import Erased, Held, Inventory, count, finish
from kvbus.parts.log.nats import NatsLog
from kvbus.parts.log.nats_client import Link
from kvbus.parts.log.nats_reader import SHIFT, Pulled, records_of
from kvbus.parts.log.place import NatsPlace


async def look(place: NatsPlace) -> Inventory:
    """Read both streams; what is erased but for its end is left out.

    Raises:
        UnavailableError: they cannot be read.
    """
    found = Inventory(pointers=await NatsLog(place).pointers())
    link = Link(place)
    try:
        pulled = Pulled(link, place.keys.stream, 1)
        while not await pulled.level():
            for sequence, message in await pulled.take(1.0):
                _hold(found, message.subject.removeprefix(f"{place.keys.stream}."), sequence, message.data)
    finally:
        await link.close()
    found.leave_out_erased()
    return found


def _hold(found: Inventory, key: str, sequence: int, data: bytes) -> None:
    for number, record in enumerate(records_of(data)):
        position = (sequence << SHIFT) + number
        held = found.streams.setdefault(key, Held(first=position))
        if position > held.last:  # what did not follow is read again, and what was taken in between with it
            count(held, position, record)


async def erase(place: NatsPlace, before: Inventory, keys: Collection[str], *, states_too: bool) -> list[Erased]:
    """End these streams, and delete their pointers and records but for the end itself, which readers are to see.

    Args:
        place: where the log is.
        before: what it holds.
        keys: of the streams.
        states_too: of Kafka; here no other stream has anything to lose.

    Returns:
        Nothing: no more than the ends is left.

    Raises:
        FencedError: somebody has claimed one of the streams meanwhile; run it again.
        UnavailableError: the server did not do it all; run it again.
    """
    del before, states_too
    log, link = NatsLog(place), Link(place)
    try:
        for key in keys:
            await finish(log, key)
            await link.api(f"STREAM.PURGE.{place.keys.stream}", filter=f"{place.keys.stream}.{key}", keep=1)
    finally:
        await link.close()
    return []
