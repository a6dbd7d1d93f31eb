"""Select the batches of a source's topic from all batches of a publisher's socket.

One PUB socket may carry several streams, each under its own topic. Either each topic has its own numbering, or all
topics share one numbering. No message says which is the case. kvbus reads all batches of the socket, and infers it from
the seqs. A batch of the source's topic is an *own* batch; a batch of another topic is a *foreign* batch. Foreign
batches in sequence, with no own batch among them, are a *run*.

* A run proves a shared numbering if it ends just before an own batch, and begins at the next expected own batch or
  later. From then on, kvbus replaces each foreign batch by an empty batch with the same seq.
* An own batch with a seq inside a run proves separate numberings. So does a foreign batch with the seq of another own
  batch. From then on, kvbus ignores foreign batches.

During a connection, a source reads one topic: the first topic that begins with the configured prefix. If no prefix is
configured, batches with the empty topic also belong to the source, because the empty topic names no stream.
"""

from __future__ import annotations

from typing import Final
from zlib import crc32

from kvbus.core.sequencing.sequencer import Sequencer
from kvbus.core.stats import SourceStats
from kvbus.core.types import Filtered, Reason

MAX_RUN: Final = 16_384
"""Maximum number of batches of other topics that wait until kvbus knows whether all topics share one numbering.

It is larger than an engine's replay buffer, which holds 10,000 batches.
"""

_TS: Final = slice(1, 10)
_FLOAT: Final = b"\xcb"
_ZERO: Final = b"\xcb" + bytes(8)

SeqBatch = tuple[int, bytes]
"""The seq and the payload of a batch."""


def filler(payload: bytes) -> bytes:
    """Return an empty batch that replaces a batch of another topic under the same seq.

    It has the time of the replaced batch, and the CRC-32 of that batch as a fourth element. So empty batches for
    different batches have different fingerprints.
    """
    ts = payload[_TS] if payload[1:2] == _FLOAT and len(payload) > _TS.stop else _ZERO
    return b"\x94" + ts + b"\x90\xc0\xce" + crc32(payload).to_bytes(4, "big")


def _name(topic: bytes) -> bytes:
    return topic.partition(b"\0")[0]


class Topics:
    """The topics of the socket from which one source reads.

    Args:
        prefix: prefix of the source's topic.
        shared: whether another source reads the same socket.
        sequencer: the sequencer of the source.
        stats: the counters of the source, which count batches of other topics.

    Attributes:
        own: the topic that the source reads; None until a batch has arrived.
        heard: whether the live stream has brought a batch of the source's topic.
        second: another topic that begins with the prefix; None if there was none.
        elsewhere: a topic that does not begin with the prefix; None if there was none.
        untold: whether kvbus refused a batch of a replay answer: it names no topic, and the socket has several topics.
    """

    def __init__(self, prefix: bytes, shared: bool, sequencer: Sequencer, stats: SourceStats) -> None:
        self.prefix = prefix
        self.shared = shared
        self._sequencer = sequencer
        self._stats = stats
        self._runs: dict[int | None, list[SeqBatch]] = {}
        """The newest consecutive batches (a run) under topics that are not the source's, with their payloads emptied.

        If a batch of the source continues a run, all topics share one numbering. The key None has the run of the live
        stream. The id of a request has the run of its answer.
        """
        self.disconnected()

    def disconnected(self) -> None:
        """Forget the topics, because the next connection may lead to another publisher."""
        self.own: bytes | None = None
        self._named: bytes | None = None
        self.heard = False
        self.second: bytes | None = None
        self.elsewhere: bytes | None = None
        self.untold = False
        self._one_numbering = self._separate = False
        self._runs.clear()

    def is_alone(self, topic: bytes) -> bool:
        """Return whether a live batch is of the source's topic, and no other topic's batches matter for it.

        Its seq is then the seq of the source's stream.
        """
        return topic == self.own and self.heard and not self._runs and not self._one_numbering

    def of_live(self, topic: bytes, seq: int, payload: bytes, now: float) -> list[SeqBatch]:
        """Return the batches that the sequencer has to process because a live batch arrived.

        The result has the batch itself if it is of the source's topic. If all topics share one numbering, the result
        has empty batches in place of batches of other topics.
        """
        if self._is_own(topic):
            self.heard = True
            return self._own(None, seq, payload, now)
        return self._foreign(None, topic, seq, payload, now)

    def of_answer(self, request: int, topic: bytes | None, seq: int, payload: bytes, now: float) -> list[SeqBatch]:
        """Return the batches that the sequencer has to process because a batch of a replay answer arrived.

        A batch without a topic, or with an empty one, belongs to the source if the socket has only one topic. If the
        socket has several topics, kvbus cannot know to which one the batch belongs, and rejects it.
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
        # The empty topic belongs to the source, too, if no prefix is configured. SGLang appends a zero byte and the
        # epoch to a topic, so only the name before them is compared.
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
        """Record that each topic has its own numbering, and ignore batches of other topics from now on.

        If kvbus assumed one numbering before, it has delivered empty batches in place of other topics' batches. It then
        reads the epoch again without them.
        """
        self._separate = True
        self._runs.clear()
        if self._one_numbering:
            self._one_numbering = False
            self._sequencer.rebuild(now)
