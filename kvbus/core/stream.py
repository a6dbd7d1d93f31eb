"""One numbered stream of an output: dense seq, journal, heartbeat, replay answers."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvbus.core.codec import encode_batch, encode_positional_batch
from kvbus.core.emit import OutEvent
from kvbus.core.frames import Framing, ReplayRequest, replay_data, replay_end
from kvbus.core.journal import Journal

Encoding = Literal["map", "array"]


class Profile(msgspec.Struct, frozen=True):
    """What a family of routers reads: how events are encoded and how a replay is framed."""

    encoding: Encoding = "map"
    framing: Framing = "4"


PROFILES: dict[str, Profile] = {
    "vllm": Profile("map", "4"),
    "dynamo": Profile("map", "4"),
    "llm-d": Profile("map", "4"),
    "aibrix": Profile("array", "4"),
    "sglang": Profile("map", "3"),
}
"""By the name of ``outputs[].profile``. Sources: Dynamo 1.6.1 takes both framings, llm-d 4, AIBrix reads arrays only,
sgl-router's client reads framing 3."""


def encode(encoding: Encoding, events: list[OutEvent], ts: float, rank: int) -> bytes:
    """One batch in one encoding: always an array of exactly three, ``[ts, events, rank]``."""
    return encode_batch(events, ts, rank) if encoding == "map" else encode_positional_batch(events, ts, rank)


class OutputStream:
    """The seq of a stream never goes back and never skips: what is not sent live is still in the journal."""

    def __init__(self, topic: bytes | None, profile: Profile, journal: Journal, heartbeat: float, rank: int) -> None:
        self.topic = topic or b""
        self.keeps_topic = topic is None
        self.profile = profile
        self.journal = journal
        self.heartbeat = heartbeat
        self.rank = rank
        self.next_seq = 0
        self.idle_since: float | None = None

    def append(self, payload: bytes, now: float, *, empty: bool = False) -> int:
        """Number one batch and keep it for replay; its seq."""
        seq = self.next_seq
        self.next_seq = seq + 1
        self.journal.append(seq, payload, empty=empty)
        self.idle_since = now
        return seq

    def heartbeat_due(self, now: float) -> bool:
        """Whether the stream has been silent for ``heartbeat`` seconds (0: never)."""
        if not self.heartbeat:
            return False
        if self.idle_since is None:
            self.idle_since = now
        return now - self.idle_since >= self.heartbeat

    def answer(self, request: ReplayRequest) -> ReplayAnswer:
        """The answer to a replay request, up to what is published at this moment."""
        return ReplayAnswer(self, request)


class ReplayAnswer:
    """A replay answer to be pulled message by message, at the pace of the requester.

    It ends at the batch that was newest when it was asked for: what came later is on the live stream. If the journal
    trims past it, it goes on at the oldest batch left, as an engine's would.
    """

    def __init__(self, stream: OutputStream, request: ReplayRequest) -> None:
        self._stream = stream
        self._envelope = request.envelope
        self._seq = request.start
        self._end = stream.next_seq
        self._position = stream.journal.position(request.start)
        self._done = False
        first = stream.journal.first_seq
        self.trimmed = first is not None and request.start < first
        """The request reached behind the journal."""

    def next_message(self) -> list[bytes] | None:
        """The next message, END as the last one, then None."""
        if self._done:
            return None
        framing = self._stream.profile.framing
        while self._seq < self._end:
            entry = self._stream.journal.at(self._position)
            if entry is None:
                break
            if self._seq < entry.seq:
                self._seq = entry.seq
                continue
            if self._seq < entry.seq + entry.count:
                seq = self._seq
                self._seq += 1
                return replay_data(framing, self._envelope, self._stream.topic, seq, entry.payload)
            self._position += 1
            if self._stream.journal.at(self._position) is None:
                break
        self._done = True
        return replay_end(framing, self._envelope)
