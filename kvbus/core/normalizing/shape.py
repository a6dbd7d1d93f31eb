"""What stores of one spelling have in common, looked at once.

A stream spells nearly all of its stores alike: the same block size, medium, group, adapter and kind. Where they go and
whether they may be applied follows from that alone, and is kept. What is kept never changes a decision: it is made
anew whenever what it followed from has changed.
"""

from __future__ import annotations

from typing import Any, Final

from msgspec import UNSET

from kvbus.core.blocks.chunk import Meta
from kvbus.core.blocks.index import MAX_RUN, Table
from kvbus.core.normalizing.block_size import BlockSizeDetector, Treatment
from kvbus.core.types import DEVICE_MEDIUM, Filtered
from kvbus.core.wire.schema import BlockStored
from kvbus.core.wire.tokens import MAX_TOKENS, Matcher

SPELLED: Final = 3
KEYS: Final = 10
"""Among the fields of a store, where those begin that it shares with others of one shape, and the place of
``extra_keys`` behind them. What is only carried follows."""

NOTHING_CARRIED: Final[tuple[Any, ...]] = (UNSET,) * 5
"""No locality, ownership, session, salt and lookahead."""


class Sizes:
    """The block sizes of one group. They are learned from one medium and hold for all media.

    Args:
        detector: learns them.
        medium: the medium they are learned from: the device, or the group's first medium until the device stores.
            Empty while no store with tokens has come.
    """

    __slots__ = ("_treatments", "base", "detector", "fine", "medium", "quiet")

    def __init__(self, detector: BlockSizeDetector, medium: str = DEVICE_MEDIUM) -> None:
        self.detector = detector
        self.medium = medium
        self.fine = {medium}
        """Media that have stored blocks of the group's own size. Only there does a larger block repeat smaller ones."""
        self.base = detector.base
        """Its own, as it was looked at last."""
        self.quiet = False
        """One more store of the group's own size has nothing to teach, see :attr:`BlockSizeDetector.settled`."""
        self._treatments: dict[tuple[int, bool, bool], Treatment] = {}
        """By block size, for single blocks or several, on a medium that is fine or not."""

    def learn(self, size: int) -> None:
        """Look at the detector again: a store has taught it something. Its own size was ``size`` before."""
        self.base = self.detector.base
        self._treatments.clear()
        if self.detector.size != size:
            self.fine = {self.medium}

    def is_native(self, size: int, medium: str) -> bool:
        """Whether blocks of this size leave as they came, and their medium is known to have such blocks."""
        return self.detector.is_native(size) and medium in self.fine

    def treatment(self, size: int, blocks: int, medium: str) -> Treatment:
        """See :meth:`BlockSizeDetector.treatment`."""
        key = (size, blocks == 1, medium in self.fine)
        known = self._treatments.get(key)
        if known is None:
            known = self._treatments[key] = self.detector.treatment(size, blocks, fine=key[2])
        return known


UNKNOWN_SIZES: Final = Sizes(BlockSizeDetector())
"""Those of a group that has not stored any block with tokens."""


class Shape:
    """What stores of one spelling have in common."""

    __slots__ = (
        "complete",
        "good",
        "group",
        "known",
        "left_out",
        "matchers",
        "medium",
        "meta",
        "native",
        "newest_carried",
        "newest_meta",
        "sizes",
        "spelled",
        "table",
    )

    def __init__(self, group: int | None, medium: str, spelled: str | None, meta: Meta) -> None:
        self.group = group
        self.medium = medium
        """The medium's index key."""
        self.spelled = spelled
        """The medium as it leaves."""
        self.meta = meta
        """With nothing that is only carried."""
        self.left_out: Filtered | None = None
        """Its group carries no prefixes, or its medium is left out."""
        self.known = False
        """The group is one of those that anything is remembered of."""
        self.good = False
        """Nothing of what they have in common breaks a rule."""
        self.complete = False
        """Every field that kvbus always sends is there, and the medium as kvbus writes it."""
        self.sizes = UNKNOWN_SIZES
        self.native = False
        """Blocks of this size leave as they came."""
        self.table: Table | None = None
        """Where the blocks go, if they leave as they came; None before any has come."""
        self.matchers: dict[int, Matcher] = {}
        """By number of blocks: what matches the tokens of stores that are plainly in order, and have nothing to teach
        once :attr:`Sizes.quiet` says so."""
        self.newest_carried: tuple[Any, ...] = NOTHING_CARRIED
        """What the last store carried that carried anything new: most stores of an engine say the same."""
        self.newest_meta = meta

    def learn(self, sizes: Sizes) -> None:
        """The group's block sizes are these now."""
        self.sizes = sizes
        self.native = sizes.is_native(self.meta.block_size, self.medium)
        self.matchers.clear()
        if not self.native:
            self.table = None

    def expect(self, blocks: int) -> Matcher | None:
        """Stores of so many blocks will come again: what matches their tokens; None if they are not plainly in order.

        Only where a size is proven those of several blocks teach nothing.
        """
        size = self.meta.block_size
        known = self.good and self.native and (blocks == 1 or self.sizes.detector.proven == size)
        if not known or not 0 < blocks <= MAX_RUN or blocks * size > MAX_TOKENS:
            return None
        found = self.matchers[blocks] = Matcher(blocks * size)
        return found

    def as_sent(self, event: BlockStored[Any]) -> None:
        """Fill in what was not sent, and write the medium as kvbus does. Its parent is there, or None."""
        event.lora_id, event.lora_name = self.meta.lora_id, self.meta.lora_name
        event.medium = self.spelled
