"""The engine that a router is tried with: it does what the steps of a case say."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvbus.client import BlockView, Stored
from kvbus.core.types import Reason
from kvbus.core.wire.codec import decode_batch
from kvbus.core.wire.frames import END_SEQ
from kvbus.core.wire.schema import BlockStored
from kvbus.tools.conform.router.arrays import positional
from kvbus.tools.conform.router.steps import Again, Batch, BrokenOff, Case, Late, Message, Restart, Step, Trimmed
from kvbus.tools.conform.router.views import Known, Source, canonical
from kvbus.tools.conform.vectors import CLEARED, Frames, pack, stored
from kvbus.transport.engine.publisher import EnginePublisher

MARKERS: Final = range(2**40, 2**41)
"""Hashes of blocks that show how far a router has read; it is not judged by them."""

_NUMBERS: Final = itertools.count()
_TOKENS: Final = 100_000
"""The first token of these blocks."""
_ASKED: Final = 4096
"""Blocks of a batch that a router is asked for: all of a batch of 4 MiB make no request."""


@dataclass
class _Rank:
    """A publisher in the course of a case.

    Attributes:
        publisher: the sockets.
        base: the number with which the epoch begins.
        framing: of answers.
        numbers: of the batches of the case so far.
        first: the batch before which answers hold nothing.
        late: seconds by which answers are late.
        keep: messages of the next answer, if it breaks off.
    """

    publisher: EnginePublisher
    base: int
    framing: str
    numbers: list[int] = field(default_factory=list)
    first: int = 0
    late: float = 0.0
    keep: int | None = None

    def answer(self, messages: list[Frames]) -> Iterable[Frames]:
        """Make of an answer what is sent; the publisher's replay thread calls it."""
        if self.late:
            time.sleep(self.late)
        kept = messages[:-1]
        if self.first:
            oldest = self.numbers[self.first] if self.first < len(self.numbers) else 2**63
            kept = [each for each in kept if int.from_bytes(each[2], "big") >= oldest]
        if self.framing == "3":
            kept = [[each[0], *each[2:]] for each in kept]
        if self.keep is not None:
            keep, self.keep = self.keep, None
            return kept[:keep]
        return [*kept, [b"", END_SEQ, b""] if self.framing == "3" else messages[-1]]


class Engine:
    """The publishers of a case.

    Args:
        case: what is going to happen.
        publishers: one for each rank, started.
    """

    def __init__(self, case: Case, publishers: Sequence[EnginePublisher]) -> None:
        self.known: Final[Known] = {}
        self.before_loss: Final[set[int]] = set()
        """What was stored before the last batch that was lost; empty if none was."""
        self.markers: Final[set[int]] = set()
        """The blocks of the last call of `mark`."""
        self.payloads: Final[list[bytes]] = []
        """What was sent as it is."""
        self._positional: Final = case.arrays
        self._ranks: Final = [_Rank(each, each.next_seq, case.framing) for each in publishers]
        self._asked: Final = sum(each.replay_requests for each in publishers)
        for rank in self._ranks:
            rank.publisher.replay_fault = rank.answer

    @property
    def asked(self) -> int:
        """How many replays were asked for."""
        return sum(rank.publisher.replay_requests for rank in self._ranks) - self._asked

    @property
    def subscriptions(self) -> int:
        """How many subscriptions have arrived."""
        return sum(rank.publisher.subscriptions for rank in self._ranks)

    def do(self, step: Step) -> None:
        """Carry out a step that is the engine's."""
        match step:
            case Batch(events, lost, at):
                self._publish(self._ranks[at], pack([time.time(), list(events), at]), lost=lost)
            case Message(frames, lost):
                self._send(frames, lost=lost)
            case Again(batch, at):
                self._ranks[at].publisher.send_again(self._ranks[at].numbers[batch])
            case Restart(at, connected):
                rank = self._ranks[at]
                rank.base, rank.first = 0, 0
                rank.numbers.clear()
                (rank.publisher.renumber if connected else rank.publisher.restart)()
            case Trimmed(first):
                self._ranks[0].first = first
            case Late(seconds):
                self._ranks[0].late = seconds
            case BrokenOff(keep):
                self._ranks[0].keep = keep

    def mark(self) -> None:
        """Store a block in each rank that shows that the router has read all before it."""
        self.markers.clear()
        for at, rank in enumerate(self._ranks):
            number = next(_NUMBERS)
            marker = MARKERS[number]
            tokens = [_TOKENS + 2 * number, _TOKENS + 2 * number + 1]
            payload = self._pack([stored(marker, token_ids=tokens)], at)
            self._learn(payload)
            self.markers.add(marker)
            rank.publisher.publish(payload)

    def clear(self) -> None:
        """Leave nothing to the next case."""
        for at, rank in enumerate(self._ranks):
            rank.publisher.replay_fault = list
            rank.publisher.publish(self._pack([CLEARED], at))

    def _pack(self, events: Sequence[Any], rank: int) -> bytes:
        """Return what is the kit's own in the form that the router gets."""
        return pack([time.time(), [positional(event) if self._positional else event for event in events], rank])

    def _publish(self, rank: _Rank, payload: bytes, *, lost: bool, frames: Frames | None = None) -> None:
        if lost:
            self.before_loss.update(block for block in self.known if block not in MARKERS)
        self._learn(payload)
        seq = None if frames is None else int.from_bytes(frames[1][:8], "big")
        rank.numbers.append(rank.publisher.publish(payload, seq=seq, live=not lost and frames is None))
        if frames is not None and not lost:
            rank.publisher.send_frames(*frames)

    def _send(self, frames: Frames, *, lost: bool) -> None:
        rank = self._ranks[0]
        frames = [rank.publisher.topic or frames[0], *frames[1:]]
        self.payloads.append(frames[-1])
        number = int.from_bytes(frames[1][:8], "big")
        if len(frames) != 3 or len(frames[1]) not in {8, 24} or number >= 2**63:
            rank.publisher.send_frames(*frames)
        elif rank.base + number < rank.publisher.next_seq:
            rank.publisher.send_frames(frames[0], (rank.base + number).to_bytes(8, "big"), frames[2])
        else:
            wide = (rank.base + number).to_bytes(8, "big") + frames[1][8:]
            self._publish(rank, frames[2], lost=lost, frames=[frames[0], wide, frames[2]])

    def _learn(self, payload: bytes) -> None:
        """Take in what a request has to contain to hit the blocks of a payload."""
        batch = decode_batch(payload)
        if isinstance(batch, Reason):
            return
        view = BlockView()
        changes = (change for event in batch.events if isinstance(event, BlockStored) for change in view.apply(event))
        for change in itertools.islice(changes, _ASKED):
            if isinstance(change, Stored) and (tokens := change.block.token_ids):
                parent = None if change.block.parent is None else canonical(change.block.parent)
                source = Source(parent, [_first(token) for token in tokens])
                self.known.setdefault(canonical(change.block.hash), source)


def _first(token: Any) -> int:
    """Return the token, of a pair its first: the blocks of pairs overlap by one."""
    return int(token if isinstance(token, int) else token[0])
