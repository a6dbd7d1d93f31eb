"""From what an engine announces to what a router may rely on.

In: decoded batches of one source, in order. Out: events in which every store carries whole blocks of one size. A block
is stored once and removed once, however many copies the engine keeps. Parents come before children, and leaves go
before their parents. Media have names that routers know. What is left out, or cannot be, is counted with a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any, Literal

import msgspec
from msgspec import UNSET, structs

from kvbus.core.blocks.announce import announce, out_parent, reblocked_stores, removals_of, stores_of
from kvbus.core.blocks.index import MAX_RUN, Chunk, Index, Rest, Table, TableKey, carried_bytes
from kvbus.core.blocks.live_order import in_order
from kvbus.core.blocks.size import chunk_bytes
from kvbus.core.normalizing.admission import Admission, Step, complete
from kvbus.core.normalizing.block_size import BlockSizeDetector, Treatment
from kvbus.core.normalizing.derived_hashes import derive_chunk
from kvbus.core.normalizing.fast_path import FastPath, Taken
from kvbus.core.normalizing.left_out import LeftOut
from kvbus.core.normalizing.removal_order import leaf_first
from kvbus.core.normalizing.validate import Store, check_removed
from kvbus.core.stats import SourceStats
from kvbus.core.types import DEVICE_MEDIUM, UNKNOWN_MEDIUM, Filtered, Hash, Reason, medium_key
from kvbus.core.wire.codec import AnyEvent, Batch, with_extras
from kvbus.core.wire.schema import AllBlocksCleared, BlockRemoved


class Rules(msgspec.Struct, frozen=True):
    """The operator's choices for one source. ``block_size`` None: learned from the stream."""

    block_size: int | None = None
    duplicates: Literal["count", "ignore"] = "count"
    groups: Literal["prefix", "all"] = "prefix"
    orphans: Literal["pass", "drop"] = "pass"
    clears: Literal["auto", "device", "all"] = "auto"
    max_blocks: int = 20_000_000
    max_groups: int = 64
    max_index_bytes: int = 2**32


class Normalizer:
    """Validation, copies, block sizes and the index of one source's current epoch.

    Args:
        rules: the operator's choices.
        stats: where everything is counted.
        index: an empty one; by default one of the usual kind.
    """

    def __init__(self, rules: Rules, stats: SourceStats, index: Index | None = None) -> None:
        self.rules = rules
        self.stats = stats
        self.index = Index() if index is None else index
        self.names_cleared = False
        """Some output needs removals in place of a clear."""
        self._refused: set[str] = set()
        """Media of stores that were refused because the index is at its limit."""
        self._begin()

    def _begin(self) -> None:
        # What was learned of the stream.
        self._block_sizes: dict[int | None, BlockSizeDetector] = {}
        """By group."""
        self._admission = Admission(self.rules.groups, self.rules.max_groups, self.stats, self._refused)
        self._seen_to_clear_all = False
        """The stream, or what the engine is, has shown that AllBlocksCleared speaks of every tier."""
        self._spoken: set[str | None] = set()
        """Media as events have named them, so that each is looked up once."""
        self._media: set[str] = set()
        """Media the epoch has spoken of, beside those that the index has tables of."""

        # What the engine holds beside the index, and what is certain of it.
        self._left_out = LeftOut(self.stats, count_copies=self.rules.duplicates == "count")
        self.emptied = False
        """The last batch that :meth:`apply` took in has emptied everything the engine is known to have."""
        self._presumed = False
        """A clear was taken for one of everything, because no tier but the device had been spoken of.

        With that the epoch's unknown beginning was over.
        """

        # The batch under way.
        self._out: list[AnyEvent] = []
        """The events that leave."""
        self.cleared: list[Callable[[], Sequence[AnyEvent]]] = []
        """Where :attr:`names_cleared`: for each clear in the last batch, what makes the removals that say the same."""
        self._gone: dict[TableKey, dict[Hash, tuple[Hash | None, Chunk]]] = {}
        """Blocks whose removal has not left yet, with parent and chunk."""
        self._reblocked_gone: dict[tuple[TableKey, Hash], tuple[Hash | None, Chunk]] = {}
        """Sub-blocks whose removal leaves at the end of the batch, unless they are stored again."""
        self._just_removed: dict[tuple[int | None, Hash], Chunk] = {}
        """Blocks this batch has removed: an offload in the same batch may still name them."""

        self._begin_fast_path()

    def _begin_fast_path(self) -> None:
        self._fast_path = FastPath(
            self.index,
            self._block_sizes,
            self._admission,
            self._left_out,
            self.stats,
            max_blocks=self.rules.max_blocks,
            max_bytes=self.rules.max_index_bytes,
            prefix_only=self.rules.groups == "prefix",
            count_copies=self.rules.duplicates == "count",
        )

    def reset(self, *, same_epoch: bool = False) -> None:
        """Nothing is known of the cache any more. In the same epoch, what was learned of the stream stays."""
        learned = (self._block_sizes, self._admission, self._seen_to_clear_all, self.media, self._presumed)
        self.index.clear()
        self._refused.clear()
        self._begin()
        if same_epoch:
            self._block_sizes, self._admission, self._seen_to_clear_all, self._media, self._presumed = learned
            self._begin_fast_path()

    @property
    def bytes_hashes(self) -> bool:
        """Whether the last plain batch named its blocks by byte strings."""
        return self._fast_path.bytes_hashes

    @property
    def block_size(self) -> int | None:
        """Tokens per block of the first prefix-carrying group, once known."""
        for detector in self._block_sizes.values():
            if detector.base:
                return detector.base
        return self.rules.block_size

    @property
    def engine_block_size(self) -> int:
        """Tokens per block of the engine's own blocks in its first group, 0 while they have no one size."""
        return next((detector.size for detector in self._block_sizes.values() if detector.size), 0)

    @property
    def media(self) -> set[str]:
        """The media that the engine has spoken of in this epoch."""
        return self._media | self.index.media_names

    @property
    def _clears_all_tiers(self) -> bool:
        """Whether AllBlocksCleared speaks of every tier: what the operator says, or else what was seen."""
        return self._seen_to_clear_all if self.rules.clears == "auto" else self.rules.clears == "all"

    @property
    def clear_empties(self) -> bool:
        """Whether AllBlocksCleared leaves nothing in the engine.

        It does where it is known to speak of every tier, and where no tier but the device has ever been spoken of.
        """
        return self._clears_all_tiers or self.media <= {DEVICE_MEDIUM}

    def take_for_empty(self) -> bool:
        """Take the unknown beginning of an epoch for over, at :attr:`emptied`; whether that is certain."""
        self._presumed = not self._clears_all_tiers
        return self._clears_all_tiers

    @property
    def tiers_unknown(self) -> bool:
        """A tier has come up after the clear that was taken for one of everything: nobody knows what it held then."""
        return self._presumed and not self.clear_empties

    def clears_every_tier(self) -> None:
        """The engine's AllBlocksCleared speaks of every tier. Its stream alone may not show that."""
        self._seen_to_clear_all = True

    @property
    def only_without_prefix(self) -> bool:
        """Whether groups have announced blocks, and none of them carries prefixes."""
        return self._admission.only_without_prefix

    @property
    def first_group(self) -> int | None:
        """The first prefix-carrying group of the epoch; None where groups have no number."""
        return next(iter(self._block_sizes), None)

    def fast_path(self, payload: bytes) -> Taken | None:
        """Take in a batch that needs no change; None, with nothing changed, if it is for :meth:`apply`."""
        return None if self._left_out.coarse else self._fast_path.take(payload)

    def apply(self, batch: Batch, *, first_of_epoch: bool = False) -> list[AnyEvent]:
        """Take in one batch; the events that leave.

        Args:
            batch: decoded, its rejects not yet counted.
            first_of_epoch: whether this batch has seq 0 (an engine that opens with AllBlocksCleared is SGLang, whose
                clear resets every tier; vLLM's speaks of the GPU pool alone).
        """
        if first_of_epoch and batch.events and isinstance(batch.events[0], AllBlocksCleared):
            self._seen_to_clear_all = True
        self._fast_path.forget()
        self.emptied = False
        self.cleared = []
        # by type: isinstance would be a call for each event
        spoken = {event.medium for event in batch.events if type(event) is not AllBlocksCleared}  # type: ignore[union-attr]
        if not spoken <= self._spoken:
            self._spoken |= {medium for medium in spoken if medium_key(medium) is not None}
            self._media |= {medium_key(medium) or UNKNOWN_MEDIUM for medium in spoken}
        steps = self._admission.steps(batch)
        if self._observe(steps):
            self._rebuild()
        at = clears = 0
        while at < len(steps):
            step = steps[at]
            if isinstance(step, Store):
                end = at + 1
                while end < len(steps) and isinstance(steps[end], Store):
                    end += 1
                self._store_run(steps[at:end])  # type: ignore[arg-type]
                at = end
                continue
            if isinstance(step, AllBlocksCleared):
                self._clear(second=clears > 0)
                clears += 1
            else:
                self._remove(step)
            at += 1
        self._flush_reblocked()
        self._flush_removals()
        self._just_removed.clear()
        out, self._out = self._out, []
        return out

    def dump(self) -> dict[str, Any]:
        """What has been learned about the stream beside its blocks, as plain data."""
        return {
            "granularity": [[group, structs.asdict(known)] for group, known in self._block_sizes.items()],
            "coarse": [
                [*key, block, copies] for key, table in self._left_out.coarse.items() for block, copies in table.items()
            ],
            "intake": self._admission.dump(),
            "clears_all_tiers": self._seen_to_clear_all,
            "media": sorted(self.media),
            "presumed": self._presumed,
            "refused": sorted(self._refused),
        }

    def load(self, data: dict[str, Any]) -> None:
        """The reverse of :meth:`dump`; the index and the tails are filled separately."""
        self._block_sizes.update((group, BlockSizeDetector(**known)) for group, known in data["granularity"])
        for group, medium, block, copies in data["coarse"]:
            self._left_out.add_coarse((group, medium), block, copies)
        self._admission.load(data["intake"])
        self._seen_to_clear_all = data["clears_all_tiers"]
        self._media = set(data["media"])
        self._presumed = data["presumed"]
        self._refused.update(data["refused"])

    @property
    def full(self) -> bool:
        """Stores were refused at the index's limit, and no clear has spoken of them since.

        The index is exact about what it holds, and not complete.
        """
        return bool(self._refused)

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
        self.index.count()
        self.tails.count()

    @property
    def tails(self) -> Index:
        """The tails that are left out, as an index of their own."""
        return self._left_out.tails

    def merge_overlays(self) -> None:
        """Frozen copies of the index may have gone: see :meth:`kvbus.core.blocks.index.Table.merge_overlay`."""
        self.index.merge_overlays()
        self.tails.merge_overlays()

    def announce(self) -> Iterable[AnyEvent]:
        """The stores that build the live set from nothing; see :func:`kvbus.core.blocks.announce.announce`."""
        return announce(self.index)

    # -- block sizes -----------------------------------------------------------------------------------------------

    def _observe(self, steps: list[Step]) -> bool:
        """Learn block sizes from the whole batch, before any of it is applied.

        True if blocks announced before would now be treated differently.
        """
        changed = False
        for step in steps:
            if not isinstance(step, Store) or not step.tokens:
                continue
            detector = self._block_sizes.get(step.group)
            if detector is None:
                detector = BlockSizeDetector(self.rules.block_size, numbered=step.group is not None)
                self._block_sizes[step.group] = detector
            size, blocks = step.event.block_size, len(step.event.block_hashes)
            changed |= detector.observe(size, blocks)
        return changed and (len(self.index) > 0 or len(self.tails) > 0)

    def _treatment(self, group: int | None, chunk: Chunk) -> Treatment:
        return self._block_sizes[group].treatment(chunk.block_size, len(chunk.hashes))

    def _rebuild(self) -> None:
        """Block sizes turned out different from what was assumed: announce everything again in the right ones."""
        self.stats.rebuilds += 1
        if self.names_cleared:
            known = removals_of(self.index)  # now: the blocks are about to get other names
            self.cleared.append(lambda: known)
        for key, table in self.index.tables.items():
            table.refs.clear()
            for chunk in table.blocks.values():
                chunk.reblock_into(None, None)
            self._left_out.take_from(key, table, self._treatment)
        self._left_out.give_back(self.index, self._treatment)
        for key, chunk, a, b in in_order(self.index):
            if self._treatment(key[0], chunk) is Treatment.REBLOCK:
                if chunk.derived is None:
                    self._reblocked(chunk, key[0], self._block_sizes[key[0]].base)
                self._reference(key, chunk, a, b)
        self.count()
        self._out.append(AllBlocksCleared())
        self._out.extend(announce(self.index))

    def _reblocked(self, chunk: Chunk, group: int | None, base: int) -> None:
        before = out_parent(self.index, group, chunk.parent)
        chunk.reblock_into(derive_chunk(chunk, base, before), before)

    # -- stores ----------------------------------------------------------------------------------------------------

    def _store_run(self, run: list[Store]) -> None:
        """Apply consecutive stores. One whose parent comes later in the run waits for it."""
        if len(run) == 1:
            self._store(run[0])
            return
        where: dict[tuple[int | None, Hash], int] | None = None
        done = [False] * len(run)
        for start in range(len(run)):
            if done[start]:
                continue
            stack = [start]
            done[start] = True
            while stack:
                store = run[stack[-1]]
                parent = store.event.parent_block_hash
                if parent is not None and self.index.find(store.group, parent) is None:
                    if where is None:
                        where = {
                            (later.group, block): at
                            for at, later in reversed(list(enumerate(run)))
                            for block in later.event.block_hashes
                        }
                    later_at = where.get((store.group, parent))
                    if later_at is not None and not done[later_at]:
                        done[later_at] = True
                        stack.append(later_at)
                        continue
                self._store(store)
                stack.pop()

    def _store(self, store: Store) -> None:
        event = store.event
        if not store.tokens and not complete(store, self._known):
            self.stats.filtered[Filtered.TOKENLESS] += 1
            return
        detector = self._block_sizes[store.group]
        hashes = event.block_hashes
        treatment = detector.treatment(event.block_size, len(hashes))
        if treatment is Treatment.REJECT:
            self.stats.rejected[Reason.BLOCK_SIZE] += 1
            return
        if treatment is Treatment.COARSE or treatment is Treatment.TAIL:
            self._leave_out(store, treatment)
            return
        table = self.index.table(store.group, store.medium)
        fresh = table.blocks.keys().isdisjoint(hashes)
        parent = event.parent_block_hash
        if parent is not None and not self._parent_ok(store, parent, table):
            return
        new = len(hashes) if fresh else sum(block not in table.blocks for block in hashes)
        chunk = self._chunk_of(store)
        if treatment is Treatment.REBLOCK:
            self._reblocked(chunk, store.group, detector.base)
        if new:
            held = chunk_bytes(chunk)
            if not self._fits(new, held):
                self._refused.add(store.medium)
                return
            self.index.size.add(chunk, new, held, first=fresh or hashes[0] not in table.blocks)
        if fresh:
            table.blocks.update(dict.fromkeys(hashes, chunk))
            if treatment is Treatment.NATIVE:
                self._flush_removals()
                self._out.append(with_extras(event, store.extras) if store.extras else event)
                return
            self._announce_new((store.group, store.medium), chunk, 0, len(hashes))
            return
        self._store_copies(store, table, chunk)

    def _fits(self, blocks: int, held: int) -> bool:
        """Whether so many blocks and bytes more may be kept; if not, that is counted."""
        rules, size, left_out = self.rules, self.index.size, self._left_out
        room = rules.max_blocks - size.blocks - blocks
        room_bytes = rules.max_index_bytes - size.at_most - held
        if left_out:
            room -= len(left_out)
            room_bytes -= left_out.bytes
        if room >= 0 and (room_bytes >= 0 or room_bytes + size.at_most - size.bytes >= 0):
            return True
        self.stats.rejected[Reason.INDEX_FULL] += 1
        return False

    def _chunk_of(self, store: Store) -> Chunk:
        event = store.event
        if event.medium is not None:
            event.medium = event.medium.upper()
        chunk = Chunk(
            tuple(event.block_hashes),
            event.parent_block_hash,
            bytes(event.token_ids),
            self.index.meta(event),
            carried_bytes(event.extra_keys),
        )
        if store.extras or chunk.meta.weight:
            chunk.rest = Rest({name: bytes(raw) for name, raw in (store.extras or {}).items()} or None)
        return chunk

    def _leave_out(self, store: Store, treatment: Treatment) -> None:
        key, hashes = (store.group, store.medium), store.event.block_hashes
        chunk = self._chunk_of(store)
        new = self._left_out.new(key, hashes, treatment)
        if new and not self._fits(new, chunk_bytes(chunk)):
            if treatment is Treatment.COARSE:
                self._refused.add(store.medium)  # its removal may be taken for that of a fine block of the same name
            return
        if treatment is Treatment.TAIL:
            self._left_out.store_tail(key, hashes[0], chunk)
        else:
            self._left_out.store_coarse(key, hashes)

    def _known(self, group: int | None, block: Hash) -> Chunk | None:
        return self.index.find(group, block) or self._just_removed.get((group, block))

    def _parent_ok(self, store: Store, parent: Hash, table: Table) -> bool:
        if parent in store.event.block_hashes and parent not in table.blocks:
            self.stats.rejected[Reason.SELF_PARENT] += 1
            return False
        if self.index.find(store.group, parent) is None:
            if self.rules.orphans == "drop":
                self.stats.filtered[Filtered.ORPHAN_DROPPED] += 1
                if self._refused:
                    self._refused.add(store.medium)  # its parent may be what the limit has kept out
                return False
            self.stats.filtered[Filtered.ORPHAN_PASSED] += 1
        return True

    def _store_copies(self, store: Store, table: Table, chunk: Chunk) -> None:
        """Apply a store of which some blocks are live: those are copies, the others leave as one store per run."""
        size = chunk.block_size
        key = (store.group, store.medium)
        first_new = None
        live = 0
        for i, block in enumerate(chunk.hashes):
            held = table.blocks.get(block)
            if held is None:
                first_new = i if first_new is None else first_new
                continue
            if first_new is not None:
                self._add_run(key, chunk, first_new, i)
                first_new = None
            live += 1
            if self.rules.duplicates == "count":
                table.copies[block] = copies = table.copies.get(block, 0) + 1
                self.stats.most_copies = max(self.stats.most_copies, copies)
            if held.tokens != chunk.tokens and not _same_tokens(held, block, store.tokens[i * size : (i + 1) * size]):
                self.stats.rejected[Reason.HASH_COLLISION] += 1
        if first_new is not None:
            self._add_run(key, chunk, first_new, len(chunk.hashes))
        self.stats.filtered[Filtered.COPY] += live
        if chunk.parent is None and 1 < live == len(chunk.hashes):
            self.stats.reannounced += 1

    def _add_run(self, key: TableKey, chunk: Chunk, a: int, b: int) -> None:
        blocks = self.index.table(*key).blocks
        for block in chunk.hashes[a:b]:
            blocks[block] = chunk
        self._announce_new(key, chunk, a, b)

    def _announce_new(self, key: TableKey, chunk: Chunk, a: int, b: int) -> None:
        if chunk.derived is None:
            stores = list(stores_of(self.index, chunk, a, b))
        else:
            stores = list(reblocked_stores(chunk, self._reference(key, chunk, a, b)))
        if stores:
            self._flush_removals()
            self._out.extend(stores)

    def _reference(self, key: TableKey, chunk: Chunk, a: int, b: int) -> list[int]:
        """Count the sub-blocks of blocks ``[a, b)``. Returns the positions of those that routers do not have.

        A sub-block that was removed earlier in the same batch (a radix node was split: removed, and stored again as
        two) has not left yet, and stays: a router with a tree would lose all that hangs on a removed inner block.
        """
        refs = self.index.table(*key).refs
        derived, per_block = chunk.reblocked()
        fresh = []
        for at in range(a * per_block, b * per_block):
            count = refs.get(derived[at], 0)
            refs[derived[at]] = count + 1
            if not count and self._reblocked_gone.pop((key, derived[at]), None) is None:
                fresh.append(at)
        return fresh

    # -- removals and clears ---------------------------------------------------------------------------------------

    def _remove(self, event: BlockRemoved) -> None:
        medium = check_removed(event)
        group = event.group_idx if event.group_idx is not UNSET else None
        for block in event.block_hashes:
            self._remove_one(group, medium, block)

    def _remove_one(self, group: int | None, medium: str, block: Hash) -> None:
        key: TableKey = (group, medium)
        if self._left_out.coarse and self._left_out.remove_coarse(key, block):
            return
        table = self.index.tables.get(key)
        if table is None or block not in table.blocks:
            holders = self.index.tables_with(medium, block) if group is None else []
            if len(holders) != 1:
                if holders or not self._left_out.remove_tail(key, block):
                    reason = Filtered.GROUP if group in self._admission.no_prefix else Filtered.UNKNOWN_BLOCK
                    self.stats.filtered[reason] += 1
                return
            key, table = holders[0]
        chunk = table.remove(block)
        if chunk is None:
            self.stats.filtered[Filtered.COPY] += 1
            return
        self.index.size.remove(table, block, chunk)
        at = chunk.hashes.index(block)
        self._just_removed[group, block] = chunk
        if chunk.derived is None:
            self._gone.setdefault(key, {})[block] = (chunk.parent_of(at), chunk)
            return
        derived, per_block = chunk.reblocked()
        for i in range(at * per_block, (at + 1) * per_block):
            name = derived[i]
            table.refs[name] -= 1
            if not table.refs[name]:
                del table.refs[name]
                self._reblocked_gone[key, name] = (derived[i - 1] if i else chunk.out_parent, chunk)

    def _flush_reblocked(self) -> None:
        """The batch ends: sub-blocks that were not stored again leave."""
        for (key, name), gone in self._reblocked_gone.items():
            self._gone.setdefault(key, {})[name] = gone
        self._reblocked_gone.clear()

    def _flush_removals(self) -> None:
        """Let the removals since the last store leave, leaves first: an event (or several) per run of one spelling."""
        for gone in self._gone.values():
            order = leaf_first([(block, parent) for block, (parent, _) in gone.items()])
            for (medium, group), run in groupby(order, key=lambda block: _spelling(gone[block][1])):
                named = list(run)
                for at in range(0, len(named), MAX_RUN):
                    self._out.append(BlockRemoved(named[at : at + MAX_RUN], medium, group))
        self._gone.clear()

    def _put_back(self) -> None:
        """The index is about to be given up: it gets the blocks whose removal has not left, for the right order."""
        for key, gone in self._gone.items():
            self.index.table(*key).blocks.update((block, chunk) for block, (_, chunk) in gone.items())
        for (key, name), (_, chunk) in self._reblocked_gone.items():
            table = self.index.table(*key)
            derived, per_block = chunk.reblocked()
            table.blocks.setdefault(chunk.hashes[derived.index(name) // per_block], chunk)
            table.sub_blocks += 1

    def _clear(self, *, second: bool) -> None:
        """The engine cleared its cache: every tier (SGLang), or the device pool alone (vLLM).

        vLLM resets what its pool has moved to other tiers by a ``second`` clear in the same batch. Where other tiers
        stay live, a clear leaves as removals, because routers understand AllBlocksCleared as everything.
        """
        self.emptied = second or self.clear_empties
        self._media = self.media
        survive = {
            medium
            for medium in self.index.media_names | self._left_out.media | self._refused
            if not self._clears_all_tiers and (medium == DEVICE_MEDIUM) == second
        }
        self._left_out.keep(survive)
        self._refused &= survive
        if any(table.blocks for _, table in self.index.tables_on(survive)):
            cleared = self.index.media_names - survive
            for (group, medium), table in self.index.tables_on(cleared):
                table.copies.clear()
                for block in list(table.blocks):
                    self._remove_one(group, medium, block)
            self.index.drop_empty(cleared)
            return
        if self.names_cleared:
            self._put_back()
        self._gone.clear()  # the clear says that, too
        self._reblocked_gone.clear()
        if not (self._out and isinstance(self._out[-1], AllBlocksCleared)):
            self._out.append(AllBlocksCleared())
            if self.names_cleared:
                last = self.index.given_up()
                self.cleared.append(lambda: removals_of(last))
        self.index.clear()


def _spelling(chunk: Chunk) -> tuple[str | None, Any]:
    """Medium and group as the engine wrote them when it stored the chunk."""
    return chunk.meta.medium, chunk.meta.group_idx


def _same_tokens(held: Chunk, block: Hash, tokens: list[Any]) -> bool:
    mine = held.block_tokens(held.hashes.index(block))
    return len(mine) == len(tokens) and all(a == b for a, b in zip(mine, tokens, strict=True))
