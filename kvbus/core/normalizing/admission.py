"""The first half of normalizing: which events of a batch may be applied at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast

import msgspec
from msgspec import Raw, UnsetType

from kvbus.core.blocks.index import MAX_RUN, Chunk
from kvbus.core.normalizing.validate import Store, check_removed, check_stored
from kvbus.core.stats import SourceStats
from kvbus.core.types import PREFIX_KINDS, Filtered, Hash, Reason
from kvbus.core.wire.codec import Batch
from kvbus.core.wire.parts import parts
from kvbus.core.wire.schema import AllBlocksCleared, BlockRemoved, BlockStored

Step = Store | BlockRemoved | AllBlocksCleared
"""An event that keeps the rules, in the order it came."""


class Admission:
    """Checks each event of one source and counts what is wrong with it. Its only state is what the checks learn.

    Args:
        groups: ``prefix`` leaves out groups whose kind carries no prefixes.
        max_groups: groups that anything is remembered of; stores of further ones are refused.
        stats: where rejections are counted.
        refused: takes the media of stores that a limit has refused.
    """

    def __init__(
        self, groups: Literal["prefix", "all"], max_groups: int, stats: SourceStats, refused: set[str]
    ) -> None:
        self._groups = groups
        self._max_groups = max_groups
        self._stats = stats
        self._refused = refused
        self._kinds: dict[type, int] = {int: 0, bytes: 0}
        self.known: set[int | None] = set()
        """Groups that stores were of."""
        self.no_prefix: set[int | None] = set()
        """Groups that announced themselves as sliding window, chunked local or mamba."""

    @property
    def only_without_prefix(self) -> bool:
        """Whether groups have stored blocks, and all of them are left out."""
        return bool(self.no_prefix) and self.known <= self.no_prefix

    def steps(self, batch: Batch) -> list[Step]:
        """The events of a batch that may be applied."""
        stats = self._stats
        for reason in batch.rejects:
            stats.rejected[reason] += 1
        steps: list[Step] = []
        for position, event in enumerate(batch.events):
            if isinstance(event, BlockStored):
                stats.stored += 1
                store = self._check(event)
                if store is not None:
                    if batch.extras is not None:
                        store.extras = batch.extras.get(position)
                    steps.extend(split_long(store))
            elif isinstance(event, BlockRemoved):
                stats.removed += 1
                medium = check_removed(event)
                if isinstance(medium, Reason):
                    stats.rejected[medium] += 1
                elif not event.block_hashes:
                    stats.filtered[Filtered.NO_HASHES] += 1
                else:
                    steps.append(event)
            else:
                stats.cleared += 1
                steps.append(event)
        return steps

    def _check(self, event: BlockStored) -> Store | None:
        group = None if isinstance(event.group_idx, UnsetType) else event.group_idx
        known = group in self.known or self._gets_known(group)
        kind = event.kv_cache_spec_kind
        if self._groups == "prefix" and isinstance(kind, str) and kind not in PREFIX_KINDS:
            if known:
                self.no_prefix.add(group)
            self._stats.filtered[Filtered.GROUP] += 1
            return None
        store = check_stored(event)
        if isinstance(store, Reason):
            self._stats.rejected[store] += 1
            return None
        if not event.block_hashes:
            self._stats.filtered[Filtered.NO_HASHES] += 1
            return None
        if not self._right_kind(event.block_hashes[0]):
            self._stats.rejected[Reason.HASH_KIND] += 1
            return None
        if not known:
            self._stats.rejected[Reason.TOO_MANY_GROUPS] += 1
            self._refused.add(store.medium)
            return None
        return store

    def _gets_known(self, group: int | None) -> bool:
        if len(self.known) >= self._max_groups:
            return False
        self.known.add(group)
        return True

    def count_plain(self, kind: type, stores: int, removals: int) -> bool:
        """Count the events of a batch that keeps every rule; False if its kind of hash is not the stream's."""
        if stores:
            kinds = self._kinds
            if kinds[kind] + 1 < kinds[bytes if kind is int else int]:
                return False
            kinds[kind] += stores
            self._stats.stored += stores
        if removals:
            self._stats.removed += removals
        return True

    def dump(self) -> list[Any]:
        """Plain data for a restart."""
        return [[self._kinds[int], self._kinds[bytes]], list(self.no_prefix), list(self.known)]

    def load(self, data: list[Any]) -> None:
        """The reverse of :meth:`dump`."""
        (self._kinds[int], self._kinds[bytes]), no_prefix, known = data
        self.no_prefix, self.known = set(no_prefix), set(known)

    def _right_kind(self, block: Hash) -> bool:
        """Whether the hash is of this stream's kind. The majority decides, so an odd event changes nothing."""
        kinds = self._kinds
        mine, other = (int, bytes) if isinstance(block, int) else (bytes, int)
        kinds[mine] += 1
        return kinds[mine] >= kinds[other]


def split_long(store: Store) -> list[Store]:
    """A store of more than :data:`MAX_RUN` blocks as several that follow one another."""
    event = store.event
    count, size = len(event.block_hashes), event.block_size
    if count <= MAX_RUN:
        return [store]
    runs = [(at, min(at + MAX_RUN, count)) for at in range(0, count, MAX_RUN)]
    return [
        Store(cast("BlockStored", part), store.tokens[at * size : end * size], store.medium, store.group, store.extras)
        for part, (at, end) in zip(parts(event, runs), runs, strict=True)
    ]


def complete(store: Store, find: Callable[[int | None, Hash], Chunk | None]) -> bool:
    """Give a store without tokens (an offloaded block of vLLM's) those that its hashes have on another medium.

    False if not all of them are known, with one block size.
    """
    event = store.event
    tokens: list[Any] = []
    sizes: set[int] = set()
    first = None
    for block in event.block_hashes:
        chunk = find(store.group, block)
        if chunk is None:
            return False
        first = first or chunk
        tokens += chunk.block_tokens(chunk.hashes.index(block))
        sizes.add(chunk.block_size)
    if len(sizes) != 1 or first is None:
        return False
    if event.parent_block_hash is None:
        event.parent_block_hash = first.parent_of(first.hashes.index(event.block_hashes[0]))
    event.block_size = sizes.pop()
    event.token_ids = Raw(msgspec.msgpack.encode(tokens))
    if event.lora_id is None and event.lora_name is None:
        event.lora_id, event.lora_name = first.meta.lora_id, first.meta.lora_name
    store.tokens = tokens
    return True
