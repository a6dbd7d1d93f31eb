"""Apply AllBlocksCleared: decide which memory tiers it clears, and which blocks stay.

In SGLang, the event clears every tier. In vLLM, it clears only the device. Either the operator has configured which
tiers the engine clears, or kvbus infers it from the stream.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from kvbus.core.blocks.announce import removals_of
from kvbus.core.blocks.index import Index
from kvbus.core.normalizing.cache import EngineCache
from kvbus.core.normalizing.removals import Removals
from kvbus.core.types import DEVICE_MEDIUM
from kvbus.core.wire.schema import AllBlocksCleared


class Clears:
    """The handler of one source's AllBlocksCleared events."""

    def __init__(self, cache: EngineCache, removals: Removals) -> None:
        self._cache = cache
        self._removals = removals

    @property
    def all_tiers(self) -> bool:
        """Whether AllBlocksCleared clears every memory tier of the engine.

        The operator's configuration decides. If it is ``auto``, the first event of the epoch decides: all tiers are
        cleared if this event is an AllBlocksCleared without a medium, as SGLang sends it.
        """
        rule = self._cache.spec.clears
        return self._cache.stream.clears_all_tiers if rule == "auto" else rule == "all"

    @property
    def empty(self) -> bool:
        """Whether an AllBlocksCleared leaves no block in the engine's cache.

        That is so if the event clears every tier, or if the stream has never named a tier except the device.
        """
        return self.all_tiers or self._cache.media <= {DEVICE_MEDIUM}

    def take_for_empty(self) -> bool:
        """Record that a clear has emptied the engine's cache, so that earlier missing batches do not matter any more.

        Return whether it is certain that the cache is empty. It is not certain if the clear applies only to the device:
        the engine may hold blocks on another tier, although kvbus has not received an event about that tier yet.
        """
        self._cache.stream.presumed = not self.all_tiers
        return self.all_tiers

    @property
    def tiers_unknown(self) -> bool:
        """Whether kvbus presumed that a clear emptied every tier, but the stream named a further tier later.

        Then kvbus does not know which blocks that tier held at the clear.
        """
        return self._cache.stream.presumed and not self.empty

    def apply(self, medium: str | None, *, second: bool) -> bool:
        """Apply a clear of every tier (SGLang), of only the device's pool (vLLM), or of the named medium (ATOM).

        vLLM sends a ``second`` clear in the same batch when it resets the blocks that it has moved to other tiers.
        Routers drop the blocks of all tiers at an AllBlocksCleared. So if blocks on other tiers stay live, kvbus sends
        removals in place of the clear.

        Args:
            medium: the index key of the medium that the clear names; None if it names none.
            second: whether the batch already had a clear without a medium.

        Returns:
            Whether every block that the engine was known to hold is gone.
        """
        cache, index = self._cache, self._cache.index
        cache.stream.media |= index.media_names
        if medium is None:
            emptied = second or self.empty
        else:  # a clear of another medium leaves the blocks on the device, so it never empties the cache
            emptied = medium == DEVICE_MEDIUM and not self.all_tiers and self.empty
        survive = self._survivors(medium, second=second)
        cache.left_out.keep(survive)
        cache.refused = {each for each in cache.refused if not emptied and each[0] in survive}
        if any(table.blocks for _, table in index.tables_on(survive)):
            self._remove_all(index.media_names - survive)
        else:
            self._clear()
        return emptied

    def _survivors(self, medium: str | None, *, second: bool) -> AbstractSet[str]:
        """Return the media whose blocks a clear does not remove.

        Args:
            medium: the index key of the medium that the clear names; None if it names none.
            second: whether the batch already had a clear without a medium.
        """
        cache = self._cache
        media = cache.index.media_names | cache.left_out.media | {each for each, _ in cache.refused}
        if medium is not None:
            return media - {medium}
        return {each for each in media if not self.all_tiers and (each == DEVICE_MEDIUM) == second}

    def _remove_all(self, media: AbstractSet[str]) -> None:
        """Remove all blocks on these media one by one, so that routers get removals in place of an AllBlocksCleared.

        The media are sorted, so that every process builds the same batch from the same record of the write-ahead log.
        """
        index = self._cache.index
        for key, table in index.tables_on(sorted(media)):
            table.copies.clear()
            for block in list(table.blocks):
                self._removals.remove_one(key, block)
        index.drop_empty(media)

    def _clear(self) -> None:
        """Remove all blocks from the index, and append an AllBlocksCleared to the outgoing events.

        Append none if the last outgoing event is an AllBlocksCleared already. Some routers need removals in place of
        the clear (:mod:`kvbus.core.outputs.fitting`). These removals name the blocks that routers held before the
        clear, so kvbus keeps the old index until the removals are built.
        """
        cache = self._cache
        last = Index()
        if cache.names_cleared:
            self._removals.put_back()
            last = cache.index.given_up()
        self._removals.drop()  # the clear replaces the queued removals
        if not (cache.leaving and isinstance(cache.leaving[-1], AllBlocksCleared)):
            cache.clear_leaves(lambda residencies="named": removals_of(last.filed(residencies)))
        cache.index.clear()
