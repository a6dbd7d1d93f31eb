"""Which block size a stream of events really has.

There are three kinds, and the wire does not say which one it is:

* *one size*, as most engines have; where it is a multiple of the size the operator pinned, every block is reblocked;
* *variable* (SGLang before fixed pages): a whole radix node has one hash, ``block_size == len(token_ids)``; every event
  is reblocked;
* *two sizes* (hybrid models): the same tokens are announced at a fine and at a coarse size on one medium; the fine
  stream is the truth and the coarse one is left out.

One fact distinguishes them: an engine with real blocks sooner or later puts several of them into one event, and a
radix node never carries more than one hash. If the size is learned too late, the group is announced again. Once a size
has proven itself, by more than a few stores, one odd event does not overturn it: that event is rejected.

Beside them there are *tail blocks* (vLLM with partial cache hits): the last tokens of a prompt, in one block smaller
than those of its group. They are left out, and teach nothing once the group's size is known or pinned. Engines that
send them number their groups and have no radix nodes: in such a group the largest of several single blocks is a whole
one.
"""

from __future__ import annotations

import math
from enum import Enum, auto
from typing import Any, Final

import msgspec
from msgspec import structs

from kvbus.core.blocks.chunk import Chunk
from kvbus.core.blocks.index import Index, TableKey
from kvbus.core.types import DEVICE_MEDIUM


class Treatment(Enum):
    """What to do with a store of one size."""

    NATIVE = auto()
    REBLOCK = auto()
    COARSE = auto()
    TAIL = auto()
    REJECT = auto()


SETTLE_EVENTS: Final = 32
"""Single-block stores after which a stream counts as proven: a radix tree shows two node lengths long before that."""

YOUNG: Final = 4
"""Up to so many stores of a proven size, one multi-block store of a finer size overrules it at once."""

RELEARN_EVENTS: Final = 16
"""After that, so many multi-block stores of another size overrule the proven one: of a finer size in all, of a larger
one in a row, with none of the proven size between (then an odd event came first). Fewer are taken at face value."""


class BlockSizeDetector(msgspec.Struct):
    """The sizes seen in one group, and what follows from them. ``pinned`` is the operator's ``block_size``."""

    # What is known from the start.
    pinned: int | None = None
    numbered: bool = False
    """The engine gives the group a number: it is no engine of radix nodes, and may announce tails."""

    # From events of several blocks.
    proven: int = 0
    """The block size, once an event has held several blocks of it."""
    support: int = 0
    """Stores of the proven size, counted no further than they matter (:data:`YOUNG`)."""
    finer: dict[int, int] = {}
    larger: dict[int, int] = {}
    """Stores of other sizes since, by size."""

    # From events of one block.
    seen: int = 0
    """Stores that came before a size was proven, counted no further than :data:`SETTLE_EVENTS`."""
    single: int = 0
    """The size of blocks that came one by one: the smallest, in a numbered group the largest."""
    divisor: int = 0
    """The greatest common divisor of these sizes."""
    variable: bool = False
    """Events are whole radix nodes: two sizes, and never several blocks in one event."""

    def observe(self, size: int, blocks: int) -> bool:
        """Take in one store of ``blocks`` blocks; True if events seen before would now be treated differently.

        Call it for every store of a batch before any of them is applied.
        """
        if blocks == 1 and size < (self.pinned or 0):
            return False
        if self.proven:
            return self._challenge(size, blocks)
        first = not self.seen
        if self.seen >= SETTLE_EVENTS and blocks == 1:
            return False
        self.seen += 1
        before = (self.base, self.size, self.variable)
        if blocks > 1:
            self.proven = size
            if self.pinned is not None and self.single == self.pinned and not self.numbered:
                self.proven = self.pinned
            self.support = 1
            self.variable = False
            return not first and before != (self.base, self.size, False)
        self.variable |= not first and size != self.single and not self.numbered
        self.single = size if first else max(size, self.single) if self.numbered else min(size, self.single)
        self.divisor = math.gcd(self.divisor, size)
        return not first and before != (self.base, self.size, self.variable)

    @property
    def knows(self) -> bool:
        """Whether a store has taught anything."""
        return bool(self.seen or self.proven)

    def teaches_nothing(self, size: int) -> bool:
        """Whether a single block of this size is a tail: it says nothing about the size of whole blocks."""
        return size < (self.pinned or 0) or (self.numbered and size < self.size)

    def _challenge(self, size: int, blocks: int) -> bool:
        if size == self.proven:
            self.support += self.support <= YOUNG  # more than that makes no difference
            self.larger.clear()
            return False
        if self.proven == self.pinned or (blocks == 1 and (size != self.pinned or self.numbered)):
            return False
        rivals = self.larger if size > self.proven else self.finer
        rivals[size] = count = rivals.get(size, 0) + 1
        at_once = size == self.pinned or (size < self.proven and self.support <= YOUNG)
        if not at_once and count < RELEARN_EVENTS:
            return False
        self.proven, self.support = size, count
        self.finer.clear()
        self.larger.clear()
        return True

    @property
    def size(self) -> int:
        """Tokens per block of the engine's own blocks; 0 while nothing is known, or where they have no one size."""
        return self.proven or (0 if self.variable else self.single)

    @property
    def base(self) -> int:
        """Tokens per block on the output; 0 while nothing is known."""
        if self.pinned is not None:
            return self.pinned
        return self.divisor if self.variable else self.size

    def is_native(self, size: int) -> bool:
        """Whether blocks of this size leave as they came."""
        own = self.size
        return size == own == (self.pinned or own)

    def treatment(self, size: int, blocks: int = 1, *, fine: bool = True) -> Treatment:
        """What a store of so many blocks of this size becomes. Call after :meth:`observe`.

        ``fine`` says whether the store's medium has blocks of the group's own size. A larger block on a medium without
        them (a tier with larger chunks) repeats nothing: it is cut into blocks of the size that leaves.
        """
        own = self.size
        pinned = self.pinned or own
        if self.is_native(size):
            return Treatment.NATIVE
        if blocks == 1 and size < max(own, pinned):
            return Treatment.TAIL
        if self.variable or size == own or (size > own and not fine):
            return Treatment.REBLOCK if size % self.base == 0 else Treatment.REJECT
        return Treatment.COARSE if size > own and size % own == 0 else Treatment.REJECT


class GroupSizes:
    """The block sizes of one group. They are learned from one medium and hold for all media.

    Args:
        detector: learns them.
        medium: the medium they are learned from: the device, or the group's first medium until the device stores.
            Empty while no store with tokens has come.
    """

    def __init__(self, detector: BlockSizeDetector, medium: str) -> None:
        self.detector = detector
        self.medium = medium
        self.fine = {medium}
        """Media that have stored blocks of the group's own size. Only there does a larger block repeat smaller ones."""

    def must_begin_anew(self, medium: str, size: int, blocks: int) -> bool:
        """Whether the sizes have to be learned anew from this store.

        The device counts before every other medium. Without it, several blocks of a finer size count before coarser
        ones. A device that confirms the known size takes over without a new beginning.
        """
        if not self.detector.knows:
            return medium != self.medium
        if self.medium in {DEVICE_MEDIUM, medium}:
            return False
        if medium != DEVICE_MEDIUM and self.medium:
            return blocks > 1 and 0 < size < self.detector.size
        if size == self.detector.size:
            self.medium = medium
            self.fine.add(medium)
            return False
        return not (blocks == 1 and self.detector.teaches_nothing(size))


class BlockSizes:
    """The block sizes of one source.

    Args:
        pinned: the operator's block size.
        index: the live blocks.

    Attributes:
        groups: the sizes of each group, in the order in which the groups came.
        relearned: blocks that were announced before would now be treated differently. The caller resets it.
    """

    def __init__(self, pinned: int | None, index: Index) -> None:
        self._pinned = pinned
        self._index = index
        self.groups: dict[int | None, GroupSizes] = {}
        self.relearned = False

    def observe(self, group: int | None, medium: str, size: int, blocks: int, *, tokens: bool) -> None:
        """Learn from a store. One without tokens counts only until a store of its group with tokens comes."""
        sizes = self.groups.get(group)
        if sizes is not None and not tokens:
            return
        source = medium if tokens else ""
        if sizes is None or sizes.must_begin_anew(medium, size, blocks):
            self.relearned |= sizes is not None and sizes.detector.knows
            sizes = GroupSizes(BlockSizeDetector(self._pinned, numbered=group is not None), source)
            self.groups[group] = sizes
        if source == sizes.medium:
            own = sizes.detector.size
            self.relearned |= sizes.detector.observe(size, blocks)
            if sizes.detector.size != own:
                sizes.fine = {sizes.medium}
        elif size == sizes.detector.size and medium not in sizes.fine:
            sizes.fine.add(medium)
            table = self._index.tables.get((group, medium))
            self.relearned |= table is not None and len(table.refs) > 0  # larger blocks were cut, and are repeated

    def treatment(self, key: TableKey, chunk: Chunk) -> Treatment:
        """Return what the blocks of a chunk become. Sub-blocks are named by their tokens."""
        sizes = self.groups[key[0]]
        found = sizes.detector.treatment(chunk.block_size, len(chunk.hashes), fine=key[1] in sizes.fine)
        return Treatment.COARSE if found is Treatment.REBLOCK and chunk.hash_only else found

    def dump(self) -> list[Any]:
        """Return plain data for a restart."""
        return [
            [group, structs.asdict(each.detector), each.medium, sorted(each.fine)]
            for group, each in self.groups.items()
        ]

    def load(self, data: list[Any]) -> None:
        """Take in the result of :meth:`dump`."""
        for group, detector, medium, fine in data:
            sizes = self.groups[group] = GroupSizes(BlockSizeDetector(**detector), medium)
            sizes.fine.update(fine)
