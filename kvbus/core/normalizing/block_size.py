"""Detect which block size a stream of events really has.

There are three kinds of streams, and the messages do not say of which kind a stream is:

* *one size*: most engines. If the size is a multiple of the size the operator pinned, every block is reblocked.
* *variable* (SGLang before fixed pages): a complete radix node has one hash, ``block_size == len(token_ids)``. Every
  event is reblocked.
* *two sizes* (hybrid models): the same tokens are announced at a fine and at a coarse size on one medium. The fine
  stream is used and the coarse one is left out.

One fact distinguishes them: an engine with fixed blocks sooner or later puts several of them into one event, and a
radix node never carries more than one hash. If the size is learned too late, the group is announced again. After more
than a few stores of a size, one odd event does not change the size: that event is rejected.

There are also *tail blocks* (vLLM with partial cache hits): the last tokens of a prompt, in one block smaller than the
group's blocks. Tails are left out. kvbus learns nothing from them once the group's size is known or pinned. Engines
that send tails number their groups and have no radix nodes. In such a group, the largest of several single blocks is a
complete block.
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
    """The treatment of a store of a given block size."""

    NATIVE = auto()
    REBLOCK = auto()
    COARSE = auto()
    TAIL = auto()
    REJECT = auto()


SETTLE_EVENTS: Final = 32
"""Single-block stores after which the size is settled. A radix tree shows two node lengths long before that."""

YOUNG: Final = 4
"""Up to this number of stores of the proven size, one multi-block store of a finer size replaces it at once."""

RELEARN_EVENTS: Final = 16
"""After :data:`YOUNG` stores, this number of multi-block stores of another size replaces the proven size.

Stores of a finer size count in total. Stores of a larger size count only in a row, without a store of the proven size
between them: then the proven size came from an odd event. With fewer such stores, the proven size stays.
"""


class BlockSizeDetector(msgspec.Struct):
    """The block sizes of one group's stores, and the inferred size. ``pinned`` is the operator's ``block_size``."""

    # Known from the start.
    pinned: int | None = None
    numbered: bool = False
    """Whether the engine numbers the group. Such an engine has no radix nodes, and may announce tails."""

    # Learned from events with several blocks.
    proven: int = 0
    """The block size, once an event has had several blocks of it."""
    support: int = 0
    """Number of stores of the proven size, counted up to just above :data:`YOUNG`."""
    finer: dict[int, int] = {}
    larger: dict[int, int] = {}
    """Number of stores of other sizes since, by size."""

    # Learned from events with one block.
    seen: int = 0
    """Number of stores before a size was proven, counted up to :data:`SETTLE_EVENTS`."""
    single: int = 0
    """The smallest size of blocks that came one by one; in a numbered group, the largest."""
    divisor: int = 0
    """The greatest common divisor of these sizes."""
    variable: bool = False
    """Whether events are radix nodes: two sizes have come, and never several blocks in one event."""

    def observe(self, size: int, blocks: int) -> bool:
        """Learn from a store of ``blocks`` blocks; return whether earlier events would now be treated differently.

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
        """Whether any store has been learned from."""
        return bool(self.seen or self.proven)

    def teaches_nothing(self, size: int) -> bool:
        """Return whether a single block of this size is a tail: it says nothing about the size of complete blocks."""
        return size < (self.pinned or 0) or (self.numbered and size < self.size)

    def _challenge(self, size: int, blocks: int) -> bool:
        if size == self.proven:
            self.support += self.support <= YOUNG  # higher counts make no difference
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
        """Tokens per block of the engine's own blocks; 0 while unknown, or if the blocks vary in size."""
        return self.proven or (0 if self.variable else self.single)

    @property
    def base(self) -> int:
        """Tokens per block on the output; 0 while unknown."""
        if self.pinned is not None:
            return self.pinned
        return self.divisor if self.variable else self.size

    def is_native(self, size: int) -> bool:
        """Return whether blocks of this size are sent unchanged."""
        own = self.size
        return size == own == (self.pinned or own)

    def treatment(self, size: int, blocks: int = 1, *, fine: bool = True) -> Treatment:
        """Return the treatment of a store of ``blocks`` blocks of this size. Call after :meth:`observe`.

        ``fine`` says whether the store's medium has blocks of the group's own size. If it has none (a tier with larger
        chunks), a larger block repeats nothing: it is cut into blocks of the output's size.
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
    """The block sizes of one group. They are learned from one medium and apply to all media.

    Args:
        detector: learns the sizes.
        medium: the medium they are learned from: the device, or the group's first medium until the device stores. Empty
            until a store with tokens has come.
    """

    def __init__(self, detector: BlockSizeDetector, medium: str) -> None:
        self.detector = detector
        self.medium = medium
        self.fine = {medium}
        """Media that have stored blocks of the group's own size. Only on these does a larger block repeat smaller
        ones."""

    def must_begin_anew(self, medium: str, size: int, blocks: int) -> bool:
        """Return whether the sizes have to be learned again, starting with this store.

        The device takes precedence over every other medium. Until the device stores, several blocks of a finer size
        take precedence over coarser blocks. If the device confirms the known size, it becomes the medium without a
        restart.
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
        groups: the sizes of each group, in the order of the groups' first stores.
        relearned: whether announced blocks would now be treated differently. The caller resets it.
    """

    def __init__(self, pinned: int | None, index: Index) -> None:
        self._pinned = pinned
        self._index = index
        self.groups: dict[int | None, GroupSizes] = {}
        self.relearned = False

    def observe(self, group: int | None, medium: str, size: int, blocks: int, *, tokens: bool) -> None:
        """Learn from a store. A store without tokens counts only until a store of its group with tokens comes."""
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
            self.relearned |= table is not None and len(table.refs) > 0  # cut blocks repeat these ones

    def treatment(self, key: TableKey, chunk: Chunk) -> Treatment:
        """Return the treatment of a chunk's blocks. A chunk without tokens is never cut: derived hashes need tokens."""
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
        """Restore the result of :meth:`dump`."""
        for group, detector, medium, fine in data:
            sizes = self.groups[group] = GroupSizes(BlockSizeDetector(**detector), medium)
            sizes.fine.update(fine)
