"""Detect the block size of each group of an engine's blocks.

There are three kinds of streams, and no message says of which kind its stream is:

* *One size* (most engines). If the operator has configured (pinned) a divisor of this size, kvbus cuts every block.
* *Variable* (SGLang before fixed pages): one hash names a complete node of the radix tree, and ``block_size`` is
  ``len(token_ids)``. kvbus cuts every node into blocks.
* *Two sizes* (hybrid models): the same tokens are announced in small and in large blocks on one medium. kvbus sends the
  small blocks and leaves the large ones out.

One fact shows that blocks are not radix nodes: an engine with fixed blocks sooner or later puts several blocks into one
store, but the store of a radix node has only one hash. If kvbus learns the size only after it has announced blocks, it
announces the group again. After a few stores of a size, one store of another size does not change the size: kvbus
rejects that store.

There are also *tail blocks* (vLLM with partial cache hits): the last tokens of a prompt, in one block that is smaller
than the group's blocks. kvbus does not send tail blocks. Once the group's size is known or pinned, kvbus learns nothing
from them. Engines that send tail blocks number their groups and have no radix nodes. So in a numbered group,
the largest block among stores of one block each is a complete block.
"""

from __future__ import annotations

import math
from enum import Enum, auto
from typing import Any, Final

import msgspec
from msgspec import structs

from kvbus.core.blocks.chunk import Chunk
from kvbus.core.blocks.compaction import most_blocks
from kvbus.core.blocks.index import MAX_RUN, Index, TableKey
from kvbus.core.types import DEVICE_MEDIUM


class Treatment(Enum):
    """The way in which kvbus treats the blocks of a store, depending on their block size.

    Attributes:
        NATIVE: send the blocks unchanged.
        REBLOCK: cut the blocks into sub-blocks, and send these.
        COARSE: leave the blocks out, because their tokens are also announced in smaller blocks.
        TAIL: leave the block out, because it is an incomplete block at the end of a prompt.
        REJECT: refuse the store, because its block size does not fit the group.
    """

    NATIVE = auto()
    REBLOCK = auto()
    COARSE = auto()
    TAIL = auto()
    REJECT = auto()


SETTLE_EVENTS: Final = 32
"""Number of stores with one block after which further stores with one block do not change the detected block size.

An engine with a radix tree has blocks of different sizes, and its first stores already show this.
"""

YOUNG: Final = 4
"""Number of stores up to which a detected block size is easy to replace.

Up to this number, one store of several smaller blocks replaces the size. Later, :data:`RELEARN_EVENTS` stores are
needed.
"""

RELEARN_EVENTS: Final = 16
"""Number of stores of another size that replace a block size which had more than :data:`YOUNG` stores.

Only stores of several blocks count. Stores of a smaller size count even if other stores come between them. Stores of a
larger size count only if no store of the present size comes between them. If none comes, only an exceptional event had
the present size.
"""


class BlockSizeDetector(msgspec.Struct):
    """The detector of one group's block size. It keeps the sizes that the group's stores have had.

    Attributes:
        pinned: the ``block_size`` that the operator has configured; None if there is none.
    """

    # values that are known from the start
    pinned: int | None = None
    numbered: bool = False
    """Whether the engine gives the group a number.

    The stores of such an engine are never radix nodes, but may be tail blocks.
    """

    # values that are learned from stores that have several blocks
    proven: int = 0
    """The block size that a store of several blocks has proven, in tokens; 0 if there was no such store."""
    support: int = 0
    """Number of stores that have had the proven size. The count stops just above :data:`YOUNG`."""
    finer: dict[int, int] = {}
    larger: dict[int, int] = {}
    """Numbers of stores whose blocks were larger than the proven size, by their size in tokens.

    ``finer`` has the numbers for smaller blocks. Both count from the moment when the size was proven.
    """

    # values that are learned from stores that have only one block
    seen: int = 0
    """Number of stores with one block that came before a size was proven. The count stops at :data:`SETTLE_EVENTS`."""
    single: int = 0
    """Size in tokens of the smallest block among stores of one block each.

    If the engine numbers the group, it is the size of the largest one, because the smaller ones may be tail blocks.
    """
    divisor: int = 0
    """The greatest common divisor of the block sizes, in tokens, of all stores that have only one block."""
    variable: bool = False
    """Whether the stores are radix nodes: their sizes differ, and no store has had several blocks."""

    def observe(self, size: int, blocks: int) -> bool:
        """Learn from a store of ``blocks`` blocks of ``size`` tokens.

        Return whether the learned size has changed, so that kvbus would now treat earlier stores differently. Call it
        for every store of a batch before any of them is applied.
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
        """Whether the detector has learned from at least one store."""
        return bool(self.seen or self.proven)

    def teaches_nothing(self, size: int) -> bool:
        """Return whether a block of ``size`` tokens that is alone in its store is a tail block (the end of a prompt).

        The detector learns nothing from a tail block, because its size is not that of complete blocks.
        """
        return size < (self.pinned or 0) or (self.numbered and size < self.size)

    def _challenge(self, size: int, blocks: int) -> bool:
        if size == self.proven:
            self.support += self.support <= YOUNG  # count only up to YOUNG + 1, the most that is needed
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
        """Number of tokens in the engine's blocks; 0 while it is unknown, and if the blocks differ in size."""
        return self.proven or (0 if self.variable else self.single)

    @property
    def base(self) -> int:
        """Number of tokens in the blocks that routers get; 0 while it is unknown."""
        if self.pinned is not None:
            return self.pinned
        return self.divisor if self.variable else self.size

    @property
    def steady(self) -> tuple[int, int]:
        """Size of the blocks, and maximum number of blocks, of a store that teaches the detector nothing.

        Both are 0 if every store may teach something.
        """
        if self.proven:
            return (self.proven, MAX_RUN) if self.support > YOUNG and not self.larger else (0, 0)
        return (self.size, 1) if self.seen >= SETTLE_EVENTS else (0, 0)

    def is_native(self, size: int) -> bool:
        """Return whether kvbus sends blocks of this size unchanged."""
        own = self.size
        return size == own == (self.pinned or own)

    def treatment(self, size: int, blocks: int = 1, *, fine: bool = True) -> Treatment:
        """Return how kvbus treats a store of ``blocks`` blocks of ``size`` tokens: sent, cut, left out or refused.

        Call :meth:`observe` for the store first. ``fine`` says whether the medium of the store also has blocks of the
        group's own size. If it has none, for example a memory tier with larger chunks, no smaller block has the tokens
        of a larger block. So kvbus does not leave the larger block out, but cuts it into blocks of the output's size.
        """
        own = self.size
        pinned = self.pinned or own
        if self.is_native(size):
            return Treatment.NATIVE
        if blocks == 1 and size < max(own, pinned):
            return Treatment.TAIL
        if self.variable or size == own or (size > own and not fine):
            return Treatment.REBLOCK if size % self.base == 0 else Treatment.REJECT
        return Treatment.COARSE if size > own > 0 and size % own == 0 else Treatment.REJECT


class GroupSizes:
    """The block sizes of one group. kvbus learns them from the stores on one medium, and applies them to all media.

    Args:
        detector: the detector that learns the sizes.
        medium: the medium whose stores the detector sees: the device, or the group's first medium until the device has
            stored blocks. It is empty until a store with tokens has come.
    """

    def __init__(self, detector: BlockSizeDetector, medium: str) -> None:
        self.detector = detector
        self.medium = medium
        self.fine = {medium}
        """Media on which the engine has stored blocks of the size that ``detector`` has learned.

        Only on these media can the tokens of a larger block also be in blocks of that size.
        """

    def usual(self, medium: str, size: int) -> int:
        """Return the maximum number of blocks of a store that teaches nothing and whose blocks are sent unchanged.

        Return 0 if every store of blocks of this size on this medium may teach something.
        """
        steady, most = self.detector.steady
        learns = medium not in self.fine or self.medium == "" or (medium == DEVICE_MEDIUM != self.medium)
        return 0 if learns or size != steady or not self.detector.is_native(size) else most

    def must_begin_anew(self, medium: str, size: int, blocks: int) -> bool:
        """Return whether a new detector has to learn the group's sizes, beginning with this store.

        A detector learns from the stores on one medium. While no size is known, a store on another medium begins a new
        detector. Later, until the device stores blocks, a store on another medium begins one only if it has several
        blocks, which are smaller than the known size. The first store on the device usually begins one. But if this
        store has the known size, the present detector continues with the stores on the device.

        Args:
            medium: the medium of the store.
            size: the number of tokens in each block of the store.
            blocks: the number of blocks of the store.
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
    """The block sizes of one source, for each group.

    Args:
        pinned: the block size that the operator has configured; None if there is none.
        index: the live blocks of the source.

    Attributes:
        groups: the sizes of each group, in the order of the groups' first stores.
        base: number of tokens in the blocks that routers get, in the first group whose size is known. Without such a
            group, it is the configured size; 0 if there is none.
        most_blocks: maximum number of these blocks in a batch that every router accepts.
        relearned: whether kvbus has learned something about block sizes, and would now announce earlier blocks
            differently. The caller announces them again, and sets this to False.
    """

    def __init__(self, pinned: int | None, index: Index) -> None:
        self._pinned = pinned
        self._index = index
        self.groups: dict[int | None, GroupSizes] = {}
        self._find_base()
        self.relearned = False

    def observe(self, group: int | None, medium: str, size: int, blocks: int, *, tokens: bool) -> None:
        """Learn the block size from a store.

        A store without tokens counts only until its group has a store with tokens.
        """
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
            # Until now, the engine stored only larger blocks on this medium, and kvbus cut them into sub-blocks. The
            # engine has now stored a block of the group's own size here. Such blocks repeat the sub-blocks, so learn
            # again.
            self.relearned |= any(table.refs for table in self._index.tables_at(group, medium))
        self._find_base()

    def _find_base(self) -> None:
        known = (base for sizes in self.groups.values() if (base := sizes.detector.base))
        self.base = next(known, self._pinned or 0)
        self.most_blocks = most_blocks(self.base)

    def treatment(self, key: TableKey, chunk: Chunk) -> Treatment:
        """Return how kvbus treats a chunk's blocks: whether it sends, cuts, leaves out or refuses them.

        Blocks without tokens are never cut, because the derived hashes of sub-blocks are computed from tokens.
        """
        sizes = self.groups[key[0]]
        found = sizes.detector.treatment(chunk.block_size, len(chunk.hashes), fine=key[1] in sizes.fine)
        return Treatment.COARSE if found is Treatment.REBLOCK and chunk.hash_only else found

    def dump(self) -> list[Any]:
        """Return the block sizes as plain data, which a new process can load after a restart."""
        return [
            [group, structs.asdict(each.detector), each.medium, sorted(each.fine)]
            for group, each in self.groups.items()
        ]

    def load(self, data: list[Any]) -> None:
        """Restore the block sizes from the result of :meth:`dump`."""
        for group, detector, medium, fine in data:
            sizes = self.groups[group] = GroupSizes(BlockSizeDetector(**detector), medium)
            sizes.fine.update(fine)
        self._find_base()
