"""Reading a log in NATS JetStream: messages pulled by a consumer that acknowledges nothing, and the records in them."""

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
"""Bits of a position behind the message's sequence: which of its records it is."""

MOST: Final = 64
"""Messages asked for at once."""

IDLE: Final = 60
"""Seconds for which the server keeps the place of a reader that asks for nothing."""

CREATE: Final = 1.0
"""Seconds in which a consumer is made, or another one is tried: for a minute servers are given one that are away."""

HEARTBEAT: Final = 1
"""Seconds without a message after which the server says that it is still asked. What keeps a reader's place is one of
several servers, and may be another one than that of its connection: nobody says that it went."""

SILENCE: Final = 3.0
"""Seconds without a message or heartbeat after which the connection is made again. nats-py stops reading, and says
nothing of it, at a message whose subject or headers it cannot decode."""

MAX_SINGLE: Final = 1000
"""Messages that are asked for one by one after a connection has broken: one of them may be what broke it."""

AFTER: Final = "Nats-Expected-Last-Subject-Sequence"
"""Header of a message: the sequence of the newest one of its subject when it was appended."""

ANOTHER: Final = 0.5
"""Seconds before another consumer is made where one gives messages that do not follow on each other."""

MOST_TIMES: Final = 20
"""Consumers that are made for one such message, each at any of the stream's servers."""

MAX_DIGITS: Final = 20
"""Of a sequence in a header."""

SOON: Final = 0.01
"""Seconds for a message that is there."""


class Message(NamedTuple):
    """A message of a stream.

    Attributes:
        sequence: its number in the stream.
        subject: its subject.
        data: its payload.
        time: when the server got it, in seconds since 1970.
        after: what its header :data:`AFTER` says; empty if it has none.
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
    """The records of a message; one that fences has none. Any other message is given as one record, which is none."""
    with contextlib.suppress(msgspec.MsgspecError, RecursionError):
        records = _records.decode(data) if data else []
        if len(records) <= 1 << SHIFT:
            return records
    return [data]


class Pulled:
    """The messages of a stream from a sequence on, asked for as they are wanted.

    Args:
        link: the connection.
        stream: its name.
        start: the first sequence.
    """

    def __init__(self, link: Link, stream: str, start: int) -> None:
        self._link = link
        self._stream = stream
        self._newest: dict[str, int] = {}
        """By subject: the sequence of what was taken last."""
        self._contradicted = 0
        """The last sequence at which a message did not follow on the one before."""
        self._times = 0
        """That this was so."""
        self._believed = ""
        """The consumer that is believed: others have said the same."""
        self._deleted: set[int] = set()
        """Sequences of which the stream's leader has said that they were deleted."""
        self.next = start
        """The sequence that comes next, as far as is known."""
        self.back: int | None = None
        """What comes next begins again at this sequence: the stream is another one than before, and has begun at 1, or
        what was taken behind it is not what the stream has."""
        self._created = ""
        """When the stream was."""
        self._inbox: Subscription | None = None
        self._client: Any = None
        self._name = ""
        self._taken = 0
        """Messages of this consumer."""
        self._asked = 0
        """Messages that may still come of what was asked for."""
        self._heard = 0.0
        """When anything came of it."""
        self._single = 1
        """Messages that are still to be asked for one by one. The first one is: a reader that has no permission for it
        is refused at once, and not when a message breaks its connection."""

    async def _begin(self) -> tuple[Any, Subscription]:
        client = await self._link.client()
        if self._inbox is not None and client is self._client:
            return client, self._inbox
        state = await self._state()
        config = {
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": min(max(1, self.next), state["last_seq"] + 1),  # it may have lost its newest ones
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
        """Ask for the stream's state. If it is another stream than before, read it from its beginning."""
        subject = f"STREAM.INFO.{self._stream}"
        try:
            info = await self._link.api(subject)
        except UnavailableError as error:
            if error.reason != UNREACHABLE:
                raise
            await self._break_off()  # nats-py may have stopped reading, and not the server
            info = await self._link.api(subject)
        if self._created not in {"", info["created"]}:
            self.next = self.back = 1
            self._newest, self._deleted, self._contradicted = {}, set(), 0
        self._created = info["created"]
        return info["state"]

    async def take(self, seconds: float) -> list[Message]:
        """Take the next messages; none if none has come for so long.

        Raises:
            UnavailableError: nothing was taken.
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
        """Ask for the next messages through JetStream's API, whose answers are JSON whatever is in a message.

        Each request is for the first message from a sequence on, so that deleted ones cost nothing.
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
                    if message.subject == inbox.subject and message.headers:  # from the server, not from the stream
                        self._judge(message.headers.get("Status", ""))
                        continue
                    found.append(self._count(message))
        if self._asked and now() - self._heard > SILENCE:
            raise UnavailableError("the server that keeps the consumer says nothing")
        return found

    async def _following(self, found: list[Message]) -> list[Message]:
        """What of it follows on what was taken before; what does not is read again, by another consumer.

        A message says which one of its subject was the newest before it. A server that the network had cut off may
        have others under the same sequences as its peers, for good (seen with nats-server 2.9.10: it kept a message
        that its peers got once more later, and lacked one behind that). Nobody says so, and a consumer may be there.
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
        """Whether a message is not taken because it comes after another one than was taken before."""
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
        """Have another consumer, from the next message on."""
        self._inbox = None
        self._newest = {subject: newest for subject, newest in self._newest.items() if newest < self.next}

    def _judge(self, status: str) -> None:
        if status == "100":  # a heartbeat
            return
        self._asked = 0
        if status != "408":  # of which nothing more comes; any other one says that there is nobody to ask
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
        """The first sequence that the stream has, and the one that comes behind its last.

        The stream's leader says so: a consumer may be at a server that is behind.
        """
        state = await self._state()
        end: int = state["last_seq"] + 1
        return (state["first_seq"] if state["messages"] else end), end


class NatsReader:
    """See :class:`~kvbus.parts.log.contract.Reader`."""

    def __init__(self, place: NatsPlace, starts: Mapping[str, int]) -> None:
        self._place = place
        self._starts = starts
        self._link = Link(place)
        self._first = START
        self._prefix = f"{place.keys.stream}."
        self.pulled = Pulled(self._link, place.keys.stream, min(starts.values(), default=START) >> SHIFT)

    async def take(self, seconds: float) -> list[Entry]:
        """Take what was asked for, and ask again."""
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
        """Behind the stream's newest message."""
        first, end = await self.pulled.bounds()
        if self.pulled.next > end:
            self.pulled.begin_again()  # what was taken is lost, and others come under its sequences
        self._first = first << SHIFT
        return dict.fromkeys(self._starts, end << SHIFT)

    async def reached(self, key: str) -> int:
        """Where the consumer is, or what is kept begins."""
        del key
        return max(self.pulled.next << SHIFT, self._first)

    async def close(self) -> None:
        """Close the connection."""
        await self._link.close()
