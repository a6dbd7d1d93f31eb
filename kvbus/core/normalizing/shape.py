"""The block sizes of a group, and what stores of one spelling have in common, looked at once.

A stream spells nearly all of its stores alike: the same block size, medium, group, adapter and kind. Where they go and
whether they may be applied follows from that alone, and is kept. What is kept never changes a decision: it is made
anew whenever what it followed from has changed.
"""

from __future__ import annotations

from typing import Any, Final

from msgspec import UNSET

from kvbus.core.blocks.chunk import Meta
from kvbus.core.normalizing.block_size import BlockSizeDetector, Treatment
from kvbus.core.types import DEVICE_MEDIUM, Filtered
from kvbus.core.wire.schema import BlockStored

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

    __slots__ = ("detector", "fine", "medium")

    def __init__(self, detector: BlockSizeDetector, medium: str = DEVICE_MEDIUM) -> None:
        self.detector = detector
        self.medium = medium
        self.fine = {medium}
        """Media that have stored blocks of the group's own size. Only there does a larger block repeat smaller ones."""

    @property
    def base(self) -> int:
        """Tokens per block on the output; 0 while nothing is known."""
        return self.detector.base

    def treatment(self, size: int, blocks: int, medium: str) -> Treatment:
        """Return what a store of so many blocks of this size on this medium becomes."""
        return self.detector.treatment(size, blocks, fine=medium in self.fine)


class Shape:
    """What stores of one spelling have in common."""

    __slots__ = (
        "complete",
        "good",
        "group",
        "known",
        "left_out",
        "medium",
        "meta",
        "spelled",
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

    def as_sent(self, event: BlockStored) -> None:
        """Fill in what was not sent, and write the medium as kvbus does. Its parent is there, or None."""
        event.lora_id, event.lora_name = self.meta.lora_id, self.meta.lora_name
        event.medium = self.spelled
