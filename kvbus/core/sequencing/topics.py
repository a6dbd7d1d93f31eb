"""Select the batches under a source's topic from all batches of a publisher's socket.

One PUB socket may carry several streams, each under its own topic. Either each topic has its own seqs, or all topics
share one numbering. No message says which. kvbus reads all batches of the socket, and determines the numbering by the
seqs:

* A run of foreign batches that ends just before an own batch and begins no earlier than the next expected one proves a
  shared numbering. From then on, each foreign batch takes up its number but delivers no events.
* An own batch inside such a run, or a foreign batch under the number of another own batch, proves separate numberings.
  From then on, foreign batches are ignored.

During a connection, a source reads one topic: the first one that begins with the configured prefix. Without a prefix,
batches under the empty topic also belong to the source, because that topic names no stream.
"""

from __future__ import annotations

from typing import Final
from zlib import crc32

from kvbus.core.sequencing.sequencer import Sequencer
from kvbus.core.stats import SourceStats
from kvbus.core.types import Filtered, Reason

MAX_RUN: Final = 16_384
"""Maximum number of foreign batches that wait for a proof. A replay buffer holds 10,000."""

_TS: Final = slice(1, 10)
_FLOAT: Final = b"\xcb"
_ZERO: Final = b"\xcb" + bytes(8)

SeqBatch = tuple[int, bytes]
"""A seq and its payload."""


def filler(payload: bytes) -> bytes:
    """Return a batch without events in place of a foreign one. It holds its time, and its CRC-32 as a fourth element.

    So different foreign batches have different fingerprints.
    """
    ts = payload[_TS] if payload[1:2] == _FLOAT and len(payload) > _TS.stop else _ZERO
    return b"\x94" + ts + b"\x90\xc0\xce" + crc32(payload).to_bytes(4, "big")


def _name(topic: bytes) -> bytes:
    return topic.partition(b"\0")[0]


class Topics:
    """The topics of one source's socket.

    Args:
        prefix: prefix of the source's topic.
        shared: whether another source reads the same socket.
        sequencer: the sequencer of the source.
        stats: counts batches under other topics.

    Attributes:
        own: the topic that the source reads; None until a batch has come.
        heard: whether a live batch has come under the own topic.
        second: another topic that begins with the prefix.
        elsewhere: a topic that does not begin with the prefix.
        untold: whether a batch of an answer named no topic although the socket has several topics.
    """

    def __init__(self, prefix: bytes, shared: bool, sequencer: Sequencer, stats: SourceStats) -> None:
        self.prefix = prefix
        self.shared = shared
        self._sequencer = sequencer
        self._stats = stats
        self._runs: dict[int | None, list[SeqBatch]] = {}
        """Runs of foreign batches that prove nothing yet: one of the live stream, and one of an answer."""
        self.disconnected()

    def disconnected(self) -> None:
        """Forget the topics: the next connection may be to another publisher."""
        self.own: bytes | None = None
        self._named: bytes | None = None
        self.heard = False
        self.second: bytes | None = None
        self.elsewhere: bytes | None = None
        self.untold = False
        self._one_numbering = self._separate = False
        self._runs.clear()

    def of_live(self, topic: bytes, seq: int, payload: bytes, now: float) -> list[SeqBatch]:
        """Return the sequencer's input for a live batch: nothing, the batch, or also foreign batches before it."""
        if self._is_own(topic):
            self.heard = True
            return self._own(None, seq, payload, now)
        return self._foreign(None, topic, seq, payload, now)

    def of_answer(self, request: int, topic: bytes | None, seq: int, payload: bytes, now: float) -> list[SeqBatch]:
        """Return the sequencer's input for a batch of a replay answer.

        A batch without a topic, or with an empty one, belongs to the source unless the socket has several topics.
        """
        if topic is None or (not topic and self.own != b""):
            if self.shared or self.second is not None:
                self.untold = True
                self._stats.rejected[Reason.OTHER_TOPIC] += 1
                return []
            return [(seq, payload)]
        if request not in self._runs:
            self._runs = {None: self._runs.get(None, []), request: []}
        if self._is_own(topic):
            return self._own(request, seq, payload, now)
        return self._foreign(request, topic, seq, payload, now)

    def _is_own(self, topic: bytes) -> bool:
        if topic == self.own:
            return True
        # the empty topic names no stream, and after a zero byte SGLang's topics name the epoch
        if not topic.startswith(self.prefix) or (topic and self._named not in {None, _name(topic)}):
            return False
        if topic:
            self._named = _name(topic)
        self.own = topic
        return True

    def _own(self, stream: int | None, seq: int, payload: bytes, now: float) -> list[SeqBatch]:
        run = self._runs.get(stream, [])
        if stream in self._runs:
            self._runs[stream] = []
        if self._one_numbering:
            if self._sequencer.contradicts(seq, payload):
                self._separate_numberings(now)
        elif run and run[0][0] >= self._sequencer.next and run[-1][0] + 1 == seq:
            self._one_numbering = True
            return [*run, (seq, payload)]
        elif run and run[0][0] <= seq <= run[-1][0]:
            self._separate_numberings(now)
        return [(seq, payload)]

    def _foreign(self, stream: int | None, topic: bytes, seq: int, payload: bytes, now: float) -> list[SeqBatch]:
        if topic.startswith(self.prefix):
            self.second = topic
            self._stats.rejected[Reason.OTHER_TOPIC] += 1
        else:
            self.elsewhere = topic
            self._stats.filtered[Filtered.TOPIC] += 1
        if self._separate:
            return []
        empty = filler(payload)
        if self._sequencer.contradicts(seq, empty):
            self._separate_numberings(now)
            return []
        if self._one_numbering:
            return [(seq, empty)]
        run = self._runs.setdefault(stream, [])
        if len(run) >= MAX_RUN or (run and run[-1][0] + 1 != seq):
            run.clear()
        run.append((seq, empty))
        return []

    def _separate_numberings(self, now: float) -> None:
        """Ignore foreign batches from now on.

        If foreign batches have taken up numbers, read the epoch again without them.
        """
        self._separate = True
        self._runs.clear()
        if self._one_numbering:
            self._one_numbering = False
            self._sequencer.rebuild(now)
