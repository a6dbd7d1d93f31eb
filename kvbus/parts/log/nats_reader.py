"""Read a log in NATS JetStream: pull messages with a consumer that acknowledges nothing, and decode their records."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, Final, NamedTuple
from uuid import uuid4

import msgspec
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.errors import APIError

from kvbus.parts.log.contract import START, UNREACHABLE, Entry, UnavailableError
from kvbus.parts.log.nats_client import NO_MESSAGE, Link, refused
from kvbus.parts.log.place import REQUEST, NatsPlace, insisted

SHIFT: Final = 10
"""Low bits of a position: the record's index in its message. The message's sequence is above them."""

MOST: Final = 64
"""Maximum number of messages requested at once."""

IDLE: Final = 60
"""Seconds for which the server keeps the consumer of a reader that requests nothing."""

CREATE: Final = 1.0
"""Timeout for creating a consumer, in seconds. Then another one is tried: for a minute, NATS may still place a consumer
on a server that is away."""

HEARTBEAT: Final = 1
"""Seconds without a message after which the server confirms that it still has the request. The consumer is kept by one
of several servers, which may not be the server of the reader's connection. So the reader would otherwise not notice
that it is gone."""

SILENCE: Final = 3.0
"""Seconds without a message or heartbeat after which kvbus connects again. If nats-py cannot decode a message's subject
or headers, it stops reading without reporting this."""

MAX_SINGLE: Final = 1000
"""Messages that are requested one by one after a connection has broken, because one of them may have broken it."""

AFTER: Final = "Nats-Expected-Last-Subject-Sequence"
"""Header of a message: the sequence of its subject's newest message when it was appended."""

ANOTHER: Final = 0.5
"""Seconds before another consumer is created after one has returned messages that contradict each other."""

MOST_TIMES: Final = 20
"""Maximum number of consumers created for one such message. Each may be on any of the stream's servers."""

MAX_DIGITS: Final = 20
"""A sequence in a header is ignored if it has this many digits or more."""

SOON: Final = 0.01
"""Seconds to wait for a message that has already arrived."""


class Message(NamedTuple):
    """A message of a stream.

    Attributes:
        sequence: its number in the stream.
        subject: its subject.
        data: its payload.
        time: when the server got it, in seconds since 1970.
        after: the value of its header :data:`AFTER`; empty if it has none.
    """

    sequence: int
    subject: str
    data: bytes
    time: float
    after: str


class _Stored(msgspec.Struct):
    """A message as JetStream's API returns it. Bytes are in base64."""

    subject: str
    seq: int
    time: datetime
    data: bytes = b""
    hdrs: bytes = b""

    def message(self) -> Message:
        after = ""
        for line in self.hdrs.split(b"\r\n"):
            name, _, value = line.partition(b":")
            if name.strip() == AFTER.encode():
                after = value.strip().decode(errors="replace")
        return Message(self.seq, self.subject, self.data, self.time.timestamp(), after)


_records: Final = msgspec.msgpack.Decoder(list[bytes])


def records_of(data: bytes) -> list[bytes]:
    """Return the records of a message.

    A message that fences has no records. Any other content is returned as one record, which cannot be decoded.
    """
    with contextlib.suppress(msgspec.MsgspecError, RecursionError):
        records = _records.decode(data) if data else []
        if len(records) <= 1 << SHIFT:
            return records
    return [data]


class Pulled:
    """The messages of a stream from a sequence on. They are requested when the reader wants them.

    Args:
        link: the connection.
        stream: the stream's name.
        start: the first sequence.
    """

    def __init__(self, link: Link, stream: str, start: int) -> None:
        self._link = link
        self._stream = stream
        self._newest: dict[str, int] = {}
        """By subject: the sequence of the last message taken."""
        self._contradicted = 0
        """The last sequence at which a message contradicted the messages before it."""
        self._times = 0
        """Number of consumers that returned that contradiction."""
        self._believed = ""
        """Name of the consumer whose messages are accepted, because the other consumers returned the same
        contradiction."""
        self._deleted: set[int] = set()
        """Sequences that were deleted, according to the stream's leader."""
        self.next = start
        """The next sequence, as far as is known."""
        self.back: int | None = None
        """The sequence at which reading begins again; None if it continues. Reading begins again if the stream was
        created anew, or if messages that were taken from this sequence on are not those of the stream."""
        self._created = ""
        """When the stream was created."""
        self._inbox: Subscription | None = None
        self._client: Any = None
        self._name = ""
        self._taken = 0
        """Number of messages that came from this consumer."""
        self._asked = 0
        """Number of messages that may still come for the last request."""
        self._heard = 0.0
        """When the last request was sent, or the last message or status came for it."""
        self._single = 1
        """Number of messages that are still requested one by one. It begins with 1, so that a reader without the
        permission for this is refused at once, and not when a message breaks its connection."""

    async def _begin(self) -> tuple[Any, Subscription]:
        client = await self._link.client()
        if self._inbox is not None and client is self._client:
            return client, self._inbox
        state = await self._state()
        config = {
            "deliver_policy": "by_start_sequence",
            # the stream may have lost its newest messages
            "opt_start_seq": min(max(1, self.next), state["last_seq"] + 1),
            "ack_policy": "none",
            "filter_subject": f"{self._stream}.>",
            "inactive_threshold": IDLE * 10**9,
            "mem_storage": True,
        }

        async def attempt(seconds: float) -> None:
            self._name = uuid4().hex
            subject = f"CONSUMER.CREATE.{self._stream}.{self._name}.{self._stream}.>"
            named = {**config, "name": self._name}
            await self._link.api(subject, min(seconds, CREATE), stream_name=self._stream, config=named)

        await insisted(attempt)
        client = await self._link.client()
        inbox: Subscription = await client.subscribe(client.new_inbox())
        self._inbox, self._client, self._taken, self._asked = inbox, client, 0, 0
        return client, inbox

    async def _state(self) -> Any:
        """Return the stream's state. If the stream was created anew, read it from its beginning."""
        subject = f"STREAM.INFO.{self._stream}"
        try:
            info = await self._link.api(subject)
        except UnavailableError as error:
            if error.reason != UNREACHABLE:
                raise
            await self._break_off()  # the server may be up, and nats-py may have stopped reading
            info = await self._link.api(subject)
        if self._created not in {"", info["created"]}:
            self.next = self.back = 1
            self._newest, self._deleted, self._contradicted = {}, set(), 0
        self._created = info["created"]
        return info["state"]

    async def take(self, seconds: float) -> list[Message]:
        """Return the next messages; an empty list if none has come within ``seconds``.

        Raises:
            UnavailableError: no message was taken.
        """
        try:
            return await self._following(await self._next(seconds))
        except UnavailableError:
            await self._break_off()
            raise

    async def _next(self, seconds: float) -> list[Message]:
        if self._single > 0 and (found := await self._ask()):
            return found
        try:
            return await self._pull(seconds)
        except UnavailableError as error:
            if error.reason != UNREACHABLE:
                raise
            await self._break_off()
            return await self._ask()

    async def _break_off(self) -> None:
        self.begin_again()
        self._single = MAX_SINGLE
        await self._link.close()

    async def _ask(self) -> list[Message]:
        """Request the next messages through JetStream's API, which answers in JSON whatever a message contains.

        Each request is for the first message from a sequence on. So deleted messages need no extra requests.
        """
        state = await self._state()
        begin = max(self.next, state["first_seq"])
        end = min(begin + MOST, begin + self._single, state["last_seq"] + 1)
        answers = await asyncio.gather(*(self._get(at) for at in range(begin, end)))
        found = {message.sequence: message for message in answers if message is not None}
        self._single = self._single - len(answers) if found else 0
        return [found[at] for at in sorted(found)]

    async def _get(self, sequence: int) -> Message | None:
        wanted = msgspec.json.encode({"seq": sequence, "next_by_subj": f"{self._stream}.>"})
        try:
            answer = await self._link.ask(f"$JS.API.STREAM.MSG.GET.{self._stream}", wanted, REQUEST)
        except APIError as error:
            if error.err_code == NO_MESSAGE:
                return None
            raise refused(error) from error
        return msgspec.convert(answer["message"], _Stored, strict=False).message()

    async def _pull(self, seconds: float) -> list[Message]:
        now = asyncio.get_running_loop().time
        client, inbox = await self._begin()
        if not self._asked:
            times = {"expires": IDLE * 10**9 // 2, "idle_heartbeat": HEARTBEAT * 10**9}
            wanted = msgspec.json.encode({"batch": MOST, **times})
            subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._name}"
            await client.publish(subject, wanted, reply=inbox.subject)
            self._asked, self._heard = MOST, now()
        found: list[Message] = []
        until = now() + seconds
        async with self._link.said(seconds + REQUEST):
            with contextlib.suppress(TimeoutError):
                while not found or inbox.pending_msgs:
                    message = await inbox.next_msg(max(SOON, until - now()))
                    self._heard = now()
                    # a status of the server, not a message of the stream
                    if message.subject == inbox.subject and message.headers:
                        self._judge(message.headers.get("Status", ""))
                        continue
                    found.append(self._count(message))
        if self._asked and now() - self._heard > SILENCE:
            raise UnavailableError("the server that keeps the consumer says nothing")
        return found

    async def _following(self, found: list[Message]) -> list[Message]:
        """Return the messages that follow the messages taken before. The others are read again, from another consumer.

        A message names the message of its subject that was the newest one before it. A server that was cut off by the
        network may have other messages than its peers under the same sequences, permanently. This was seen with
        nats-server 2.9.10: the server kept a message that its peers got again later, and lacked a later message. No
        server reports this, and a consumer may be on such a server.
        """
        for number, message in enumerate(found):
            at, said = message.sequence, message.after
            if said.isdecimal() and len(said) < MAX_DIGITS:
                after = int(said)
                before = self._newest.get(message.subject, min(after, at - 1))
                if after != before and await self._contradicts(at, after, before):
                    self.next = self.back = min(after, before) + 1
                    self.begin_again()
                    await asyncio.sleep(ANOTHER)
                    return found[:number]
            self._newest[message.subject] = at
        if found:
            self.next = found[-1].sequence + 1
        return found

    async def _contradicts(self, at: int, after: int, before: int) -> bool:
        """Return whether a message is rejected because it names another predecessor than the message that was taken."""
        if self._believed == self._name:
            return False
        if at > self._contradicted:
            self._contradicted, self._times = at, 0
        self._times += 1
        if self._times > MOST_TIMES:
            self._believed = self._name
            return False
        if after > before and after not in self._deleted:
            state = (await self._link.api(f"STREAM.INFO.{self._stream}", deleted_details=True))["state"]
            self._deleted = set(state.get("deleted") or ())
            return bool(after >= state["first_seq"] and after not in self._deleted)
        return after < before

    def begin_again(self) -> None:
        """Create another consumer at the next read, from the next message on."""
        self._inbox = None
        self._newest = {subject: newest for subject, newest in self._newest.items() if newest < self.next}

    def _judge(self, status: str) -> None:
        if status == "100":  # a heartbeat
            return
        self._asked = 0
        if status != "408":  # with 408 the request has expired; with any other status the consumer is gone
            raise UnavailableError(f"the consumer has gone ({status})")

    def _count(self, message: Msg) -> Message:
        self._taken += 1
        self._asked -= 1
        said = message.metadata
        if said.sequence.consumer != self._taken:
            raise UnavailableError("messages were lost on their way")
        after = (message.headers or {}).get(AFTER, "")
        return Message(said.sequence.stream, message.subject, message.data, said.timestamp.timestamp(), after)

    async def bounds(self) -> tuple[int, int]:
        """Return the first sequence that the stream has, and the sequence after its last one.

        They come from the stream's leader, because a consumer may be on a server that lags.
        """
        state = await self._state()
        end: int = state["last_seq"] + 1
        return (state["first_seq"] if state["messages"] else end), end


class NatsReader:
    """A reader of streams in NATS; see :class:`~kvbus.parts.log.contract.Reader`."""

    def __init__(self, place: NatsPlace, starts: Mapping[str, int]) -> None:
        self._place = place
        self._starts = starts
        self._link = Link(place)
        self._first = START
        self._prefix = f"{place.keys.stream}."
        self.pulled = Pulled(self._link, place.keys.stream, min(starts.values(), default=START) >> SHIFT)

    async def take(self, seconds: float) -> list[Entry]:
        """Return the records in the next messages. Request more messages if necessary."""
        time = asyncio.get_running_loop().time
        until = time() + seconds
        while True:
            messages = await self.pulled.take(max(0.0, until - time()))
            if self.pulled.back is not None:
                begin, self.pulled.back = self.pulled.back << SHIFT, None
                self._starts = {key: min(start, begin) for key, start in self._starts.items()}
            found = [entry for message in messages for entry in self._of(message)]
            if found or not messages or time() >= until:
                return found

    def _of(self, message: Message) -> Iterator[Entry]:
        key = message.subject.removeprefix(self._prefix)
        if key not in self._starts:
            return
        for number, data in enumerate(records_of(message.data)):
            position = (message.sequence << SHIFT) + number
            if position >= self._starts[key]:
                yield Entry(key, position, data, message.time)

    async def ends(self) -> dict[str, int]:
        """Return the position after the newest message, for each stream."""
        first, end = await self.pulled.bounds()
        if self.pulled.next > end:
            self.pulled.begin_again()  # the messages that were taken are lost, and new messages get their sequences
        self._first = first << SHIFT
        return dict.fromkeys(self._starts, end << SHIFT)

    async def reached(self, key: str) -> int:
        """Return the consumer's position, or the first position that the stream still has, if that is higher."""
        del key
        return max(self.pulled.next << SHIFT, self._first)

    async def close(self) -> None:
        """Close the connection."""
        await self._link.close()
