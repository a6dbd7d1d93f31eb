"""Which block size a stream of events really has.

Most engines announce blocks of one size. Three kinds do not, and the wire does not say which kind it is:

* *coarse only*: one size, a multiple of the size the operator pinned; every block is cut;
* *variable* (SGLang before fixed pages): one hash for a whole radix node, ``block_size == len(token_ids)``; every event
  is cut, with derived hashes;
* *two granularities* (hybrid models): the same tokens announced at a fine and at a coarse size; the fine stream is the
  truth and the coarse one is left out.

They are told apart by one fact: an engine with real blocks sooner or later puts several of them into one event, a
radix node never carries more than one hash. What was learned too late is put right by announcing the group again;
what has proven itself is settled, so that one odd event is rejected instead of overturning a stream.
"""

from __future__ import annotations

import math
from enum import Enum, auto
from typing import Final

import msgspec


class Treatment(Enum):
    """What to do with a store of one size."""

    NATIVE = auto()
    REBLOCK = auto()
    COARSE = auto()
    REJECT = auto()


SETTLE_EVENTS: Final = 32
"""Stores of one kind after which it is taken as proven: a radix tree shows two node lengths long before that."""

RELEARN_EVENTS: Final = 16
"""Well-formed multi-block stores of a finer size that overrule what was settled; fewer are rejected as bad input."""


class Granularity(msgspec.Struct):
    """The sizes seen in one group, and what follows from them. ``pinned`` is the operator's ``block_size``."""

    pinned: int | None = None
    finest: int = 0
    divisor: int = 0
    several_sizes: bool = False
    fixed: bool = False
    """At least one event held several blocks: sizes are block sizes, not node lengths."""
    settled: bool = False
    seen: int = 0
    finer: int = 0

    def is_news(self, size: int, blocks: int) -> bool:
        """Cheap test whether :meth:`observe` has anything to do."""
        return not self.settled or (size < self.finest and blocks > 1)

    def observe(self, size: int, blocks: int) -> bool:
        """Take in one store of ``blocks`` blocks; True if events seen before would now be treated differently.

        Call it for every store of a batch before any of them is applied, then :meth:`settle`.
        """
        before = (self.finest, self.base, self.variable)
        if self.settled:
            if not (size < self.finest and blocks > 1 and self.finest % size == 0):
                return False
            self.finer += 1
            if self.finer < RELEARN_EVENTS:
                return False
            self.settled, self.finer = False, 0
        first = self.finest == 0
        self.seen += 1
        self.several_sizes |= not first and size != self.finest
        self.divisor = math.gcd(self.divisor, size)
        self.finest = size if first else min(self.finest, size)
        self.fixed |= blocks > 1
        return not first and before != (self.finest, self.base, self.variable)

    def settle(self) -> None:
        """End of a batch: what is proven now is no longer overturned by a single odd event."""
        if self.fixed or self.seen >= SETTLE_EVENTS:
            self.fixed |= not self.several_sizes
            self.settled = True

    @property
    def variable(self) -> bool:
        """Events are whole radix nodes: cut every one."""
        return self.several_sizes and not self.fixed

    @property
    def base(self) -> int:
        """Tokens per block on the output; 0 while nothing is known."""
        if self.pinned is not None:
            return self.pinned
        return self.divisor if self.variable else self.finest

    def treatment(self, size: int) -> Treatment:
        """What a store of this block size becomes. Call after :meth:`observe`."""
        base = self.base
        if self.variable:
            return Treatment.REBLOCK if size % base == 0 else Treatment.REJECT
        if size == self.finest:
            if size == base:
                return Treatment.NATIVE
            return Treatment.REBLOCK if size % base == 0 else Treatment.REJECT
        return Treatment.COARSE if size > self.finest and size % self.finest == 0 else Treatment.REJECT
