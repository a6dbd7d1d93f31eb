"""Decide which events of a batch may be applied to the index, and count the reason of each event that may not.

Each event is checked once. Block sizes are learned from all stores of a batch before any event of the batch is applied.
The check of an event does not use the other events of the stream, except for a few facts: which kinds of hashes, groups
and media the stream has. Each rule has its own reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

from msgspec import UNSET

from kvbus.core.blocks.chunk import Chunk
from kvbus.core.blocks.index import MAX_RUN, TableKey
from kvbus.core.normalizing.cache import EngineCache
from kvbus.core.normalizing.lanes import Lane, Lanes
from kvbus.core.types import MAX_HASH_BYTES, Filtered, Hash, Reason, medium_key
from kvbus.core.wire.carried import known_names, set_aside
from kvbus.core.wire.codec import lacks_field, note
from kvbus.core.wire.encoding import NOTHING, extras_of, parts
from kvbus.core.wire.schema import AllBlocksCleared, Batch, BlockRemoved, BlockStored, Extras
from kvbus.core.wire.tokens import count_tokens

MAX_SIZE: Final = 2**31
"""Maximum valid block size in a store, in tokens."""

_INTEGERS: Final = frozenset({int})
_BYTE_STRINGS: Final = frozenset({bytes})


def check_stored(event: BlockStored) -> int | Reason:
    """Return the number of tokens of a store, or the reason why the store is invalid.

    If a store with tokens has a block size of 0 (llm-d-inference-sim), set its block size to the number of tokens
    divided by the number of hashes. Stores without hashes or without tokens are valid. A store may have more tokens
    than its hashes need, because vLLM leaves out the hashes of masked blocks.
    """
    if medium_key(event.medium) is None:
        return Reason.UNKNOWN_MEDIUM
    tokens = count_tokens(event.token_ids)
    if isinstance(tokens, Reason):
        return tokens
    if not 0 <= event.block_size <= MAX_SIZE:
        return Reason.BLOCK_SIZE
    hashes = event.block_hashes
    count = len(hashes)
    if count and tokens:
        if event.block_size == 0 and tokens % count == 0:
            event.block_size = tokens // count
        size = event.block_size
        if size == 0 or size * count > tokens or tokens % size:
            return Reason.TOKEN_COUNT
    if not count:
        return tokens
    if (reason := check_hashes(hashes)) is not None:
        return reason
    if len(set(hashes)) != count:
        return Reason.DUPLICATE_HASH
    parent = event.parent_block_hash
    reason = None if parent is None or parent is UNSET else check_hashes((hashes[0], parent))
    return tokens if reason is None else reason


def check_removed(event: BlockRemoved) -> str | Reason:
    """Return the index key of a removal's medium, or the reason why the removal is invalid."""
    medium = medium_key(event.medium)
    if medium is None:
        return Reason.UNKNOWN_MEDIUM
    reason = check_hashes(event.block_hashes) if event.block_hashes else None
    return medium if reason is None else reason


def check_hashes(hashes: Sequence[Hash]) -> Reason | None:
    """Return None if all hashes are integers, or all are byte strings of 1 to 64 bytes; otherwise ``HASH_KIND``."""
    if _INTEGERS.issuperset(map(type, hashes)):
        return None
    if _BYTE_STRINGS.issuperset(map(type, hashes)):
        lengths = set(map(len, cast("Sequence[bytes]", hashes)))
        return None if min(lengths) > 0 and max(lengths) <= MAX_HASH_BYTES else Reason.HASH_KIND
    return Reason.HASH_KIND


class Checked:
    """A store that has passed the checks and may be applied to the index.

    Attributes:
        event: the store.
        key: the residency of its blocks: group, medium, locality and owner.
        chunk: the blocks of the store with their tokens. It is None if the store has no tokens, or has more tokens than
            its hashes need, so that it is unknown which tokens belong to which block.
        extras: the fields of the store that :class:`BlockStored` does not define; None if there are none.
    """

    __slots__ = ("chunk", "event", "extras", "key")

    def __init__(self, event: BlockStored, key: TableKey, chunk: Chunk | None, extras: Extras | None) -> None:
        self.event = event
        self.key = key
        self.chunk = chunk
        self.extras = extras


Step = tuple[Any, Any]
"""An event that has passed the checks, and how it is applied to the index.

A store comes with its :class:`Lane` if it is one of the lane's usual stores, otherwise with a :class:`Checked`. A
removal comes with the key of the table that it names, and a clear with None.
"""


class Admission:
    """The checks of one source's unusual events. ``Normalizer.apply`` checks the usual events itself.

    The checks change the counters and what kvbus knows about the stream (groups, media, owners, sizes), but no blocks.
    """

    def __init__(self, cache: EngineCache, lanes: Lanes) -> None:
        self._cache = cache
        self._lanes = lanes

    def count_rejects(self, rejects: Sequence[Reason]) -> None:
        """Count events that could not be decoded.

        Such an event may have been a store, so the source becomes partial. An event of an unknown type is not a store,
        so it does not make the source partial.
        """
        for reason in rejects:
            if reason is Reason.UNKNOWN_EVENT:
                self._cache.stats.rejected[reason] += 1
            else:
                self._cache.refuse(reason)

    # -- removals and clears ---------------------------------------------------------------------------------------

    def clear(self, event: AllBlocksCleared) -> bool:
        """Count a clear and return whether it may be applied. If not, count the reason."""
        stats = self._cache.stats
        stats.cleared += 1
        if medium_key(event.medium) is None:
            stats.rejected[Reason.UNKNOWN_MEDIUM] += 1
            return False
        return True

    def removal(self, event: BlockRemoved) -> TableKey | None:
        """Return the key of the table that a removal means; None if it may not be applied. Then count the reason."""
        stats = self._cache.stats
        key = self._lanes.table_of(event)
        found = check_removed(event)
        if isinstance(found, Reason):
            stats.rejected[found] += 1
            return None
        if not event.block_hashes:
            stats.filtered[Filtered.NO_HASHES] += 1
            return None
        return key

    # -- stores ----------------------------------------------------------------------------------------------------

    def store(self, event: BlockStored, batch: Batch, at: int) -> list[Checked]:
        """Count a store that is not a usual one of its lane, and learn its block size.

        Return a list with the store, divided into several parts if it is long. The list is empty if the store may not
        be applied.
        """
        cache = self._cache
        if lacks_field(event):
            cache.refuse(Reason.MISSING_FIELD)
            return []
        cache.stats.stored += 1
        lane = self._lanes.of(event)
        tokens = self._verdict(event, lane)
        if isinstance(tokens, Filtered):
            cache.stats.filtered[tokens] += 1
            return []
        if isinstance(tokens, Reason):
            cache.refuse(tokens, lane.key[1])
            return []
        extras = self._extras_of(event, batch, at)
        size, count = event.block_size, len(event.block_hashes)
        complete = tokens > 0 and tokens == count * size
        if not complete:  # drop the tokens: it is unknown which of them belong to which hash
            event.token_ids = NOTHING
        if size:
            self._lanes.learn(lane, size, max(count, tokens // size), tokens=complete)
        return self._parts(event, lane.key, extras, complete=complete)

    def _verdict(self, event: BlockStored, lane: Lane) -> int | Filtered | Reason:
        """Return the number of tokens of a store that kvbus accepts.

        If kvbus does not accept the store, return the reason: a `Filtered` if kvbus leaves the store out on purpose, a
        `Reason` if the store is not valid.
        """
        if lane.unwanted is not None:
            return lane.unwanted
        tokens = check_stored(event)
        if isinstance(tokens, Reason):
            return tokens
        if not event.block_hashes:
            return Filtered.NO_HASHES
        if not self._cache.stream.takes(type(event.block_hashes[0])):
            return Reason.HASH_KIND
        return tokens if lane.beyond is None else lane.beyond

    def _extras_of(self, event: BlockStored, batch: Batch, at: int) -> Extras | None:
        """Replace values of a store that routers cannot read by readable values.

        Returns:
            The original values of the replaced fields, and the fields that the struct BlockStored does not define; None
            if there are neither.
        """
        extras = (batch.extras or {}).get(at)
        if odd := set_aside(event):
            extras = {**(extras or {}), **odd}
            batch.unknown = batch.unknown or set()
            for name in odd:
                note(batch.unknown, "value of", name)
        if extras and known_names(extras):
            self._cache.stats.filtered[Filtered.ODD_FIELD] += 1
        return extras

    def _parts(self, event: BlockStored, key: TableKey, extras: Extras | None, *, complete: bool) -> list[Checked]:
        """Return a store as one part, or as several consecutive parts if it has more than :data:`MAX_RUN` blocks.

        ``complete`` says that the store has exactly the tokens of its blocks. Otherwise the ``chunk`` of each part is
        None (see :class:`Checked`).
        """
        count = len(event.block_hashes)
        if count <= MAX_RUN:
            return [Checked(event, key, self._cache.index.chunk_of(event, extras) if complete else None, extras)]
        steps: list[Checked] = []
        runs = [(first, min(first + MAX_RUN, count)) for first in range(0, count, MAX_RUN)]
        for (first, end), part in zip(runs, cast("list[BlockStored]", parts(event, runs)), strict=True):
            own = extras and extras_of(extras, count, first, end)
            chunk = self._cache.index.chunk_of(part, own) if complete else None
            steps.append(Checked(part, key, chunk, own))
        return steps
