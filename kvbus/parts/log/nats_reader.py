"""Read a log in NATS JetStream: pull messages with a consumer that acknowledges none, and decode their records."""

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
from kvbus.parts.log.location import REQUEST, NatsLocation, insisted
from kvbus.parts.log.nats_client import NO_MESSAGE, Link, refused

SHIFT: Final = 10
"""Number of low bits in the position of a record.

These bits are the record's index in its message. The high bits are the message's sequence in the JetStream stream.
"""

MAX_MESSAGES: Final = 64
"""Maximum number of messages that one request asks for."""

IDLE: Final = 60
"""Time in seconds after which the server removes a consumer whose reader requests nothing."""

CREATE: Final = 1.0
"""Timeout in seconds of one attempt to create a consumer.

kvbus then tries to create another consumer. For a minute after a failure, NATS may place a consumer on a server that is
down.
"""

HEARTBEAT: Final = 1
"""Seconds without a message after which the NATS server sends a heartbeat, while a request for messages is open.

The heartbeat shows that the server still has the request. A consumer, which keeps the reader's position, is on one of
several servers, and the reader may be connected to another one. Without heartbeats the reader would not notice that the
consumer's server is down.
"""

SILENCE: Final = 3.0
"""Time in seconds without a message or heartbeat after which kvbus connects again.

This is needed because nats-py stops reading, and reports nothing, if it cannot decode the subject or the headers of a
message.
"""

MAX_SINGLE: Final = 1000
"""Number of messages that are requested one by one after a connection has broken.

One of these messages may have broken the connection. In a request for a single message the server returns JSON, which
breaks no connection.
"""

AFTER: Final = "Nats-Expected-Last-Subject-Sequence"
"""Name of a header that writers set. Its value is the sequence of the message before this one on the same subject."""

ANOTHER: Final = 0.5
"""Pause in seconds before kvbus creates another consumer after a contradictory message.

A message is contradictory if its header :data:`AFTER` does not name the message that was read before it.
"""

MOST_TIMES: Final = 20
"""Maximum number of consumers that kvbus creates because of one message that contradicts the message read before it.

See :data:`ANOTHER`. Each consumer may be on any of the stream's servers, so kvbus tries several. If all of them deliver
the contradictory message, kvbus accepts it.
"""

MAX_DIGITS: Final = 20
"""Number of digits from which on a value of the header :data:`AFTER` is ignored.

The sequence of a message has fewer.
"""

MIN_WAIT_SECONDS: Final = 0.01
"""Minimum time in seconds to wait for the next message, so that a message that has already arrived is not missed."""


class Message(NamedTuple):
    """A message of a JetStream stream.

    Attributes:
        sequence: the message's number in the stream.
        subject: the message's subject.
        data: the message's payload.
        time: the time at which the server got the message, in seconds since 1970.
        after: the value of the message's header :data:`AFTER`; empty if it does not have this header.
    """

    sequence: int
    subject: str
    data: bytes
    time: float
    after: str


class _Stored(msgspec.Struct):
    """A message as JetStream's API returns it. In the JSON, ``data`` and ``hdrs`` are in base64."""

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
    """Return the records in a message's data.

    A message that fences a writer has no records. Data that is not a list of records is returned as one record, which a
    reader then counts as malformed.
    """
    with contextlib.suppress(msgspec.MsgspecError, RecursionError):
        records = _records.decode(data) if data else []
        if len(records) <= 1 << SHIFT:
            return records
    return [data]


class Pulled:
    """The messages of a JetStream stream from a sequence on.

    The server sends messages only when the reader requests them.

    Args:
        link: the connection.
        stream: the name of the JetStream stream.
        start: the sequence of the first message to read.
    """

    def __init__(self, link: Link, stream: str, start: int) -> None:
        self._link = link
        self._stream = stream
        self._newest: dict[str, int] = {}
        """By subject: the sequence of the newest message that was read."""
        self._contradicted = 0
        """The sequence of the last message whose header did not name the message before it; see :data:`ANOTHER`."""
        self._times = 0
        """Number of consumers that have delivered the present contradictory message.

        Its header does not name the message that was read before it; see :data:`ANOTHER`.
        """
        self._believed = ""
        """Name of the consumer whose contradictory messages are accepted; empty if there is none.

        :data:`ANOTHER` says when a message is contradictory. After :data:`MOST_TIMES` consumers have delivered the same
        contradictory message, kvbus accepts it from the next consumer, because further consumers would not help.
        """
        self._deleted: set[int] = set()
        """Sequences of messages that were deleted from the JetStream stream, as the stream's leader has listed them."""
        self.next = start
        """The sequence of the next message to read.

        If that message was deleted, reading continues at the first one after it.
        """
        self.back: int | None = None
        """The sequence to which reading has gone back; None if it has not. The caller resets it to None.

        Reading goes back if the JetStream stream was deleted and created again. It also goes back if a server has
        delivered messages that are not those of the stream.
        """
        self._created = ""
        """Time at which the JetStream stream was created, as the server returns it."""
        self._inbox: Subscription | None = None
        self._client: Any = None
        self._name = ""
        self._taken = 0
        """Number of messages that the present consumer has delivered.

        A consumer numbers its messages, so losses are noticed.
        """
        self._asked = 0
        """Number of messages that NATS may still deliver for the reader's last request."""
        self._heard = 0.0
        """Time at which the reader last sent a request to the consumer, or got a message or a status from it."""
        self._single = 1
        """Number of messages that the reader still has to request one by one, without a consumer.

        After a broken connection, which a message may have broken, it is :data:`MAX_SINGLE`. It begins with 1, so that
        a reader without the permission for such requests is refused at once, and not only when a message breaks its
        connection.
        """

    async def _begin(self) -> tuple[Any, Subscription]:
        client = await self._link.client()
        if self._inbox is not None and client is self._client:
            return client, self._inbox
        state = await self._state()
        config = {
            "deliver_policy": "by_start_sequence",
            # Begin after the last message if `next` is later, because the stream may have lost its newest messages.
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
        """Return the state of the JetStream stream, which has its first and last sequence.

        If the stream was deleted and created again, let the next read begin at the start of the new stream.
        """
        subject = f"STREAM.INFO.{self._stream}"
        try:
            info = await self._link.api(subject)
        except UnavailableError as error:
            if error.reason != UNREACHABLE:
                raise
            await self._break_off()  # nats-py may have stopped reading although the server is up
            info = await self._link.api(subject)
        if self._created not in {"", info["created"]}:
            self.next = self.back = 1
            self._newest, self._deleted, self._contradicted = {}, set(), 0
        self._created = info["created"]
        return info["state"]

    async def take(self, seconds: float) -> list[Message]:
        """Return the next messages; an empty list if no message comes within ``seconds``.

        Raises:
            UnavailableError: the server failed. No message is skipped.
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
        """Request the next messages one by one through JetStream's API.

        The API's JSON answers contain headers and data in base64, so nothing in a message can break the connection.

        Each request returns the first message from a sequence on. So no further request is needed for deleted messages.
        """
        state = await self._state()
        begin = max(self.next, state["first_seq"])
        end = min(begin + MAX_MESSAGES, begin + self._single, state["last_seq"] + 1)
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
            wanted = msgspec.json.encode({"batch": MAX_MESSAGES, **times})
            subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._name}"
            await client.publish(subject, wanted, reply=inbox.subject)
            self._asked, self._heard = MAX_MESSAGES, now()
        found: list[Message] = []
        until = now() + seconds
        async with self._link.translated_errors(seconds + REQUEST):
            with contextlib.suppress(TimeoutError):
                while not found or inbox.pending_msgs:
                    message = await inbox.next_msg(max(MIN_WAIT_SECONDS, until - now()))
                    self._heard = now()
                    # A message to the inbox itself is a status from the server, not a message of the stream.
                    if message.subject == inbox.subject and message.headers:
                        self._judge(message.headers.get("Status", ""))
                        continue
                    found.append(self._count(message))
        if self._asked and now() - self._heard > SILENCE:
            raise UnavailableError("the NATS server that has kvbus's consumer does not answer")
        return found

    async def _following(self, found: list[Message]) -> list[Message]:
        """Return the messages before the first contradictory one. Let the next read begin again at the contradiction.

        Each message names the previous message on its subject. If the reader has got another message as the previous
        one, the message is contradictory: the server that delivers it has other messages than the other servers of the
        stream. The reader then creates another consumer, which may be on another server.

        A server that was cut off from the network may keep other messages under the same sequences for ever. This was
        seen with nats-server 2.9.10: the server kept a message that the other servers got again later, and lacked a
        later message. No server reports this, and a consumer may be on such a server.
        """
        for number, message in enumerate(found):
            at, previous = message.sequence, message.after
            if previous.isdecimal() and len(previous) < MAX_DIGITS:
                after = int(previous)
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
        """Return whether to reject a message, because it does not name the message that was read last on its subject.

        The message is not rejected if the message that it names was deleted. It is not rejected either after
        :data:`MOST_TIMES` consumers have delivered it, because then further consumers would not help.

        Args:
            at: the message's sequence.
            after: the sequence of the previous message on the same subject, as the message names it.
            before: the sequence of the message that was read last on this subject.
        """
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
        """Discard the consumer. The next read creates another consumer, which begins at the sequence :attr:`next`."""
        self._inbox = None
        self._newest = {subject: newest for subject, newest in self._newest.items() if newest < self.next}

    def _judge(self, status: str) -> None:
        if status == "100":  # a heartbeat
            return
        self._asked = 0
        if status != "408":  # 408: the request has expired. Any other status: the consumer no longer exists
            raise UnavailableError(f"kvbus's consumer no longer exists at the NATS server ({status})")

    def _count(self, message: Msg) -> Message:
        self._taken += 1
        self._asked -= 1
        metadata = message.metadata
        if metadata.sequence.consumer != self._taken:
            raise UnavailableError("messages that the NATS server sent to kvbus were lost")
        after = (message.headers or {}).get(AFTER, "")
        return Message(metadata.sequence.stream, message.subject, message.data, metadata.timestamp.timestamp(), after)

    async def bounds(self) -> tuple[int, int]:
        """Return the first sequence of the JetStream stream, and the sequence after its last one.

        They come from the stream's leader, because the server of the consumer may lag.
        """
        state = await self._state()
        end: int = state["last_seq"] + 1
        return (state["first_seq"] if state["messages"] else end), end


class NatsReader:
    """A reader of streams in NATS; see :class:`~kvbus.parts.log.contract.Reader`."""

    def __init__(self, location: NatsLocation, starts: Mapping[str, int]) -> None:
        self._location = location
        self._starts = starts
        self._link = Link(location)
        self._first = START
        self._prefix = f"{location.keys.stream}."
        self.pulled = Pulled(self._link, location.keys.stream, min(starts.values(), default=START) >> SHIFT)

    async def take(self, seconds: float) -> list[Entry]:
        """Return the records of this reader's streams in the next messages.

        If a message has no records of these streams, further messages are requested until ``seconds`` have passed.
        """
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
        """Return, for each stream, the position after the newest message of the JetStream stream.

        The position is the same for all streams, because one JetStream stream has the records of all of them.
        """
        first, end = await self.pulled.bounds()
        if self.pulled.next > end:
            # The server has lost messages that this reader has read, and gives their sequences to new messages.
            self.pulled.begin_again()
        self._first = first << SHIFT
        return dict.fromkeys(self._starts, end << SHIFT)

    async def reached(self, key: str) -> int:
        """Return the position up to which the JetStream stream is read.

        If JetStream has deleted the message at this position, return the position of the first message that it has.
        """
        del key
        return max(self.pulled.next << SHIFT, self._first)

    async def close(self) -> None:
        """Close the connection."""
        await self._link.close()
