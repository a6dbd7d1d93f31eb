"""The live blocks of a publisher as its events have them, and what of them cannot be (6.11, 6.12, 7, 9.2, 11.1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from kvbus.tools.conform.engine.events import Event, Hash, Place
from kvbus.tools.conform.engine.ledger import Ledger
from kvbus.tools.conform.verdict import Level


class _Table:
    """The blocks of one group on one medium."""

    def __init__(self) -> None:
        self.stores: Final[dict[Hash, int]] = {}
        """Of each live block, how often it was stored more than removed."""
        self.parents: Final[dict[Hash, Hash | None]] = {}
        self.children: Final[Counter[Hash | None]] = Counter()

    def add(self, block: Hash, parent: Hash | None) -> None:
        self.stores[block] = 1
        self.parents[block] = parent
        self.children[parent] += 1

    def drop(self, block: Hash) -> None:
        del self.stores[block]
        parent = self.parents.pop(block)
        self.children[parent] -= 1
        if not self.children[parent]:
            del self.children[parent]


class Blocks:
    """The view that a reader has which applies everything in order.

    Attributes:
        complete: nothing from before or between is missing, so that a block that is not here is not live.
        stored_again: blocks that were stored while they were live, since somebody last set it to 0.
        clears: AllBlocksCleared that came.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.complete = False
        self.stored_again = 0
        self.clears = 0
        self._ledger = ledger
        self._tables: dict[Place, _Table] = {}
        self._cleared: set[tuple[Place, Hash]] = set()
        """What was live at the last clear of everything and was not stored since."""
        self._open_clears = 0
        """Clears of live blocks behind which nothing has come yet."""

    @property
    def live(self) -> set[tuple[Place, Hash]]:
        """The live blocks."""
        return {(place, block) for place, table in self._tables.items() for block in table.stores}

    def __len__(self) -> int:
        return sum(len(table.stores) for table in self._tables.values())

    def lose(self) -> None:
        """Something is missing: what is known from here on is not all."""
        self.complete = False

    def reset(self, *, complete: bool) -> None:
        """Begin with nothing, as an epoch does."""
        self._tables.clear()
        self._cleared.clear()
        self.complete = complete

    def apply(self, events: list[Event]) -> None:
        """Apply the events of a batch."""
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
        table = self._tables.setdefault(event.place, _Table())
        parent = event.parent
        if parent is not None and event.hashes:
            self._check_parent(event, parent)
        for block in event.hashes:
            if block in table.stores:
                table.stores[block] += 1
                self._again(event)
            else:
                table.add(block, parent)
                self._cleared.discard((event.place, block))
            parent = block

    def _check_parent(self, event: Event, parent: Hash) -> None:
        group = event.place[0]
        if any(parent in table.stores for place, table in self._tables.items() if place[0] == group):
            self._ledger.kept("6.11")
        elif self.complete:
            self._ledger.broken("6.11", f"{event.where} is stored behind a parent that is not live", event.evidence)

    def _again(self, event: Event) -> None:
        self.stored_again += 1
        if self.complete:
            text = f"{event.where} stores a block that is live in its group and medium: a copy"
            self._ledger.broken("7.1", text, event.evidence, level=Level.SHOULD)

    def _remove(self, event: Event) -> None:
        table = self._tables.setdefault(event.place, _Table())
        for at, block in enumerate(event.hashes):
            stores = table.stores.get(block, 0)
            if not stores:
                self._not_live(event, block)
                continue
            if self.complete:
                self._check_copies(event, at, stores)
            if stores > 1:
                table.stores[block] -= 1
                continue
            table.drop(block)
            if not self.complete:
                continue
            self._ledger.kept("7.1")
            if any(block in other.stores for place, other in self._tables.items() if place[0] == event.place[0]):
                self._ledger.kept("9.2")
            if table.children.get(block):
                text = f"{event.where} removes a block before its {table.children[block]} live children"
                self._ledger.broken("6.12", text, event.evidence, level=Level.SHOULD)
            else:
                self._ledger.kept("6.12")

    def _check_copies(self, event: Event, at: int, stores: int) -> None:
        ledger = self._ledger
        if event.remaining is None:
            if stores > 1:
                text = f"{event.where} removes one of {stores} copies, and nothing says so (remaining_copy_counts)"
                ledger.broken("7.2", text, event.evidence)
        elif len(event.remaining) != len(event.hashes) or event.remaining[at] != stores - 1:
            text = f"{event.where} has remaining_copy_counts {event.remaining!r:.60} behind {stores} stores"
            ledger.broken("7.2", text, event.evidence)
        elif stores > 1:
            ledger.kept("7.2")

    def _not_live(self, event: Event, block: Hash) -> None:
        if not self.complete:
            return
        if (event.place, block) in self._cleared:
            self._cleared.discard((event.place, block))
            text = f"{event.where} removes a block on {event.place[1]} that AllBlocksCleared had cleared"
            self._ledger.broken("11.1", text, event.evidence)
        elif self._live_on_another_medium(event.place, block):
            text = f"{event.where} removes a block from {event.place[1]} that was stored on another medium alone"
            self._ledger.broken("9.2", text, event.evidence)
        else:
            self._ledger.broken("7.1", f"{event.where} removes a block that is not live", event.evidence)

    def _live_on_another_medium(self, place: Place, block: Hash) -> bool:
        return any(block in table.stores for other, table in self._tables.items() if other[0] == place[0])

    def _clear(self, event: Event) -> None:
        self.clears += 1
        medium = event.place[1]
        if medium:
            for place in self._on(medium):
                del self._tables[place]
            return
        if len(self):
            self._open_clears += 1
        self._cleared = self.live
        self._tables.clear()
        self.complete = True

    def _on(self, medium: str) -> Iterator[Place]:
        yield from [place for place in self._tables if place[1] == medium]
