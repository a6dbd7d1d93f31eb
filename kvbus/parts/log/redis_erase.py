"""The end of streams in Redis: what the server holds of them, and its removal. No other stream is touched."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import Any

from redis.asyncio import Redis

from kvbus.parts.log.inventory import Erased, Held, Inventory, finish, over
from kvbus.parts.log.place import RedisPlace
from kvbus.parts.log.redis import RedisLog
from kvbus.parts.log.redis_client import names, opened, said, seen


async def look(place: RedisPlace) -> Inventory:
    """Look at both keys of every stream that is not erased.

    Raises:
        UnavailableError: they cannot be read.
    """
    log = RedisLog(place)
    found = Inventory(pointers=await log.pointers())
    async with opened(place) as client, contextlib.aclosing(seen(place, client, "stream", log.refused)) as groups:
        async for keys in groups:
            for key in keys:
                async with said(place):
                    held = await _held(client, names(place, key)[0])
                if held is not None and not (held.over and key not in found.pointers):
                    found.streams[key] = held
    return found


async def _held(client: Redis, name: str) -> Held | None:
    asked: Any = client.pipeline(transaction=False)
    asked.xlen(name).memory_usage(name, samples=0).xrange(name, count=1).xrevrange(name, count=1)
    count, size, first, last = await asked.execute()
    if not first or not last:
        return None  # it has gone since
    (at, fields) = last[0]
    return Held(-1, count, size, _position(first[0][0]), _position(at), over(fields.get(b"r", b"")))


def _position(at: bytes) -> int:
    return int(at.partition(b"-")[0])


async def erase(place: RedisPlace, before: Inventory, keys: Collection[str], *, states_too: bool) -> list[Erased]:
    """End these streams, and delete their pointers and records but for the end itself, which readers are to see.

    Whoever writes one is fenced, and learns of it for a day.

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
    log = RedisLog(place)
    for key in keys:
        await finish(log, key)
    return []
