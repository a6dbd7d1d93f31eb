"""The judge of one numbered stream.

It checks frames, seqs, epochs and live blocks, and whether equal hashes stand for equal contents.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvbus.tools.conform.engine.clauses import Ledger
from kvbus.tools.conform.engine.events import Event, EventReader, Hash, Payload, TableKey
from kvbus.tools.conform.report import Evidence, Level

MAX_BLOCKS: Final = 200_000
"""Maximum number of blocks whose contents are remembered, to compare them with the contents of later blocks."""

_ROOT: Final = b"root"


class Contents:
    """A comparison of block hashes with the contents of the blocks.

    Equal hashes must stand for equal prefixes (clause 6.7), and a prefix should keep its hash after a restart (clause
    6.8).
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._epoch = 0
        self._prefix: dict[tuple[int | None, Hash], bytes] = {}
        """By KV-cache group and hash of a block: a digest of the block and all blocks before it."""
        self._named: dict[bytes, tuple[Hash, int]] = {}
        """By the digest of a block and all blocks before it: the block's hash, and the epoch of its newest store."""
        self._alone: dict[bytes, tuple[bytes, Hash]] = {}
        """By the digest of a block's own content: two values of the first block with this content.

        They are the digest of this block with all blocks before it, and its hash. A block's own content is its tokens,
        salt and other keys.
        """

    def new_epoch(self) -> None:
        """Begin a new epoch after a restart of the publisher."""
        self._epoch += 1

    def stored(self, event: Event) -> None:
        """Compare the blocks of a BlockStored event with the blocks of earlier events in the same KV-cache group."""
        group = event.table[0]
        parent = _ROOT if event.parent is None else self._prefix.get((group, event.parent))
        for at, block in enumerate(event.hashes):
            content = event.content_of(at)
            if content is None or parent is None:
                return
            alone = _digest(repr(group).encode(), content)
            parent = _digest(parent, alone)
            self._compare(event, block, alone, parent)

    def _compare(self, event: Event, block: Hash, alone: bytes, prefix: bytes) -> None:
        ledger = self._ledger
        key = (event.table[0], block)
        before = self._prefix.get(key)
        if before is not None:
            another = f"{event.where} has a hash that named another prefix before"
            ledger.judge("6.7", "" if before == prefix else another, event.evidence)
        if len(self._prefix) >= MAX_BLOCKS:
            return
        self._prefix.setdefault(key, prefix)
        other = self._alone.setdefault(alone, (prefix, block))
        if other[0] != prefix and other[1] != block:
            # An earlier block has the same tokens after another prefix, and the hashes of the two blocks differ, as
            # clause 6.7 requires.
            ledger.kept("6.7")
        known = self._named.get(prefix)
        if known is not None and known[1] != self._epoch:
            another = f"{event.where} has another hash than before the restart"
            ledger.judge("6.8", "" if known[0] == block else another, event.evidence)
        self._named[prefix] = (block, self._epoch)


def _digest(*parts: bytes) -> bytes:
    made = hashlib.blake2b(digest_size=12)
    for part in parts:
        made.update(len(part).to_bytes(4, "big") + part)
    return made.digest()


@dataclass(slots=True)
class _Live:
    """A live block of one group on one medium.

    Attributes:
        stores: number of stores of the block minus number of removals.
        parent: hash of the parent block.
    """

    stores: int
    parent: Hash | None


class Blocks:
    """The live blocks that a reader holds if it applies all events in order.

    Attributes:
        complete: whether every batch has arrived since the epoch began or since all blocks were cleared. If it is true,
            a block that is not in this object is not live.
        stored_again: number of stores of blocks that were already live. A caller may set it to 0.
        clears: number of AllBlocksCleared events.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.complete = False
        self.stored_again = 0
        self.clears = 0
        self._ledger = ledger
        self._live: dict[TableKey, dict[Hash, _Live]] = defaultdict(dict)
        self._children: Counter[tuple[TableKey, Hash | None]] = Counter()
        """Number of live children, by the table (group, medium, locality and owner) and hash of the parent block."""
        self._cleared: set[tuple[TableKey, Hash]] = set()
        """Blocks that the last clear of all media removed, and that have not been stored since."""
        self._open_clears = 0
        """Number of clears of live blocks in the newest batch that has events.

        They keep clause 11.1 if the next batch with events does not break it.
        """

    @property
    def live(self) -> set[tuple[TableKey, Hash]]:
        """All live blocks, as pairs of table (group, medium, locality and owner) and hash."""
        return {(table, block) for table, blocks in self._live.items() for block in blocks}

    def __len__(self) -> int:
        return sum(map(len, self._live.values()))

    def lose(self) -> None:
        """Mark the blocks as incomplete, because a batch is missing."""
        self.complete = False

    def reset(self, *, complete: bool) -> None:
        """Delete all blocks, because an epoch begins or all blocks were cleared.

        ``complete`` says whether the blocks are complete from now on.
        """
        self._live.clear()
        self._children.clear()
        self._cleared.clear()
        self.complete = complete

    def apply(self, events: list[Event]) -> None:
        """Apply the events of a batch to the live blocks, and judge them."""
        clears, self._open_clears = self._open_clears, 0
        for event in events:
            if event.kind == "AllBlocksCleared":
                self._clear(event)
            elif event.kind == "BlockStored":
                self._store(event)
            else:
                self._remove(event)
        if not events:
            self._open_clears = clears
        elif not self._ledger.is_broken("11.1"):
            self._ledger.kept("11.1", clears)

    def _store(self, event: Event) -> None:
        live, parent = self._live[event.table], event.parent
        if parent is not None and event.hashes:
            if self._is_live(event.table[0], parent):
                self._ledger.kept("6.11")
            elif self.complete:
                text = f"{event.where} has a parent that is not live"
                self._ledger.broken("6.11", text, event.evidence)
        for block in event.hashes:
            if block in live:
                live[block].stores += 1
                self.stored_again += 1
                if self.complete:
                    text = f"{event.where} stores a block that is live already in its group and medium (a copy)"
                    self._ledger.broken("7.1", text, event.evidence, level=Level.SHOULD)
            else:
                live[block] = _Live(1, parent)
                self._children[event.table, parent] += 1
                self._cleared.discard((event.table, block))
            parent = block

    def _is_live(self, group: int | None, block: Hash) -> bool:
        return any(block in blocks for table, blocks in self._live.items() if table[0] == group)

    def _remove(self, event: Event) -> None:
        live = self._live[event.table]
        for at, block in enumerate(event.hashes):
            if block not in live:
                self._not_live(event, block)
                continue
            found = live[block]
            if self.complete:
                self._check_copies(event, at, found.stores)
            found.stores -= 1
            if found.stores:
                continue
            del live[block]
            siblings = event.table, found.parent
            self._children[siblings] -= 1
            if not self._children[siblings]:
                del self._children[siblings]
            if not self.complete:
                continue
            self._ledger.kept("7.1")
            if self._is_live(event.table[0], block):
                self._ledger.kept("9.2")
            children = self._children[event.table, block]
            wrong = f"{event.where} removes a block before its {children} live children" if children else ""
            self._ledger.judge("6.12", wrong, event.evidence, level=Level.SHOULD)

    def _check_copies(self, event: Event, at: int, stores: int) -> None:
        ledger = self._ledger
        if event.remaining is None:
            if stores > 1:
                text = f"{event.where} removes one of {stores} copies, without remaining_copy_counts"
                ledger.broken("7.2", text, event.evidence)
        elif len(event.remaining) != len(event.hashes) or event.remaining[at] != stores - 1:
            text = f"{event.where} has remaining_copy_counts {event.remaining!r:.60} after {stores} stores"
            ledger.broken("7.2", text, event.evidence)
        elif stores > 1:
            ledger.kept("7.2")

    def _not_live(self, event: Event, block: Hash) -> None:
        if not self.complete:
            return
        clause, text = "7.1", f"{event.where} removes a block that is not live"
        if (event.table, block) in self._cleared:
            self._cleared.discard((event.table, block))
            clause = "11.1"
            text = f"{event.where} removes a block on {event.table[1]} that AllBlocksCleared had cleared"
        elif self._is_live(event.table[0], block):
            clause = "9.2"
            text = f"{event.where} removes a block from {event.table[1]} that was stored only on another medium"
            if any(block in blocks for table, blocks in self._live.items() if table[:2] == event.table[:2]):
                text = f"{event.where} removes a block under another locality or owner than it was stored"
        self._ledger.broken(clause, text, event.evidence)

    def _clear(self, event: Event) -> None:
        self.clears += 1
        medium = event.table[1]
        if medium:
            for table in [table for table in self._live if table[1] == medium]:
                self._children -= Counter((table, live.parent) for live in self._live.pop(table).values())
            return
        self._open_clears += len(self) > 0
        cleared = self.live
        self.reset(complete=True)
        self._cleared = cleared


SEQ_END: Final = 2**63
SILENCE_S: Final = 2.5
"""Seconds without a message after which an idle publisher breaks clause 3.6.

The clause asks for an empty batch each second. An empty batch that comes before this time may only be late.
"""
_PAUSE_S: Final = 0.8
"""Minimum seconds without a message after which an empty batch shows that the publisher keeps clause 3.6.

The clause asks for an empty batch after each second of silence.
"""
_REMEMBERED: Final = 10_000
"""Maximum number of remembered payload checksums, which distinguish a repeated batch from one of another epoch."""


@dataclass(frozen=True, slots=True)
class Message:
    """A live message that has three frames, as section 2 of docs/spec requires.

    ``publisher`` is the publisher's id; empty if the sequence frame has only 8 bytes.
    """

    topic: bytes
    seq: int
    payload: bytes
    publisher: bytes = b""

    @property
    def evidence(self) -> Evidence:
        """The payload of the message, as evidence for a verdict."""
        return Evidence(f"payload of batch {self.seq}", self.payload)

    @property
    def clears_first(self) -> bool:
        """Whether the payload is a batch whose first event clears all media."""
        payload = EventReader(Ledger()).read(self.payload, self.seq)
        return payload is not None and payload.clears_first


def parse(frames: Sequence[bytes], ledger: Ledger) -> Message | None:
    """Judge and decode the frames of a live message. Return None if there are not three frames, or no valid seq."""
    if len(frames) != 3:
        shown = [Evidence(f"frame {at}", frame) for at, frame in enumerate(frames[:4])]
        ledger.broken("2.1", f"a message has {len(frames)} frames", *shown)
        return None
    ledger.kept("2.1")
    topic, seq, payload = frames
    number = int.from_bytes(seq[:8], "big")
    wrong = f"the number {number} is not below 2^63" if number >= SEQ_END else ""
    if len(seq) not in {8, 24}:
        wrong = f"a sequence frame has {len(seq)} bytes"
    ledger.judge("2.2", wrong, Evidence("sequence frame", seq))
    return None if wrong else Message(topic, number, payload, seq[8:])


class Stream:
    """The judge of the batches of one numbered stream, in their order of arrival.

    Args:
        ledger: records the observations.
        rank: rank of the publisher; None for the rank that its first batch names.

    Attributes:
        expected: seq of the next batch; None before the first batch.
        blocks: the live blocks.
    """

    def __init__(self, ledger: Ledger, rank: int | None = None) -> None:
        self.expected: int | None = None
        self.blocks = Blocks(ledger)
        self.epochs = 0
        """Number of epochs after the first one."""
        self.uncleared: list[Evidence] = []
        """The payload of each batch 0 that did not begin with AllBlocksCleared."""
        self.missing = 0
        """Number of seqs that were skipped. It is not known whether the publisher has sent their batches."""
        self._ledger = ledger
        self._reader = EventReader(ledger)
        self._contents = Contents(ledger)
        self._sent: dict[int, int] = {}
        """Checksums of the newest payloads, by seq."""
        self._publisher = b""
        self._wanted = rank
        self._rank: Any = None
        self._batches = 0
        self._rejoined = False
        self._overlap = 0
        """One past the highest seq of the last replay answer. Batches below this seq may also arrive live."""
        self._state = False
        """Whether the last replay answer was a state.

        The batches of a state differ from the live batches with the same seqs.
        """

    def overlaps(self, *, state: bool) -> None:
        """Expect that the batches of a replay answer, which this stream has just judged, also arrive live.

        ``state`` says whether the answer was a state, which begins with AllBlocksCleared.
        """
        self._overlap, self._state = self.expected or 0, state

    def rejoin(self) -> None:
        """Continue after a lost connection. Call this if no replay answer has the batches that were sent meanwhile.

        These batches are not a gap that the publisher has caused, and without them the live blocks are not completely
        known.
        """
        self._rejoined = True
        self.blocks.lose()

    def gap_before(self, message: Message) -> int | None:
        """Return the first missing seq if batches are missing before a message; otherwise None."""
        if self.expected is None or self._rejoined:
            return None
        if message.publisher != self._publisher or message.seq <= self.expected:
            return None
        return self.expected

    def take(self, message: Message, *, connected: bool = False) -> Payload | None:
        """Judge the next batch, and return its decoded payload.

        ``connected`` says whether the connection has been up since the previous batch.

        Returns:
            The decoded payload; None if the payload is not a batch, or if the batch is a repetition.
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

    def new_epoch(self) -> None:
        """Begin a new epoch of the publisher, whose first batch is the next one."""
        self.epochs += 1
        self._overlap = 0
        self._batches = 0
        self._rank = None
        self._sent.clear()
        self._reader.new_epoch()
        self._contents.new_epoch()
        self.blocks.reset(complete=False)

    def knows(self, message: Message) -> bool:
        """Return whether a batch with this seq and the same payload was processed before."""
        return self._sent.get(message.seq) == zlib.crc32(message.payload)

    def contradicts(self, message: Message) -> bool:
        """Return whether an earlier batch had the same seq as this message, but another payload."""
        return message.seq in self._sent and not self.knows(message)

    def _number(self, message: Message, *, connected: bool) -> bool:
        """Judge the seq of a batch. Return False if the batch is a repetition.

        ``connected`` says whether the connection has stayed open since the previous batch. If it has, the publisher
        breaks clause 3.3 if the seqs go back to a seq other than 0.
        """
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
            pass  # do not count the missing batches: they were sent while there was no connection
        elif message.seq > expected:
            self.missing += message.seq - expected
            self.blocks.lose()
        elif message.seq < self._overlap and (self._state or self.knows(message)):
            # 0 (no more repetitions) after the newest batch of the replay answer
            self._overlap *= message.seq < self._overlap - 1
            return False
        elif self.knows(message) and not rejoined:
            ledger.broken("3.1", f"number {message.seq} was sent twice", message.evidence)
            return False
        else:
            self._restart(message, connected=connected)
        return True

    def _restart(self, message: Message, *, connected: bool) -> None:
        if message.seq == 0:
            self._ledger.kept("3.3")
        elif connected:
            text = f"the numbers went back from {self.expected} to {message.seq}, not to 0"
            self._ledger.broken("3.3", text, message.evidence)
        else:
            self._ledger.unseen("3.3", f"a restart was seen, but its first batches were not (first: {message.seq})")
        self.new_epoch()

    def _begin(self, message: Message, payload: Payload) -> None:
        """Judge the first received batch of an epoch.

        If its seq is not 0, the kit has not seen the beginning of the epoch. It then judges nothing, and may not know
        all live blocks.
        """
        self.blocks.reset(complete=message.seq == 0)
        if message.seq != 0:
            return
        if payload.clears_first:
            self._ledger.kept("11.3")
        else:
            self.uncleared.append(message.evidence)

    def _check_rank(self, payload: Payload, message: Message) -> None:
        if self._batches == 1:
            self._rank = payload.rank if self._wanted is None else self._wanted
        if payload.rank == self._rank:
            if payload.rank is not None:
                self._ledger.kept("10.1")
                self._ledger.kept("1.2")
            return
        text = f"batch {message.seq} has rank {payload.rank!r:.20} in the stream of rank {self._rank!r:.20}"
        self._ledger.broken("10.1", text, message.evidence)
        if payload.rank is not None and self._rank is not None:
            self._ledger.broken("1.2", text, message.evidence)


class Silence:
    """The judge of silence, by clause 3.6: an idle publisher has to send an empty batch each second."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._silent = 0.0
        self._reported = False

    def passed(self, seconds: float) -> None:
        """Add seconds to the measured silence. In this time the connection was up and no message came."""
        self._silent += seconds
        if self._silent >= SILENCE_S and not self._reported:
            self._reported = True
            self._ledger.broken("3.6", f"nothing was sent for more than {SILENCE_S:g} s")

    def ended(self, payload: Payload | None) -> None:
        """Record that a batch has ended the silence. ``payload`` is its payload; None if it cannot be decoded."""
        if self._silent >= _PAUSE_S and not self._reported and payload is not None and payload.empty:
            self._ledger.kept("3.6")
        self.restart()

    def restart(self) -> None:
        """Set the measured silence to 0, for example after a new connection."""
        self._silent, self._reported = 0.0, False
