"""What AllBlocksCleared speaks of, and what it leaves of the cache.

SGLang's speaks of every tier, vLLM's of the device alone. The operator says which of the two an engine means, or the
stream shows it.
"""

from __future__ import annotations

from typing import Literal

from kvbus.core.blocks.announce import removals_of
from kvbus.core.blocks.index import Index
from kvbus.core.normalizing.admission import Admission
from kvbus.core.normalizing.leaving import Leaving
from kvbus.core.normalizing.left_out import LeftOut
from kvbus.core.normalizing.removals import Removals
from kvbus.core.types import DEVICE_MEDIUM
from kvbus.core.wire.schema import AllBlocksCleared


class Clears:
    """Applies the clears of one source's current epoch.

    Args:
        rule: the operator's choice; ``auto`` leaves it to the stream.
        index: the live blocks.
        admission: knows the media that the engine has spoken of.
        left_out: what the engine holds beside the index.
        removals: takes blocks out of the index.
        leaving: what leaves of the batch under way.
        refused: medium and reason of each store that was refused.
        seen_to_clear_all: the stream has shown that AllBlocksCleared speaks of every tier.
        presumed: a clear was taken for one of everything, because no tier but the device had been spoken of. With
            that the epoch's unknown beginning was over.
    """

    def __init__(
        self,
        rule: Literal["auto", "all", "device"],
        index: Index,
        admission: Admission,
        left_out: LeftOut,
        removals: Removals,
        leaving: Leaving,
        refused: set[tuple[str, str]],
        *,
        seen_to_clear_all: bool = False,
        presumed: bool = False,
    ) -> None:
        self._rule = rule
        self._index = index
        self._admission = admission
        self._left_out = left_out
        self._removals = removals
        self._leaving = leaving
        self._refused = refused
        self.seen_to_clear_all = seen_to_clear_all
        self.presumed = presumed

    @property
    def all_tiers(self) -> bool:
        """Whether AllBlocksCleared speaks of every tier: what the operator says, or else what was seen."""
        return self.seen_to_clear_all if self._rule == "auto" else self._rule == "all"

    @property
    def empty(self) -> bool:
        """Whether AllBlocksCleared leaves nothing in the engine.

        It does where it is known to speak of every tier, and where no tier but the device has ever been spoken of.
        """
        return self.all_tiers or self._admission.media | self._index.media_names <= {DEVICE_MEDIUM}

    def take_for_empty(self) -> bool:
        """Take the unknown beginning of an epoch for over, after a clear that left nothing; whether that is certain."""
        self.presumed = not self.all_tiers
        return self.all_tiers

    @property
    def tiers_unknown(self) -> bool:
        """A tier has come up after the clear that was taken for one of everything: nobody knows what it held then."""
        return self.presumed and not self.empty

    def apply(self, medium: str | None, *, second: bool, named: bool) -> bool:
        """The engine cleared its cache: every tier (SGLang), the device pool alone (vLLM), or one medium (ATOM).

        vLLM resets what its pool has moved to other tiers by a ``second`` clear in the same batch. Where other tiers
        stay live, a clear leaves as removals, because routers understand AllBlocksCleared as everything.

        Args:
            medium: the index key of the medium that the clear names; None if it names none.
            second: it is not the first clear of its batch without a medium.
            named: some output needs removals in place of a clear.

        Returns:
            Whether everything the engine is known to have is gone.
        """
        leaving, removals = self._leaving, self._removals
        self._admission.media |= self._index.media_names
        there = self._index.media_names | self._left_out.media | {each for each, _ in self._refused}
        if medium is not None:
            # an engine always has a device, so the clear of another medium never empties it
            emptied = medium == DEVICE_MEDIUM and not self.all_tiers and self.empty
            survive = {each for each in there if each != medium}
        else:
            emptied = second or self.empty
            survive = {each for each in there if not self.all_tiers and (each == DEVICE_MEDIUM) == second}
        self._left_out.keep(survive)
        self._refused.difference_update([each for each in self._refused if emptied or each[0] not in survive])
        if any(table.blocks for _, table in self._index.tables_on(survive)):
            cleared = self._index.media_names - survive
            for key, table in self._index.tables_on(cleared):
                table.copies.clear()
                for block in list(table.blocks):
                    removals.remove_one(key, block)
            self._index.drop_empty(cleared)
            self._admission.forget()
            return emptied
        if named:
            removals.put_back()
        removals.drop()  # the clear says that, too
        events = leaving.events
        if not (events and isinstance(events[-1], AllBlocksCleared)):
            events.append(AllBlocksCleared())
            if named:
                last = self._index.given_up()
                leaving.cleared.append(lambda: removals_of(last))
        self._index.clear()
        self._admission.forget()
        return emptied
