"""The normalizer of one source. The docstring of :mod:`kvbus.core.normalizing` describes its rules."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

from msgspec import UNSET

from kvbus.core.blocks.announce import announce
from kvbus.core.blocks.chunk import Chunk
from kvbus.core.blocks.index import BlockKey, Index, TableKey
from kvbus.core.normalizing import large_batches
from kvbus.core.normalizing.admission import Admission, Checked, Step, check_hashes
from kvbus.core.normalizing.block_size import BlockSizes, Treatment
from kvbus.core.normalizing.cache import EngineCache, Stream
from kvbus.core.normalizing.clears import Clears
from kvbus.core.normalizing.filing import Filing
from kvbus.core.normalizing.lanes import Lane, Lanes, lane_name
from kvbus.core.normalizing.reblocking import Reblocking
from kvbus.core.normalizing.removals import Removals
from kvbus.core.normalizing.stores import StoreApplier, ancestors, first_stores
from kvbus.core.source_spec import SourceSpec
from kvbus.core.stats import SourceStats
from kvbus.core.types import Filtered, Hash, Reason, Residencies, medium_key
from kvbus.core.wire.carried import keys_ok, odd_fields
from kvbus.core.wire.codec import AnyEvent, clears_all
from kvbus.core.wire.schema import AllBlocksCleared, Batch, BlockRemoved, BlockStored
from kvbus.core.wire.tokens import count_tokens


class Normalizer:
    """The normalizer of one source.

    It turns the engine's events into events that routers can rely on, and keeps the index of the source's live blocks.

    Args:
        spec: the configuration of the source.
        stats: the counters of the source.
        index: an empty index. By default, a new :class:`Index`.
    """

    def __init__(self, spec: SourceSpec, stats: SourceStats, index: Index | None = None) -> None:
        self.spec = spec
        self.stats = stats
        self.index = Index() if index is None else index
        self.emptied = False
        """Whether the last batch given to :meth:`apply` removed every block that the engine was known to hold."""
        self.parts: deque[list[Step]] = deque()
        """The parts of the last batch that are not applied yet. The caller must call :meth:`go_on` for each part.

        They are empty unless the batch stores or removes very many blocks.
        """
        self._clears = 0
        """Number of AllBlocksCleared events without a medium in the applied parts of the last batch."""
        self._begin(self._new_stream())

    def _new_stream(self) -> Stream:
        return Stream(BlockSizes(self.spec.block_size, self.index))

    def _begin(self, stream: Stream) -> None:
        self._cache = EngineCache(self.spec, self.stats, self.index, stream)
        self.filed: dict[Residencies, list[AnyEvent]] = self._cache.filed
        """The last batch's events for routers that take some residencies of a block for one.

        They are listed by the way in which the routers distinguish residencies. The dictionary is empty if the engine
        has named no locality and no owner: then all routers get the events that :meth:`apply` has returned.
        """
        self._lanes = Lanes(self._cache)
        self._admission = Admission(self._cache, self._lanes)
        self._reblocking = Reblocking(self._cache)
        self._filing = Filing(self._cache, self._reblocking)
        self._removals = Removals(self._cache, self._reblocking, self._filing)
        self._stores = StoreApplier(self._cache, self._removals, self._reblocking, self._filing)
        self.clears = Clears(self._cache, self._removals)

    # -- batch by batch --------------------------------------------------------------------------------------------

    def apply(self, batch: Batch, *, first_of_epoch: bool = False) -> list[AnyEvent]:
        """Apply one batch to the index, and return the events that routers get.

        The events are the decoded ones: a rule that changes something changes the event, or replaces it. If the batch
        stores or removes very many blocks, apply only its first part (:attr:`parts`).

        Args:
            batch: the decoded batch. Its undecodable events (``rejects``) are not counted yet.
            first_of_epoch: whether this batch has seq 0. If its first event is AllBlocksCleared, the engine is SGLang,
                whose clears apply to every memory tier. vLLM's clears apply only to the GPU.
        """
        cache, sizes = self._cache, self._cache.stream.sizes
        cache.leaving, cache.cleared = [], []
        self.emptied = False
        if first_of_epoch and batch.events and clears_all(batch.events[0]):
            cache.stream.clears_all_tiers = True

        # Check all events and learn block sizes from them, before any event is applied.
        steps, blocks = self._check(batch)
        if cache.stream.owners:
            cache.begin_filing()
        if sizes.relearned and (self.index.blocks or self.tails.blocks):
            self._removals.flush_all()
            self._reblocking.rebuild()
        sizes.relearned = False
        self._clears = 0
        if blocks > large_batches.PART:
            self.parts = large_batches.in_parts(steps)
            steps = self.parts.popleft()
        return self._apply_part(steps)

    def go_on(self) -> list[AnyEvent]:
        """Apply the next part of the last batch, and return the events that routers get."""
        self._cache.leaving, self._cache.cleared = [], []
        if self._cache.stream.owners:
            self._cache.begin_filing()
        return self._apply_part(self.parts.popleft())

    def _apply_part(self, steps: Sequence[Step]) -> list[AnyEvent]:
        """Apply checked events in order. A store waits for a later store that has its parent."""
        index, removals = self.index, self._removals
        taken: set[int] = set()
        first: dict[tuple[int | None, Hash], int] = {}
        last = len(steps) - 1
        for at, (event, way) in enumerate(steps):
            if type(event) is BlockStored:
                if at in taken:
                    continue
                parent = event.parent_block_hash
                if at < last and parent is not None and parent is not UNSET:
                    table = index.tables.get(way.key)
                    if table is None or parent not in table.blocks:
                        first = first or first_stores(steps, at)
                        for earlier in ancestors(steps, at, first, taken, index):
                            self._store(*earlier)
                self._store(event, way)
                continue
            first = {}
            if type(event) is BlockRemoved:
                removals.remove(event, way)
            else:
                self._clear(event)
        if removals.unfinished:
            removals.finish(complete=not self.parts)
        return self._cache.leaving

    def _check(self, batch: Batch) -> tuple[list[Step], int]:
        """Return the events of a batch that may be applied, in their original order, and the number of their blocks.

        A usual store has the block size and the kind of hash of its lane, and teaches kvbus nothing. Every other event
        is left to ``Admission``, which counts the reason if the event may not be applied.
        """
        cache, lanes, admission = self._cache, self._lanes, self._admission
        stats, stream = cache.stats, cache.stream
        if batch.rejects:
            admission.count_rejects(batch.rejects)
        steps: list[Step] = []
        blocks = 0
        for at, event in enumerate(batch.events):
            if type(event) is BlockStored:
                sent: Any = event  # typed as Any: fields declared as Raw are UNSET if the engine left them out
                lane = lanes.opened.get(lane_name(event))
                hashes, parent, count = event.block_hashes, event.parent_block_hash, len(event.block_hashes)
                if (
                    lane is not None
                    and 0 < count <= lane.most
                    and event.block_size == lane.size
                    and count_tokens(event.token_ids) == count * lane.size
                    and type(hashes[0]) is stream.hash_kind
                    and check_hashes(hashes if parent is None or parent is UNSET else (*hashes, parent)) is None
                    and (count == 1 or len(set(hashes)) == count)
                    and (sent.extra_keys is UNSET or keys_ok(sent.extra_keys, count))
                    and (
                        sent.cache_salt is sent.session_id is sent.lookahead_token_ids is UNSET or not odd_fields(event)
                    )
                    and not (batch.extras and at in batch.extras)
                ):
                    stats.stored += 1
                    stream.lead += 1
                    steps.append((event, lane))
                    blocks += count
                elif parts := admission.store(event, batch, at):
                    steps += [(each.event, each) for each in parts]
                    blocks += count
            elif type(event) is BlockRemoved:
                stats.removed += 1
                gone: Any = event  # typed as Any: see above
                named = gone.locality is not UNSET or gone.ownership is not UNSET
                key = None if named else lanes.removals.get((event.medium, event.group_idx))
                if key is None or not event.block_hashes or check_hashes(event.block_hashes) is not None:
                    key = admission.removal(event)
                if key is not None:
                    steps.append((event, key))
                    blocks += len(event.block_hashes)
            elif type(event) is AllBlocksCleared:
                if admission.clear(event):
                    steps.append((event, None))
            else:
                stats.filtered[Filtered.INACTIVE] += 1
        return steps, blocks

    def _store(self, event: BlockStored, way: Lane | Checked) -> None:
        """Apply one store: add its blocks to the index, and append the store to the outgoing events.

        The blocks of a usual store are new, and routers know its parent by the engine's hash. Every other store is left
        to ``StoreApplier``.
        """
        cache, index, stores = self._cache, self.index, self._stores
        if isinstance(way, Checked):
            stores.apply(way)
            return
        lane = way
        if event.block_size != lane.size or index.cut:
            stores.apply_chunk(lane.key, index.chunk_of(event, None))
            return
        # The fields that kvbus sends in every store.
        if event.parent_block_hash is UNSET:
            event.parent_block_hash = None
        if event.lora_id is UNSET:
            event.lora_id = None
        if event.lora_name is UNSET:
            event.lora_name = None
        event.medium = lane.medium

        hashes, parent = event.block_hashes, event.parent_block_hash
        table = index.tables.get(lane.key) or index.table(*lane.key)
        blocks = table.blocks
        if parent is not None:
            holder = blocks.get(parent)
            if holder is None:
                if not stores.parent_ok(lane.key, parent, hashes, table):
                    return
            elif holder.hashes[-1] == parent:
                parent = holder.hashes[-1]  # keep the hash object of the index, not an equal one
        sent: Any = event
        if (
            sent.lora_id is sent.lora_name is None
            and sent.cache_salt is sent.session_id is sent.lookahead_token_ids is UNSET
        ):
            keys = None if sent.extra_keys is UNSET else bytes(sent.extra_keys)
            chunk = Chunk(hashes, parent, bytes(event.token_ids), lane.meta, keys)
        else:
            chunk = index.chunk_of(event, None)
        count, memory = len(hashes), chunk.memory
        if not (blocks.keys().isdisjoint(hashes) and cache.fits(count, memory)):
            stores.put(lane.key, table, chunk, Treatment.NATIVE)
            return
        for block in hashes:
            blocks[block] = chunk
        chunk.live = count
        index.blocks += count
        index.bytes += memory
        if self._removals.waits:
            self._removals.flush()
        cache.leaving.append(event)
        if cache.filed:
            self._filing.store(lane.key, [event])

    def _clear(self, event: AllBlocksCleared) -> None:
        """Apply an AllBlocksCleared of a batch.

        vLLM's AllBlocksCleared without a medium clears only the device. If vLLM also resets its other tiers, it sends a
        second one in the same batch.
        """
        everything = clears_all(event)
        self.emptied = self.clears.apply(
            None if everything else medium_key(event.medium), second=everything and self._clears > 0
        )
        self._clears += everything

    def outlived(self, blocks: Iterable[BlockKey]) -> list[AnyEvent]:
        """Remove blocks whose lifetime has ended, with all their copies. Return the removals to send."""
        self._cache.leaving, self._cache.cleared = [], []
        if self._cache.stream.owners:
            self._cache.begin_filing()
        for *names, block in blocks:
            key = cast("TableKey", tuple(names))
            table = self.index.tables.get(key)
            if table is not None and block in table.blocks:
                table.copies.pop(block, None)
                self._removals.remove_one(key, block)
                self.stats.filtered[Filtered.OUTLIVED] += 1
        self._removals.finish(complete=not self.parts)
        return self._cache.leaving

    def missed(self, reason: Reason) -> None:
        """Count a batch that cannot be decoded. The live blocks stay unchanged."""
        self._admission.count_rejects([reason])

    def reset(self, *, same_epoch: bool = False) -> None:
        """Forget all blocks of the engine.

        If the epoch is still the same, keep everything else that the stream has shown, such as the engine's block size.
        """
        stream, names_cleared = self._cache.stream, self.names_cleared
        stream.media |= self.index.media_names
        self.parts.clear()
        self.index.clear()
        self._begin(stream if same_epoch else self._new_stream())
        self.names_cleared = names_cleared

    def announce(self) -> Iterable[AnyEvent]:
        """Return the stores from which a reader without any block builds all live blocks of the source.

        See :func:`kvbus.core.blocks.announce.announce`.
        """
        return announce(self.index)

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def names_cleared(self) -> bool:
        """Whether some output sends removals of single blocks in place of an AllBlocksCleared."""
        return self._cache.names_cleared

    @names_cleared.setter
    def names_cleared(self, needed: bool) -> None:
        self._cache.names_cleared = needed

    @property
    def cleared(self) -> list[Callable[..., Sequence[AnyEvent]]]:
        """Functions that build removals of cleared blocks, one for each AllBlocksCleared among the last batch's events.

        The list is empty unless some output sends removals in place of clears (:attr:`names_cleared`).
        """
        return self._cache.cleared

    @property
    def block_size(self) -> int | None:
        """Number of tokens in the blocks that routers get. It is the size of the first group whose size is known.

        Without such a group, it is the configured size; None if there is none.
        """
        return self._cache.stream.sizes.base or None

    @property
    def most_blocks(self) -> int:
        """Maximum number of the source's blocks in a batch that every router accepts."""
        return self._cache.stream.sizes.most_blocks

    @property
    def engine_block_size(self) -> int:
        """Number of tokens in the engine's blocks. It is the size of the first group whose size is known.

        It is 0 while every size is unknown, and if the blocks differ in size.
        """
        known = (sizes.detector.size for sizes in self._cache.stream.sizes.groups.values())
        return next((size for size in known if size), 0)

    @property
    def only_without_prefix(self) -> bool:
        """Whether the engine has announced only blocks that a router cannot match with a prompt's prefix."""
        stream = self._cache.stream
        return bool(stream.no_prefix) and stream.groups <= stream.no_prefix

    @property
    def first_group(self) -> int | None:
        """The first group of the epoch whose blocks kvbus sends; None if the engine does not number its groups."""
        return next(iter(self._cache.stream.sizes.groups), None)

    @property
    def known_groups(self) -> int:
        """Number of KV-cache groups that have had stores in this epoch. It does not exceed the limit ``max_groups``."""
        return len(self._cache.stream.groups)

    @property
    def known_owners(self) -> int:
        """Number of pairs of locality and owner that have had stores in this epoch, besides the pair of missing names.

        It does not exceed the limit ``max_owners``.
        """
        return len(self._cache.stream.owners)

    @property
    def full(self) -> bool:
        """Whether kvbus refused stores because of a limit of the index, and the engine has not cleared its cache since.

        The blocks in the index are then correct, but other live blocks are missing.
        """
        return not self.refused.isdisjoint({Reason.INDEX_FULL, Reason.TOO_MANY_GROUPS})

    @property
    def refused(self) -> set[str]:
        """The reasons of refused stores whose blocks the engine may still hold."""
        return {reason for _, reason in self._cache.refused if reason != Filtered.HASH_ONLY}

    @property
    def hash_only(self) -> bool:
        """Whether the engine has stored blocks whose tokens are unknown, and has not cleared its cache since."""
        return any(reason == Filtered.HASH_ONLY for _, reason in self._cache.refused)

    @property
    def counts_copies(self) -> bool:
        """Whether a block stays live until it has had as many removals as stores."""
        return self._cache.copies.counted

    @property
    def entries(self) -> int:
        """Number of blocks that kvbus remembers for this source. It does not exceed the limit ``max_blocks``.

        Live blocks count, and so do blocks that routers do not get.
        """
        return self._cache.entries

    @property
    def index_bytes(self) -> int:
        """Approximate memory in bytes that this source's blocks need.

        It does not exceed the limit ``max_index_bytes``.
        """
        return self._cache.bytes

    # -- state across a restart ----------------------------------------------------------------------------------------

    @property
    def tails(self) -> Index:
        """The tail blocks, which routers do not get, as a separate index."""
        return self._cache.left_out.tails

    @property
    def indexes(self) -> tuple[Index, Index]:
        """The index of the live blocks and the index of the tail blocks."""
        return self.index, self.tails

    def merge_overlays(self) -> None:
        """Merge the copy-on-write overlays of the two indexes, of live blocks and of tail blocks.

        They are not merged while a snapshot needs the frozen state. See
        :meth:`kvbus.core.blocks.index.Table.merge_overlay`.
        """
        for index in self.indexes:
            index.merge_overlays()

    def count(self) -> None:
        """Count all blocks of the index and all tail blocks again.

        Call it after blocks were added without being counted.
        """
        for index in self.indexes:
            index.count()

    def dump(self) -> dict[str, Any]:
        """Return what the normalizer has learned about the engine, such as block sizes, as plain data.

        A new process can load the data. They do not contain the blocks.
        """
        return self._cache.dump()

    def load(self, data: dict[str, Any]) -> None:
        """Restore the result of :meth:`dump`. The caller adds the live blocks and the tail blocks to their indexes."""
        self._cache.load(data)
