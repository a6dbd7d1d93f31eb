"""One numbered stream of a publisher: its frames, numbers and epochs, and through them its events (2, 3, 10, 11.3)."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvbus.tools.conform.engine.blocks import Blocks
from kvbus.tools.conform.engine.contents import Contents
from kvbus.tools.conform.engine.events import EventReader, Payload
from kvbus.tools.conform.engine.ledger import Ledger
from kvbus.tools.conform.verdict import Evidence

SEQ_END: Final = 2**63
SILENCE_S: Final = 2.5
"""Seconds without a batch that are more than a late empty batch."""
_PAUSE_S: Final = 0.8
"""Seconds of silence behind which an empty batch was sent because of it."""
_REMEMBERED: Final = 10_000
"""Numbers whose payloads are told apart from those of another epoch."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message whose three frames are as section 2 has them."""

    topic: bytes
    seq: int
    payload: bytes
    publisher: bytes = b""


def parse(frames: Sequence[bytes], ledger: Ledger) -> Message | None:
    """Read a live message; None where it has no number that a reader could use."""
    if len(frames) != 3:
        shown = [Evidence(f"frame {at}", frame) for at, frame in enumerate(frames[:4])]
        ledger.broken("2.1", f"a message has {len(frames)} frames", *shown)
        return None
    ledger.kept("2.1")
    topic, seq, payload = frames
    if len(seq) not in {8, 24}:
        ledger.broken("2.2", f"a sequence frame has {len(seq)} bytes", Evidence("sequence frame", seq))
        return None
    number = int.from_bytes(seq[:8], "big")
    if number >= SEQ_END:
        ledger.broken("2.2", f"the number {number} is not below 2^63", Evidence("sequence frame", seq))
        return None
    ledger.kept("2.2")
    return Message(topic, number, payload, seq[8:])


class Stream:
    """Judges the batches of one numbering in the order in which they come.

    Args:
        ledger: what was seen of each clause.
        rank: of its publisher; None for the one that its first batch has.

    Attributes:
        expected: the next number; None before the first batch.
        blocks: the live blocks.
    """

    def __init__(self, ledger: Ledger, rank: int | None = None) -> None:
        self.expected: int | None = None
        self.blocks = Blocks(ledger)
        self.epochs = 0
        """Epochs behind the first."""
        self.uncleared: list[Evidence] = []
        """Batches 0 that did not begin with AllBlocksCleared."""
        self.missing = 0
        """Numbers that never came, and of which nobody knows whether they were sent."""
        self._ledger = ledger
        self._reader = EventReader(ledger)
        self._contents = Contents(ledger)
        self._sent: dict[int, int] = {}
        """Checksums of the newest payloads, by number."""
        self._publisher = b""
        self._wanted = rank
        self._rank: Any = None
        self._batches = 0
        self._rejoined = False
        self._overlap = 0
        """Live batches below this number were taken from an answer while they were on their way."""
        self._state = False
        """That answer brought a state: what it has under a number is not what was sent live."""

    def overlaps(self, *, state: bool) -> None:
        """An answer was taken; some of it may still come live. ``state``: it began with AllBlocksCleared."""
        self._overlap, self._state = self.expected or 0, state

    def rejoin(self) -> None:
        """The connection was away, and nobody can be asked what was sent meanwhile."""
        self._rejoined = True
        self.blocks.lose()

    def gap_before(self, message: Message) -> int | None:
        """Return the first number that is missing before a message, None where it is the next one."""
        if self.expected is None or self._rejoined:
            return None
        if message.publisher != self._publisher or message.seq <= self.expected:
            return None
        return self.expected

    def take(self, message: Message, *, connected: bool = False) -> Payload | None:
        """Judge the next batch; ``connected``: the connection has stood since the one before.

        Returns:
            What could be read of it, None where it is none or was there already.
        """
        first = self.expected is None
        if not first and not self._number(message, connected=connected):
            return None
        if first:
            self._publisher = message.publisher
        self.expected = message.seq + 1
        self._sent[message.seq] = zlib.crc32(message.payload)
        if len(self._sent) > _REMEMBERED:
            del self._sent[next(iter(self._sent))]
        payload = self._reader.read(message.payload, message.seq)
        begins = first or self._batches == 0
        self._batches += 1
        if payload is None:
            self.blocks.lose()
            return None
        if begins:
            self._begin(message, payload)
        self._check_rank(payload, message)
        if not payload.empty:
            for event in payload.events:
                if event.kind == "BlockStored":
                    self._contents.stored(event)
            self.blocks.apply(payload.events)
        return payload

    def skipped(self, number: int, shown: Evidence) -> None:
        """An answer has the numbers around this one, and not this one."""
        self._ledger.broken("3.1", f"number {number} was never sent, and a replay does not have it", shown)

    def new_epoch(self) -> None:
        """What comes next begins an epoch."""
        self.epochs += 1
        self._overlap = 0
        self._batches = 0
        self._rank = None
        self._sent.clear()
        self._reader.new_epoch()
        self._contents.new_epoch()
        self.blocks.reset(complete=False)

    def knows(self, message: Message) -> bool:
        """Whether this batch came already, with the same bytes."""
        return self._sent.get(message.seq) == zlib.crc32(message.payload)

    def contradicts(self, message: Message) -> bool:
        """Whether a batch with this number came already, with other bytes."""
        return message.seq in self._sent and not self.knows(message)

    def _number(self, message: Message, *, connected: bool) -> bool:
        """Judge the number; False where the batch was there already."""
        ledger, expected, rejoined = self._ledger, self.expected or 0, self._rejoined
        self._rejoined = False
        if message.publisher != self._publisher:
            self._publisher = message.publisher
            ledger.kept("3.3")
            self.new_epoch()
        elif message.seq == expected:
            ledger.kept("3.1")
            self._overlap *= message.seq < self._overlap
        elif message.seq > expected and rejoined:
            pass  # what is missing was sent to nobody
        elif message.seq > expected:
            self.missing += message.seq - expected
            self.blocks.lose()
        elif message.seq < self._overlap and (self._state or self.knows(message)):
            self._overlap *= message.seq < self._overlap - 1  # that was the last of them
            return False
        elif self.knows(message) and not rejoined:
            shown = Evidence(f"payload of batch {message.seq}", message.payload)
            ledger.broken("3.1", f"number {message.seq} was sent twice", shown)
            return False
        else:
            self._restart(message, connected=connected)
        return True

    def _restart(self, message: Message, *, connected: bool) -> None:
        if message.seq == 0:
            self._ledger.kept("3.3")
        elif connected:
            text = f"the numbers went back from {self.expected} to {message.seq}, and not to 0"
            self._ledger.broken("3.3", text, Evidence(f"payload of batch {message.seq}", message.payload))
        else:
            self._ledger.unseen("3.3", f"a restart was seen, but its first batches were not (first: {message.seq})")
        self.new_epoch()

    def _begin(self, message: Message, payload: Payload) -> None:
        """The first batch that is seen of an epoch."""
        self.blocks.reset(complete=message.seq == 0)
        if message.seq != 0:
            return
        if payload.clears_first:
            self._ledger.kept("11.3")
        else:
            self.uncleared.append(Evidence("payload of batch 0", message.payload))

    def _check_rank(self, payload: Payload, message: Message) -> None:
        if self._batches == 1:
            self._rank = payload.rank if self._wanted is None else self._wanted
        if payload.rank == self._rank:
            if payload.rank is not None:
                self._ledger.kept("10.1")
                self._ledger.kept("1.2")
            return
        shown = Evidence(f"payload of batch {message.seq}", message.payload)
        text = f"batch {message.seq} has rank {payload.rank!r:.20} in the stream of rank {self._rank!r:.20}"
        self._ledger.broken("10.1", text, shown)
        if payload.rank is not None and self._rank is not None:
            self._ledger.broken("1.2", text, shown)


class Silence:
    """How long nothing has come, and whether an empty batch ended it (3.6)."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._silent = 0.0
        self._said = False

    def passed(self, seconds: float) -> None:
        """Nothing came for these seconds more, while somebody was waiting for it."""
        self._silent += seconds
        if self._silent >= SILENCE_S and not self._said:
            self._said = True
            self._ledger.broken("3.6", f"nothing was sent for more than {SILENCE_S:g} s")

    def ended(self, payload: Payload | None) -> None:
        """A batch has come."""
        if self._silent >= _PAUSE_S and not self._said and payload is not None and payload.empty:
            self._ledger.kept("3.6")
        self.restart()

    def restart(self) -> None:
        """Count from now on: the connection has just been made, say."""
        self._silent, self._said = 0.0, False
