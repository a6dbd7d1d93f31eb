"""SGLang's snapshots (sglang#34407, version 1): the hashes of a stream's blocks, and where its live batches go on.

Request: ``["", "snapshot-v1"]`` from a DEALER. Reply, each message behind the envelope of the request::

    ["header", [1, epoch, rank, resume_seq, barrier_seq, barrier id, number of records]]
    ["chunk", [[parent or nil, [hash]], ...]]      any number of them
    ["end", ""]

or ``["error", why]`` alone; what stands in brackets inside is msgpack. The live stream has an empty batch at
``barrier_seq``, whose topic ends with the barrier's id: what came before it is in the snapshot, what follows is not.
The topic of every batch ends with the epoch, the id of the stream's numbering.

Records name no tier, and readers take them for the device's (sgl-kv-indexer): blocks of other tiers are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Final

import msgspec
from msgspec import structs

from kvbus.core.blocks.compaction import StateSnapshot
from kvbus.core.types import DEVICE_MEDIUM, Hash, medium_key
from kvbus.core.wire.parts import hashes_of, value

REQUEST: Final = b"snapshot-v1"
VERSION: Final = 1
EPOCH_MARK: Final = b"\0sgl-kv-epoch="
BARRIER_MARK: Final = b"\0sgl-kv-snapshot="
RECORDS: Final = 4096
"""Records of one chunk, as the proposed publisher has it; sgl-router takes 8,192."""

_encode: Final = msgspec.msgpack.Encoder().encode


def epoch_mark(publisher_id: bytes) -> bytes:
    """What every topic of a stream with this id ends with; nothing where it has none."""
    return EPOCH_MARK + publisher_id.hex().encode() if publisher_id else b""


def marked(topic: bytes, mark: bytes) -> bytes:
    """A topic with a stream's own mark in place of an engine's; as it is where the stream has none."""
    return topic.partition(EPOCH_MARK)[0] + mark if mark else topic


def _barrier_id(epoch: str, seq: int) -> str:
    return f"{epoch}-{seq}"


def barrier_topic(topic: bytes, epoch: str, seq: int) -> bytes:
    """The topic of the barrier with this seq."""
    return topic + BARRIER_MARK + _barrier_id(epoch, seq).encode()


class Cut:
    """A state as of a barrier, as records; they are gathered slice by slice.

    Args:
        epoch: the stream's, in hexadecimal digits.
        rank: whose blocks these are.
        seq: the barrier's.
        state: the stream's state there.
    """

    def __init__(self, epoch: str, rank: int, seq: int, state: StateSnapshot) -> None:
        self.foreign = False
        """It has hashes that readers of this protocol do not take."""
        self._head = [VERSION, epoch, rank, seq + 1, seq, _barrier_id(epoch, seq)]
        self._stores = state.stores()
        self._count = 0
        self._chunks: list[bytes] = []

    def gather(self) -> Iterator[list[bytes]]:
        """Take in the state; ``[]`` for each slice."""
        known: set[Hash] = set()  # a block may be there in several groups
        records: list[tuple[Hash | None, tuple[Hash]]] = []
        for events in self._stores:
            for event in events:
                if medium_key(value(event, "medium")) != DEVICE_MEDIUM:
                    continue
                chain = (value(event, "parent_block_hash"), *hashes_of(event))
                self.foreign = self.foreign or any(map(_is_foreign, chain))
                records += [(parent, (block,)) for parent, block in pairwise(chain) if block not in known]
                known.update(chain[1:])
            while len(records) >= RECORDS:
                self._put(records[:RECORDS])
                del records[:RECORDS]
            yield []
        if records:
            self._put(records)

    def _put(self, records: list[tuple[Hash | None, tuple[Hash]]]) -> None:
        self._chunks.append(_encode(records))
        self._count += len(records)

    def replies(self) -> Iterator[tuple[bytes, bytes]]:
        """The kinds and contents of the reply's messages, without its end."""
        yield b"header", _encode([*self._head, self._count])
        for chunk in self._chunks:
            yield b"chunk", chunk


def _is_foreign(block: Hash | None) -> bool:
    return block is not None and not (isinstance(block, int) and -(2**63) <= block < 2**63)


class PlacementAnswer(msgspec.Struct, frozen=True):
    """The answer to such a request, as :class:`~kvbus.core.outputs.snapshot.SnapshotAnswer` is to vLLM's.

    Attributes:
        envelope: what each message starts with.
        valid: whether the request was one.
        cut: the state, once its barrier is published.
        sent: all of it but the end is.
        over: the next message is the last one.
    """

    envelope: list[bytes]
    valid: bool
    cut: Cut | None = None
    sent: bool = False
    over: bool = False

    @property
    def outcome(self) -> str:
        """What to count it as once it is over."""
        return "compacted" if self.valid else "malformed"

    def refusal(self) -> list[bytes]:
        """Not now: the reply that there is no snapshot."""
        return [*self.envelope, b"error", b"too many requests"]


class PlacementPart(msgspec.Struct, frozen=True):
    """Some messages of the reply, and what it is like behind them."""

    answer: PlacementAnswer
    read: Iterator[list[bytes]]

    def messages(self) -> Iterator[list[bytes]]:
        """``[]`` as long as the state is being taken in, else the messages."""
        return self.read


def next_part(answer: PlacementAnswer, cut: Callable[[], Cut]) -> PlacementPart:
    """Decide on what comes next. ``cut`` publishes a barrier; called once, for a request that is one."""
    begun = answer.cut
    if answer.valid and begun is None:
        begun = cut()
        return PlacementPart(structs.replace(answer, cut=begun), begun.gather())
    if begun is None or begun.foreign:
        why = (
            b"snapshot-v1 is what is answered here"
            if begun is None
            else b"there are hashes that are no signed 64-bit integers"
        )
        return _said(structs.replace(answer, over=True), [(b"error", why)])
    if not answer.sent:
        return _said(structs.replace(answer, sent=True), begun.replies())
    return _said(structs.replace(answer, over=True), [(b"end", b"")])


def _said(answer: PlacementAnswer, replies: Iterable[tuple[bytes, bytes]]) -> PlacementPart:
    return PlacementPart(answer, ([*answer.envelope, *each] for each in replies))
