"""A log in Redis or Valkey.

Each stream of kvbus has a Redis stream and a hash. The extra ``redis`` is required.

The Redis stream has the records. The hash has the pointer, and a random token of the writer that may append. Every
change is a Lua script. The script first compares the token in the hash with the token of its writer. So a former writer
is fenced: it cannot change anything.

The script also checks that the newest record is the one that the writer has appended last. This has two effects. An
append that is repeated because its answer was lost changes nothing. And kvbus notices that the server has lost records,
because a replica took over or because the server restarted without them. kvbus then appends the state again.

The position of a record is the time by the server's clock in microseconds. If the newest record already has this
position or a higher one, the record gets the next higher number. So positions ascend along a stream even if the server
has lost its records.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final
from uuid import uuid4

from redis.asyncio import Redis

from kvbus.parts.log.contract import (
    FOREIGN_ID,
    MAX_REFUSED,
    START,
    WRONG_TYPE,
    Entry,
    FencedError,
    Pointer,
    Refused,
    UnavailableError,
    next_epoch,
    take_pointer,
)
from kvbus.parts.log.location import REQUEST, RedisLocation, insisted
from kvbus.parts.log.redis_client import connected, is_of_wrong_type, names, seen, stop, translated_errors

POINTER_SECONDS: Final = 86_400
"""Time in seconds for which the server keeps the pointer of a stream that has no writer."""

REPLICATED: Final = 2.0
"""Timeout in seconds within which a replica has to confirm that it has the epoch of a newly claimed stream."""

MAX_RECORDS: Final = 64
"""Maximum number of records that are read from one stream in one request."""

BEHIND: Final = 16
"""Maximum number of lagging streams from which one request reads.

A stream lags if the last request returned :data:`MAX_RECORDS` records of it, so that Redis may have more.
"""

MAX_DIGITS: Final = 17
"""A number in a stream's hash is ignored if it has this number of digits or more: Lua cannot represent it exactly."""

MAX_NUMBER: Final = 2**53
"""Lowest number that Lua cannot represent exactly. No writer has an epoch or a position that is as high."""

FENCED: Final = -1
LOST: Final = -2
"""Result of a script that finds that the server has lost records.

:data:`FENCED` is the result of a script whose writer was fenced.
"""

READ: Final = """
local found = redis.call('HMGET', KEYS[2], 'epoch', 'last')
return {found[1] or '', found[2] or ''}
"""
"""A Lua script that returns the newest epoch, and the position of the newest record, from a stream's hash.

If the hash lacks one of the two, an empty string is returned in its place.
"""

CLAIM: Final = """
local found = redis.call('HMGET', KEYS[2], 'epoch', 'last')
if (found[1] or '') ~= ARGV[2] or (found[2] or '') ~= ARGV[3] then return -1 end
local newest = redis.call('XLEN', KEYS[1]) > 0 and ARGV[6] or '0'
redis.call('HSET', KEYS[2], 'token', ARGV[1], 'epoch', ARGV[4], 'seq', -1, 'last', newest)
redis.call('HSETNX', KEYS[2], 'position', 0)
redis.call('EXPIRE', KEYS[2], ARGV[5])
return tonumber(newest)
"""
"""A Lua script that claims a stream for a writer.

Its keys are the names of the stream's records and of its hash. Its arguments are a token, the epoch and the newest
position as :data:`READ` has returned them, the next epoch, the seconds for which to keep the pointer, and the newest
position as a number. It returns the newest position; 0 if there are no records; -1 if the epoch or the newest position
has changed since :data:`READ`.
"""

CHECK_TOKEN: Final = """
local token = redis.call('HGET', KEYS[2], 'token')
if not token then return -2 end
if token ~= ARGV[1] then return -1 end
"""

APPEND: Final = (
    CHECK_TOKEN
    + """
local last = redis.call('HGET', KEYS[2], 'last')
if last ~= ARGV[2] then
  return redis.call('HGET', KEYS[2], 'before') == ARGV[2] and tonumber(last) or -2
end
if last ~= '0' and redis.call('XLEN', KEYS[1]) == 0 then return -2 end
local time = redis.call('TIME')
local at = math.max(tonumber(last), tonumber(ARGV[3]), time[1] * 1000000 + time[2])
for i = 6, #ARGV do
  at = at + 1
  redis.call('XADD', KEYS[1], string.format('%.0f-0', at), 'r', ARGV[i])
end
redis.call('HSET', KEYS[2], 'before', ARGV[2], 'last', string.format('%.0f', at))
redis.call('EXPIRE', KEYS[1], ARGV[4])
redis.call('EXPIRE', KEYS[2], ARGV[5])
return at
"""
)
"""A Lua script that appends records.

Its arguments are the writer's token, the position of the record that the writer has appended last, a position that all
new records have to exceed, the seconds for which to keep the records, the seconds for which to keep the pointer, and
the records. It returns the last record's position.
"""

POINT: Final = (
    CHECK_TOKEN
    + """
local time = redis.call('TIME')
local old = time[1] * 1000000 + time[2] - ARGV[5] * 1000000
redis.call('HSET', KEYS[2], 'epoch', ARGV[2], 'seq', ARGV[3], 'position', ARGV[4])
redis.call('XTRIM', KEYS[1], 'MINID', string.format('%.0f-0', math.max(0, math.min(old, tonumber(ARGV[4])))))
return 0
"""
)
"""A Lua script that stores the pointer and deletes old records.

Its arguments are the writer's token, the pointer's epoch, seq and position, and a number of seconds. It deletes the
records before the pointer's position that are older than this number of seconds.
"""

KEEPS: Final = "return #redis.call('XRANGE', KEYS[1], ARGV[2], ARGV[2])"
"""A Lua script that returns the number of records with a given Redis id, which is 0 or 1.

Its arguments are the writer's token, which it does not use, and the id.
"""


def _number(text: bytes) -> int:
    """Return the number in a field of a stream's hash.

    Return 0 if the text is not a number, or if Lua cannot represent the number exactly.
    """
    found = int(text) if text.isdigit() and len(text) < MAX_DIGITS else 0
    return found if found < MAX_NUMBER else 0


def _judged(found: int) -> int:
    if found == FENCED:
        raise FencedError("another writer has claimed the stream")
    if found == LOST:
        raise UnavailableError("the server has lost records", "data_lost")
    return found


class RedisWriter:
    """A writer of one stream in Redis; see :class:`~kvbus.parts.log.contract.Writer`."""

    def __init__(self, location: RedisLocation, client: Redis, key: str, former: dict[str, tuple[int, int]]) -> None:
        self.epoch = 0
        self._location = location
        self._retention = int(location.retention)
        self._client = client
        self._key = key
        self._names = names(location, key)
        self._former = former
        self._token = uuid4().hex
        self._newest = self._floor = 0
        self._failure: FencedError | UnavailableError | None = None
        """The error after which this writer must not append any more; None if there was none."""

    async def claim(self) -> None:
        """Claim the stream: store this writer's token and the next epoch in the Redis hash that belongs to the stream.

        This method, not the Lua script :data:`CLAIM`, parses the old values of the hash. It counts an invalid value as
        0. In the script, an invalid value would be an error each time, and no writer could claim the stream.
        """
        former, floor = self._former.get(self._key, (0, START))
        moved = True
        while moved:
            epoch, last = await self._run(READ)
            self.epoch, position = next_epoch(max(former, _number(epoch))), _number(last)
            self._newest = await self._run(CLAIM, epoch, last, self.epoch, POINTER_SECONDS, position)
            moved = self._newest < START
        self._floor = max(floor, position)
        await insisted(self._replicated)
        self._former.pop(self._key, None)

    async def _replicated(self, seconds: float) -> None:
        """Wait until a replica has the new epoch. Do nothing if there is no replica.

        Without the epoch, a replica that becomes the primary could give the same epoch to another writer.

        Redis's command WAIT covers only the writes of its own connection, and this writer may have stored its epoch
        over another connection. So this method writes again before it sends WAIT.
        """
        async with translated_errors(self._location, seconds):
            role: Any = await self._client.role()
            wanted = min(1, len(role[2]))
            asked = self._client.pipeline(transaction=False)
            asked.expire(self._names[1], POINTER_SECONDS)
            asked.wait(wanted, int(1000 * REPLICATED))
            _, count = await asked.execute()
        if count < wanted:
            raise UnavailableError("no replica has confirmed the new epoch", "too_few_replicas")

    async def append(self, records: Sequence[bytes]) -> int:
        """Append all records in one script, which appends all of them or none."""
        self._newest = await self._changed(
            APPEND, self._newest, self._floor, self._retention, POINTER_SECONDS, *records
        )
        return self._newest

    async def point(self, pointer: Pointer) -> None:
        """Store the pointer. Delete the records before the pointer that are older than the retention time."""
        await self._changed(POINT, pointer.epoch, pointer.seq, pointer.position, self._retention)

    async def keeps(self, position: int) -> bool:
        """Return whether the log still has the stream's records from ``position`` on.

        Older records are deleted first. So it has them if it has the record at this position.
        """
        return bool(await self._run(KEEPS, f"{position}-0"))

    async def _changed(self, script: str, *args: Any) -> int:
        if self._failure is not None:
            raise self._failure
        try:
            return _judged(await self._run(script, *args))
        except (FencedError, UnavailableError) as error:
            self._failure = error
            self._former[self._key] = (self.epoch, max(self._newest, self._floor))
            raise

    async def _run(self, script: str, *args: Any) -> Any:
        registered = self._client.register_script(script)

        async def attempt(seconds: float) -> Any:
            async with translated_errors(self._location, seconds):
                return await registered(self._names, [self._token, *args])

        return await insisted(attempt)

    async def close(self) -> None:
        """Close the connection."""
        await stop(self._client)


class RedisReader:
    """A reader of streams in Redis; see :class:`~kvbus.parts.log.contract.Reader`."""

    def __init__(self, location: RedisLocation, starts: Mapping[str, int], refused: Refused) -> None:
        self._location = location
        self._refused = refused
        self._client: Redis | None = None
        self._keys = {names(location, key)[0].encode(): key for key in starts}
        self._next = {name: starts[key] for name, key in self._keys.items()}
        self._behind = dict.fromkeys(self._next)
        """The keys of lagging streams, of which the server may have more records. They are read in this order."""
        self._wrong: dict[bytes, None] = {}
        """Keys that hold no Redis stream, or one with a record whose id no writer of kvbus can have used.

        While the stream has such a record, a writer cannot append, and a reader that continued after the record would
        never see the records that come after its deletion. Each :meth:`take` checks one of them again.
        """
        self._asked = 0
        """Number of calls of :meth:`ends` so far.

        Redis is not asked for the ends of the streams. Instead, the number of a call stands for the ends at the time of
        the call: a stream that is read to its end later has been read at least that far.
        """
        self._level = dict.fromkeys(self._next, -1)
        """By stream: the number of the newest call of :meth:`ends` before the stream was last read to its end.

        The stream was thus read to the end that it had at that call. The number is -1 while Redis may have more records
        of the stream.
        """

    @contextlib.asynccontextmanager
    async def client(self, seconds: float = REQUEST) -> AsyncIterator[Redis]:
        """Yield the connection to the primary, for use in an ``async with`` block that may take up to ``seconds``.

        If the server fails, close the connection, because another server may be the primary now.

        Raises:
            UnavailableError: the server refuses a request, or has not answered in time.
        """
        try:
            async with translated_errors(self._location, seconds):
                if self._client is None:
                    self._client = await connected(self._location)
                yield self._client
        except UnavailableError:
            await self.close()
            raise

    async def take(self, seconds: float) -> list[Entry]:
        """Return the next records of all streams that do not lag, and of up to :data:`BEHIND` lagging streams.

        A stream lags if Redis may have more records of it. If no stream lags, wait up to ``seconds`` for new records.
        """
        await self._look_again()
        while True:
            some = list(self._behind)[:BEHIND]
            level = [name for name in self._next if name not in self._behind]
            wanted: dict[Any, Any] = {
                name: max(0, self._next[name] - 1) for name in (*some, *level) if name not in self._wrong
            }
            if not wanted:
                await asyncio.sleep(seconds)
                return []
            block = None if some else max(1, int(1000 * seconds))
            try:
                async with self.client(seconds + REQUEST) as client:
                    taken: Any = await client.xread(wanted, MAX_RECORDS, block)
            except UnavailableError as error:
                if error.reason != WRONG_TYPE:
                    raise
                await self._judge(wanted)
                continue
            self._level.update(dict.fromkeys(wanted, self._asked))
            for name in some:
                self._behind.pop(name, None)
            found = [entry for name, records in taken for entry in self._of(name, records)]
            if found or not some:
                return found

    async def _judge(self, names: Iterable[bytes]) -> None:
        """Find the keys among ``names`` that cannot be read (:attr:`_wrong`), and leave them out of further requests.

        This is necessary because the server refuses a complete request if it names one key of another type.
        """
        async with self.client() as client:
            asked = client.pipeline(transaction=False)
            for name in names:
                asked.xread({name: MAX_NUMBER - 1}, 1)
            for name, answer in zip(names, await asked.execute(raise_on_error=False), strict=True):
                if is_of_wrong_type(answer):
                    self._leave_out(name, WRONG_TYPE)
                elif isinstance(answer, Exception):
                    raise answer
                elif answer:
                    self._leave_out(name, FOREIGN_ID)

    def _leave_out(self, name: bytes, reason: str) -> None:
        self._wrong[name] = None
        self._behind.pop(name, None)
        self._refused.append((reason, self._keys[name]))

    async def _look_again(self) -> None:
        """Check again one key that kvbus has stopped reading (:attr:`_wrong`). If it can be read now, read it again."""
        if self._wrong:
            name = next(iter(self._wrong))
            del self._wrong[name]
            await self._judge([name])

    def _of(self, name: bytes, records: list[tuple[bytes, dict[bytes, bytes]]]) -> Iterator[Entry]:
        if len(records) == MAX_RECORDS:
            self._behind[name] = None
            self._level[name] = -1
        for at, fields in records:
            position = int(at.partition(b"-")[0])
            if position >= MAX_NUMBER:
                self._leave_out(name, FOREIGN_ID)
                return
            self._next[name] = position + 1
            yield Entry(self._keys[name], position, fields.get(b"r", b""), position / 1_000_000)

    async def ends(self) -> dict[str, int]:
        """Return a number for each stream that stands for the present end of the stream.

        The number says how many times this method was called. When a later read has found the end of a stream,
        :meth:`reached` returns at least this number for the stream.

        The stream's newest position, which its writer stores in Redis, cannot stand for the end. The writer can store
        any number there, and then no reader would ever reach it.
        """
        self._asked += 1
        return dict.fromkeys(self._keys.values(), self._asked)

    async def reached(self, key: str) -> int:
        """Return how many times :meth:`ends` had been called when this stream was last read to its end.

        If the key cannot be read (:attr:`_wrong`), return the number of all calls, so that the stream counts as read.
        """
        name = names(self._location, key)[0].encode()
        return self._asked if name in self._wrong else self._level[name]

    async def close(self) -> None:
        """Close the connection."""
        client, self._client = self._client, None
        if client is not None:
            await stop(client)


class RedisLog:
    """A log in Redis; see :class:`~kvbus.parts.log.contract.Log`.

    Args:
        location: the servers, the database and the prefix of the key names.
    """

    def __init__(self, location: RedisLocation) -> None:
        self._location = location
        self.refused: Refused = Refused(maxlen=MAX_REFUSED)
        self._former: dict[str, tuple[int, int]] = {}
        """By stream key: the epoch and the newest position of this process's last failed writer.

        The server may have lost them, so they are kept here: the next writer needs a higher epoch and later positions.
        """

    async def claim(self, key: str) -> RedisWriter:
        """Become the writer of a stream: store a new token and the next epoch in the stream's hash."""
        async with translated_errors(self._location):
            client = await connected(self._location)
        writer = RedisWriter(self._location, client, key, self._former)
        try:
            await writer.claim()
        except BaseException:
            await stop(client)
            raise
        return writer

    async def pointers(self, key: str | None = None) -> dict[str, Pointer]:
        """Return the pointer of every stream in the database, or only that of the stream ``key``.

        The pointer of a stream is in its Redis hash.
        """
        found: dict[str, Pointer] = {}
        async with translated_errors(self._location):
            client = await connected(self._location)
        try:
            if key is not None:
                return await self._pointers(client, [key])
            async with contextlib.aclosing(seen(self._location, client, self.refused)) as groups:
                async for keys in groups:
                    found.update(await self._pointers(client, keys))
        finally:
            await stop(client)
        return found

    async def _pointers(self, client: Redis, keys: Sequence[str]) -> dict[str, Pointer]:
        async with translated_errors(self._location):
            asked = client.pipeline(transaction=False)
            for key in keys:
                asked.hmget(names(self._location, key)[1], "epoch", "seq", "position")
            found: dict[str, Pointer] = {}
            for key, row in zip(keys, await asked.execute(raise_on_error=False), strict=True):
                if is_of_wrong_type(row):
                    self.refused.append((WRONG_TYPE, key))
                elif isinstance(row, Exception):
                    raise row
                else:
                    take_pointer(found, self.refused, key, [field or b"" for field in row] if any(row) else [])
        return found

    async def read(self, starts: Mapping[str, int]) -> RedisReader:
        """Return a reader that reads all these streams over one connection."""
        reader = RedisReader(self._location, starts, self.refused)
        try:
            async with reader.client() as client:
                await client.ping()
        except BaseException:
            await reader.close()
            raise
        return reader
