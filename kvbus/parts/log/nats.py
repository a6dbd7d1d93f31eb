"""A log in NATS JetStream, with one JetStream stream for records and one for pointers.

The extra ``nats`` is required.

The subject of a message has the key of kvbus's stream, and a message holds the records of one append. A header of each
message has the sequence of the message that the writer expects to be the newest of the subject. If another message is
the newest, JetStream refuses the new message. A writer that claims the stream appends a message without records. So
JetStream refuses the next message of the former writer.

Each message has an id. So a message that is sent again because its answer was lost is stored only once.
"""

from __future__ import annotations

import asyncio
import contextlib
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final
from uuid import uuid4

import msgspec
from nats.js.errors import APIError

from kvbus.parts.log.contract import (
    MAX_REFUSED,
    START,
    FencedError,
    Pointer,
    Refused,
    UnavailableError,
    next_turn,
    read_pointer,
    take_pointer,
    write_pointer,
)
from kvbus.parts.log.location import REQUEST, NatsLocation, insisted
from kvbus.parts.log.nats_client import ATTEMPT, NO_MESSAGE, WRONG_SEQUENCE, Link, refused
from kvbus.parts.log.nats_reader import AFTER, SHIFT, NatsReader

MOST_BYTES: Final = 768 * 1024
"""Maximum size in bytes of a message with several records. NATS servers usually accept up to 1 MiB."""

MAX_REQUESTS: Final = 64
"""Maximum number of requests for pointers that wait for their answers at the same time."""


class _MovedError(Exception):
    """JetStream has refused a message, because the newest message of its subject is not the expected one."""


class NatsWriter:
    """A writer of one stream in NATS; see :class:`~kvbus.parts.log.contract.Writer`."""

    def __init__(self, location: NatsLocation, key: str, former: dict[str, int]) -> None:
        self.epoch = 0
        self._location = location
        self._key = key
        self._former = former
        self._link = Link(location)
        self._token = uuid4().hex
        self._sent = 0
        self._newest = 0
        """JetStream's sequence of the newest message with records of this stream."""
        self._pointer = 0
        """JetStream's sequence of the message with this stream's pointer."""
        self._failure: FencedError | UnavailableError | None = None
        """The error after which this writer must not append any more; None if there was none."""

    async def claim(self) -> None:
        """Store the pointer of the next epoch, and then append a message that fences the former writer.

        If two writers claim the stream at the same time, that with the newer pointer must also have the newer message.
        Therefore a writer looks up the newest message first, and then checks the pointer. If the other writer claims
        the stream after this check, JetStream refuses this writer's message, as it does not follow the newest message.
        """
        while True:
            newest, _ = await newest_of(self._link, self._location.keys.stream, self._key)
            at, data = await newest_of(self._link, self._location.pointers, self._key)
            try:
                if not self._pointer:
                    turn = next_turn(_pointer(data), self._former.get(self._key, 0))
                    self.epoch = turn.epoch
                    self._pointer = await self._publish(self._location.pointers, write_pointer(turn), at)
                elif at != self._pointer:
                    raise FencedError("another writer has claimed the stream")
                self._newest = await self._publish(self._location.keys.stream, b"", newest)
            except _MovedError:
                continue
            self._former.pop(self._key, None)
            return

    async def append(self, records: Sequence[bytes]) -> int:
        """Append the records in one message, or in several messages if they are large.

        Return the position of the last record.
        """
        position = START
        for group in _groups(records):
            data = msgspec.msgpack.encode(group)
            self._newest = await self._own(self._location.keys.stream, data, self._newest)
            position = (self._newest << SHIFT) + len(group) - 1
        return position

    async def point(self, pointer: Pointer) -> None:
        """Store the pointer as the newest message of its subject."""
        self._pointer = await self._own(self._location.pointers, write_pointer(pointer), self._pointer)

    async def keeps(self, position: int) -> bool:
        """Return whether JetStream still has the stream's records from ``position`` on.

        It has them if the first sequence of the JetStream stream is not after the position. JetStream's limits apply to
        all subjects of a JetStream stream together, so the oldest messages are deleted first.
        """
        info = await self._link.api(f"STREAM.INFO.{self._location.keys.stream}")
        return bool(info["state"]["first_seq"] <= position >> SHIFT)

    async def _own(self, stream: str, data: bytes, expected: int) -> int:
        if self._failure is not None:
            raise self._failure
        try:
            try:
                return await self._publish(stream, data, expected)
            except _MovedError:
                raise await self._why() from None
        except (FencedError, UnavailableError) as error:
            self._failure = error
            self._former[self._key] = self.epoch
            raise

    async def _why(self) -> FencedError | UnavailableError:
        """Return the error to raise after JetStream has refused a message of this writer.

        JetStream refuses a message if the subject's newest message is not the one that the writer expects. Either
        another writer has claimed the stream, or the server has lost messages.
        """
        at, data = await newest_of(self._link, self._location.pointers, self._key)
        pointer = _pointer(data)
        if at == self._pointer or not at or (pointer is not None and pointer.epoch < self.epoch):
            return UnavailableError("the server has lost records", "data_lost")
        return FencedError("another writer has claimed the stream")

    async def _publish(self, stream: str, data: bytes, expected: int) -> int:
        self._sent += 1
        headers = {
            "Nats-Expected-Stream": stream,
            AFTER: str(expected),
            "Nats-Msg-Id": f"{self._token}.{self._sent}",
        }

        async def attempt(seconds: float) -> Any:
            return await self._link.ask(f"{stream}.{self._key}", data, min(seconds, ATTEMPT), headers)

        try:
            answer = await insisted(attempt)
        except APIError as error:
            if error.err_code in WRONG_SEQUENCE:
                raise _MovedError from error
            raise refused(error) from error
        sequence: int = answer["seq"]
        return sequence

    async def close(self) -> None:
        """Close the connection."""
        await self._link.close()


async def newest_of(link: Link, stream: str, key: str) -> tuple[int, bytes]:
    """Return the sequence and the data of the newest message with the key ``key`` in a JetStream stream.

    If there is no such message, return 0 and empty data.
    """
    subject = f"$JS.API.STREAM.MSG.GET.{stream}"
    wanted = msgspec.json.encode({"last_by_subj": f"{stream}.{key}"})

    async def attempt(seconds: float) -> tuple[int, bytes]:
        try:
            found = (await link.ask(subject, wanted, min(seconds, ATTEMPT)))["message"]
        except APIError as error:
            if error.err_code == NO_MESSAGE:
                return 0, b""
            raise refused(error) from error
        return found["seq"], b64decode(found.get("data", ""))

    return await insisted(attempt)


def _pointer(data: bytes) -> Pointer | None:
    """Decode the pointer in a message. Return None if the data is empty or is not a pointer."""
    with contextlib.suppress(ValueError):
        return read_pointer(data)
    return None


def _groups(records: Sequence[bytes]) -> Iterator[list[bytes]]:
    group: list[bytes] = []
    size = 0
    for record in records:
        if group and (size + len(record) > MOST_BYTES or len(group) == 1 << SHIFT):
            yield group
            group, size = [], 0
        group.append(record)
        size += len(record)
    yield group


class NatsLog:
    """A log in NATS; see :class:`~kvbus.parts.log.contract.Log`.

    Args:
        location: the servers, and the name of the JetStream stream of records. This JetStream stream and the one of
            pointers have to exist.
    """

    def __init__(self, location: NatsLocation) -> None:
        self._location = location
        self.refused: Refused = Refused(maxlen=MAX_REFUSED)
        self._former: dict[str, int] = {}
        """For each stream, the epoch of the newest writer that has failed in this process, by the stream's key.

        The next writer needs a higher epoch. The process remembers the epoch, because the server may have lost it.
        """

    async def claim(self, key: str) -> NatsWriter:
        """Become the writer of a stream: store the next pointer, and append a message that fences the former writer."""
        writer = NatsWriter(self._location, key, self._former)
        try:
            await writer.claim()
        except BaseException:
            await writer.close()
            raise
        return writer

    async def pointers(self, key: str | None = None) -> dict[str, Pointer]:
        """Return the newest pointer of each stream, or only that of one stream.

        Each pointer is the newest message of its subject. The messages are read through JetStream's API, whose JSON
        answers contain headers and data in base64. So unusual subjects and headers in other clients' messages cannot
        break the reading.
        """
        found: dict[str, Pointer] = {}
        link = Link(self._location)
        try:
            keys = [key] if key is not None else await self._subjects(link)
            for begin in range(0, len(keys), MAX_REQUESTS):
                part = keys[begin : begin + MAX_REQUESTS]
                newest = await asyncio.gather(*(newest_of(link, self._location.pointers, name) for name in part))
                for name, (_, data) in zip(part, newest, strict=True):
                    take_pointer(found, self.refused, name, data)
        finally:
            await link.close()
        return found

    async def _subjects(self, link: Link) -> list[str]:
        """Return the keys of all streams that have a pointer."""
        prefix, found = f"{self._location.pointers}.", dict[str, int]()
        while True:
            request = {"subjects_filter": f"{prefix}>", "offset": len(found)}
            info = await link.api(f"STREAM.INFO.{self._location.pointers}", REQUEST, **request)
            subjects = info["state"].get("subjects") or {}
            found |= subjects
            if not subjects or len(found) >= info.get("total", 0):
                return [subject.removeprefix(prefix) for subject in found]

    async def read(self, starts: Mapping[str, int]) -> NatsReader:
        """Return a reader of these streams.

        It reads the complete JetStream stream with one consumer, from the lowest position in ``starts`` on.
        """
        reader = NatsReader(self._location, starts)
        try:
            await reader.ends()
        except BaseException:
            await reader.close()
            raise
        return reader
