"""Reading a log in NATS JetStream: messages pulled by a consumer that acknowledges nothing, and the records in them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Final
from uuid import uuid4

import msgspec
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from kvbus.parts.log.contract import START, Entry, UnavailableError
from kvbus.parts.log.nats_client import Link
from kvbus.parts.log.place import NatsPlace
from kvbus.parts.log.refusals import REQUEST, insisted

SHIFT: Final = 10
"""Bits of a position behind the message's sequence: which of its records it is."""

MOST: Final = 64
"""Messages asked for at once."""

IDLE: Final = 60
"""Seconds for which the server keeps the place of a reader that asks for nothing."""

CREATE: Final = 1.0
"""Seconds in which a consumer is made, or another one is tried: for a minute servers are given one that are away."""

HEARTBEAT: Final = 2
"""Seconds without a message after which the server says that it is still asked. What keeps a reader's place is one of
several servers, and may be another one than that of its connection: nobody says that it went."""

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

    async def _begin(self) -> tuple[Any, Subscription]:
        client = await self._link.client()
        if self._inbox is not None and client is self._client:
            return client, self._inbox
        info = await self._link.api(f"STREAM.INFO.{self._stream}")
        if self._created not in {"", info["created"]}:
            self.next = self.back = 1
            self._newest, self._deleted, self._contradicted = {}, set(), 0
        self._created = info["created"]
        config = {
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": min(max(1, self.next), info["state"]["last_seq"] + 1),  # it may have lost its newest ones
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

    async def take(self, seconds: float) -> list[tuple[int, Msg]]:
        """Sequences and messages; none where none has come for so long.

        Raises:
            UnavailableError: nothing was taken.
        """
        now = asyncio.get_running_loop().time
        try:
            client, inbox = await self._begin()
            if not self._asked:
                times = {"expires": IDLE * 10**9 // 2, "idle_heartbeat": HEARTBEAT * 10**9}
                wanted = msgspec.json.encode({"batch": MOST, **times})
                subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._name}"
                await client.publish(subject, wanted, reply=inbox.subject)
                self._asked, self._heard = MOST, now()
            found: list[tuple[int, Msg]] = []
            until = now() + seconds
            async with self._link.said(seconds + REQUEST):
                with contextlib.suppress(TimeoutError):
                    while not found or inbox.pending_msgs:
                        message = await inbox.next_msg(max(SOON, until - now()))
                        self._heard = now()
                        if message.subject == inbox.subject and message.headers:  # from the server, not from the stream
                            self._judge(message.headers.get("Status", ""))
                            continue
                        found.append((self._count(message), message))
            self._listen(now())
            return await self._following(found)
        except UnavailableError:
            self.begin_again()
            raise

    def _listen(self, now: float) -> None:
        if self._asked and now - self._heard > REQUEST:
            raise UnavailableError("the server that keeps the consumer says nothing")

    async def _following(self, found: list[tuple[int, Msg]]) -> list[tuple[int, Msg]]:
        """What of it follows on what was taken before; what does not is read again, by another consumer.

        A message says which one of its subject was the newest before it. A server that the network had cut off may
        have others under the same sequences as its peers, for good (seen with nats-server 2.9.10: it kept a message
        that its peers got once more later, and lacked one behind that). Nobody says so, and a consumer may be there.
        """
        for number, (at, message) in enumerate(found):
            said = (message.headers or {}).get(AFTER, "")
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
            self.next = found[-1][0] + 1
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

    def _count(self, message: Msg) -> int:
        self._taken += 1
        self._asked -= 1
        if message.metadata.sequence.consumer != self._taken:
            raise UnavailableError("messages were lost on their way")
        sequence: int = message.metadata.sequence.stream
        return sequence

    async def bounds(self) -> tuple[int, int]:
        """The first sequence that the stream has, and the one that comes behind its last.

        The stream's leader says so: a consumer may be at a server that is behind.
        """
        state = (await self._link.api(f"STREAM.INFO.{self._stream}"))["state"]
        end: int = state["last_seq"] + 1
        return (state["first_seq"] if state["messages"] else end), end

    async def level(self) -> bool:
        """Whether everything was taken that the stream has."""
        first, end = await self.bounds()
        return max(self.next, first) >= end


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
        messages = await self.pulled.take(seconds)
        if self.pulled.back is not None:
            begin, self.pulled.back = self.pulled.back << SHIFT, None
            self._starts = {key: min(start, begin) for key, start in self._starts.items()}
        return [entry for at, message in messages for entry in self._of(at, message)]

    def _of(self, sequence: int, message: Msg) -> Iterator[Entry]:
        key = message.subject.removeprefix(self._prefix)
        if key not in self._starts:
            return
        for number, data in enumerate(records_of(message.data)):
            position = (sequence << SHIFT) + number
            if position >= self._starts[key]:
                yield Entry(key, position, data, message.metadata.timestamp.timestamp())

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
