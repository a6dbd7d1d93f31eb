"""From what an engine announces to what a router may rely on.

In: decoded batches of one source, in order. Out: events in which every store carries whole blocks of one size. A block
is stored once and removed once, however many copies the engine keeps. Parents come before children, and leaves go
before their parents. Media have names that routers know. What is left out, or cannot be, is counted with a reason.

Each batch takes two passes. The first checks every event and learns block sizes from it (``admission``). The second
applies the events that passed, in order (``stores``, ``removals`` and ``clears``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec import structs

from kvbus.core.blocks.announce import announce, removals_of
from kvbus.core.blocks.index import Index
from kvbus.core.normalizing.admission import Admission, Checked
from kvbus.core.normalizing.block_size import BlockSizeDetector
from kvbus.core.normalizing.clears import Clears
from kvbus.core.normalizing.copies import Copies
from kvbus.core.normalizing.leaving import Leaving
from kvbus.core.normalizing.left_out import LeftOut
from kvbus.core.normalizing.removals import Removals
from kvbus.core.normalizing.shape import Sizes
from kvbus.core.normalizing.stores import Stores
from kvbus.core.source_spec import SourceSpec
from kvbus.core.source_stats import SourceStats
from kvbus.core.types import Filtered, Hash, Reason, medium_key
from kvbus.core.wire.batch import Batch
from kvbus.core.wire.codec import AnyEvent, clears_all
from kvbus.core.wire.schema import AllBlocksCleared, BlockRemoved


class Normalizer:
    """Validation, copies, block sizes and the index of one source's current epoch.

    Args:
        spec: the source as configured.
        stats: where everything is counted.
        index: an empty one; by default one of the usual kind.
    """

    def __init__(self, spec: SourceSpec, stats: SourceStats, index: Index | None = None) -> None:
        self.spec = spec
        self.stats = stats
        self.index = Index() if index is None else index
        self.names_cleared = False
        """Some output needs removals in place of a clear."""
        self._refused: set[tuple[str, str]] = set()
        """Medium and reason of each store that was refused. A clear of the medium ends it."""
        self._begin(self._new_admission())

    def _new_admission(self) -> Admission:
        spec = self.spec
        return Admission(
            self.index,
            self.stats,
            self._refused,
            pinned=spec.block_size,
            groups=spec.groups,
            max_groups=spec.max_groups,
            without_media=spec.without_media,
        )

    def _begin(
        self,
        admission: Admission,
        *,
        seen_to_clear_all: bool = False,
        presumed: bool = False,
    ) -> None:
        # What was learned of the stream.
        self._admission = admission

        # What the engine holds beside the index, and what is certain of it.
        self._copies = Copies(self.spec.duplicates, self.stats)
        self._left_out = LeftOut(self.stats, self._copies)
        self.emptied = False
        """The last batch that :meth:`apply` took in has emptied everything the engine is known to have."""

        # The batch under way.
        self._leaving = Leaving()
        self._removals = Removals(self.index, self._left_out, admission.no_prefix, self._leaving, self.stats)
        self._stores = Stores(
            self.spec,
            self.index,
            self._left_out,
            admission.sizes,
            self._removals,
            self._leaving,
            self.stats,
            self._refused,
        )
        self.clears = Clears(
            self.spec.clears,
            self.index,
            admission,
            self._left_out,
            self._removals,
            self._leaving,
            self._refused,
            seen_to_clear_all=seen_to_clear_all,
            presumed=presumed,
        )
        """What AllBlocksCleared speaks of."""

    def reset(self, *, same_epoch: bool = False) -> None:
        """Nothing is known of the cache any more. In the same epoch, what was learned of the stream stays."""
        admission = self._admission
        admission.media |= self.index.media_names
        self.index.clear()
        self._refused.clear()
        admission.forget()
        if same_epoch:
            self._begin(
                admission,
                seen_to_clear_all=self.clears.seen_to_clear_all,
                presumed=self.clears.presumed,
            )
        else:
            self._begin(self._new_admission())

    @property
    def block_size(self) -> int | None:
        """Tokens per block of the first prefix-carrying group, once known."""
        for sizes in self._admission.sizes.values():
            if sizes.base:
                return sizes.base
        return self.spec.block_size

    @property
    def engine_block_size(self) -> int:
        """Tokens per block of the engine's own blocks in its first group, 0 while they have no one size."""
        return next((sizes.detector.size for sizes in self._admission.sizes.values() if sizes.detector.size), 0)

    @property
    def media(self) -> set[str]:
        """The media that the engine has spoken of in this epoch."""
        return self._admission.media | self.index.media_names

    @property
    def cleared(self) -> list[Any]:
        """Where :attr:`names_cleared`: for each clear in the last batch, what makes the removals that say the same."""
        return self._leaving.cleared

    @property
    def only_without_prefix(self) -> bool:
        """Whether groups have announced blocks, and none of them carries prefixes."""
        return self._admission.only_without_prefix

    @property
    def first_group(self) -> int | None:
        """The first prefix-carrying group of the epoch; None where groups have no number."""
        return next(iter(self._admission.sizes), None)

    def apply(self, batch: Batch, *, first_of_epoch: bool = False) -> list[AnyEvent]:
        """Take in one batch; the events that leave.

        Args:
            batch: decoded, its rejects not yet counted.
            first_of_epoch: whether this batch has seq 0 (an engine that opens with AllBlocksCleared is SGLang, whose
                clear resets every tier; vLLM's speaks of the GPU pool alone).
        """
        events = batch.events
        if first_of_epoch and events and clears_all(events[0]):
            self.clears.seen_to_clear_all = True
        out: list[AnyEvent] = []
        admission, leaving = self._admission, self._leaving
        leaving.events = out
        self.emptied = False
        if leaving.cleared:
            leaving.cleared = []
        if batch.rejects:
            admission.count_rejects(batch.rejects)
        if events:
            self._check_and_apply(batch)
        if self._removals.busy:
            self._removals.finish()
        return out

    def _check_and_apply(self, batch: Batch) -> None:
        """Check all events of a batch, then apply those that passed."""
        admission, removals, stores = self._admission, self._removals, self._stores
        steps = admission.check_all(batch)
        if admission.relearned and (len(self.index) or len(self.tails)):
            removals.leave()
            self._rebuild()
        clears = 0
        for at, step in enumerate(steps):
            if type(step) is Checked:
                stores.store(steps, at)
            elif type(step) is BlockRemoved:
                removals.remove(step)
            elif isinstance(step, AllBlocksCleared):
                whole = clears_all(step)
                medium = None if whole else medium_key(step.medium)
                self.emptied = self.clears.apply(medium, second=whole and clears > 0, named=self.names_cleared)
                clears += whole
        stores.finish()

    def dump(self) -> dict[str, Any]:
        """What has been learned about the stream beside its blocks, as plain data."""
        return {
            "granularity": [
                [group, structs.asdict(each.detector), each.medium, sorted(each.fine)]
                for group, each in self._admission.sizes.items()
            ],
            "coarse": [
                [*key, block, copies] for key, table in self._left_out.coarse.items() for block, copies in table.items()
            ],
            "intake": self._admission.dump(),
            "clears_all_tiers": self.clears.seen_to_clear_all,
            "media": sorted(self.media),
            "presumed": self.clears.presumed,
            "refused": sorted(self._refused),
        }

    def load(self, data: dict[str, Any]) -> None:
        """The reverse of :meth:`dump`; the index and the tails are filled separately."""
        for group, known, medium, fine in data["granularity"]:
            sizes = self._admission.sizes[group] = Sizes(BlockSizeDetector(**known), medium)
            sizes.fine.update(fine)
        for group, medium, block, copies in data["coarse"]:
            self._left_out.add_coarse((group, medium), block, copies)
        self._admission.load(data["intake"])
        self.clears.seen_to_clear_all = data["clears_all_tiers"]
        self._admission.media |= set(data["media"])
        self.clears.presumed = data["presumed"]
        self._refused.update((medium, reason) for medium, reason in data["refused"])

    @property
    def full(self) -> bool:
        """Stores were refused at the index's limit, and no clear has spoken of them since.

        The index is exact about what it holds, and not complete.
        """
        return not self.refused.isdisjoint({Reason.INDEX_FULL, Reason.TOO_MANY_GROUPS})

    @property
    def refused(self) -> set[str]:
        """Reasons for which stores were refused whose blocks the engine may still hold."""
        return {reason for _, reason in self._refused if reason != Filtered.HASH_ONLY}

    @property
    def hash_only(self) -> bool:
        """Blocks were stored whose tokens are not known, and no clear has spoken of them since."""
        return any(reason == Filtered.HASH_ONLY for _, reason in self._refused)

    @property
    def entries(self) -> int:
        """Blocks remembered: live ones, and those that are left out; ``max_blocks`` bounds the sum."""
        return len(self.index) + len(self._left_out)

    @property
    def index_bytes(self) -> int:
        """About what all of them hold; ``max_index_bytes`` bounds it."""
        return self.index.size.bytes + self._left_out.bytes

    @property
    def known_groups(self) -> int:
        """Groups the epoch has stored blocks of; ``max_groups`` bounds them."""
        return len(self._admission.known)

    def count(self) -> None:
        """Blocks were put in or taken out without being counted: count them all."""
        for index in self.indexes:
            index.count()

    @property
    def tails(self) -> Index:
        """The tails that are left out, as an index of their own."""
        return self._left_out.tails

    @property
    def indexes(self) -> tuple[Index, Index]:
        """All blocks that are kept: the live ones, and the tails."""
        return self.index, self.tails

    @property
    def counts_copies(self) -> bool:
        """Whether a live block goes with as many removals as it had stores."""
        return self._copies.counted

    def outlived(self, blocks: Iterable[tuple[int | None, str, Hash]]) -> list[AnyEvent]:
        """Blocks, by group, medium and hash, are taken for gone with all of their copies; what leaves for that."""
        leaving, tables = self._leaving, self.index.tables
        leaving.events, leaving.cleared = [], []
        for group, medium, block in blocks:
            table = tables.get((group, medium))
            if table is not None and block in table.blocks:
                table.copies.pop(block, None)
                self._removals.remove_one((group, medium), block)
                self.stats.filtered[Filtered.OUTLIVED] += 1
        self._removals.finish()
        return leaving.events

    def missed(self, reason: Reason) -> None:
        """Count a batch that cannot be read. The live blocks stay."""
        self._admission.count_rejects([reason])

    def merge_overlays(self) -> None:
        """Frozen copies of the index may have gone: see :meth:`kvbus.core.blocks.index.Table.merge_overlay`."""
        for index in self.indexes:
            index.merge_overlays()

    def announce(self) -> Iterable[AnyEvent]:
        """The stores that build the live set from nothing; see :func:`kvbus.core.blocks.announce.announce`."""
        return announce(self.index)

    # -- what concerns all blocks ----------------------------------------------------------------------------------

    def _rebuild(self) -> None:
        """Block sizes turned out different from what was assumed: announce everything again in the right ones."""
        self._leave_clear()
        self._stores.rebuild()

    def _leave_clear(self) -> None:
        """Routers forget all blocks, which are about to be announced anew."""
        self.stats.rebuilds += 1
        leaving = self._leaving
        if self.names_cleared:
            known = removals_of(self.index)  # now: the blocks are about to change
            leaving.cleared.append(lambda: known)
        leaving.events.append(AllBlocksCleared())
