"""What an AllBlocksCleared clears, and which blocks it leaves in the cache.

SGLang's clears every tier, vLLM's the device alone. The operator says which of the two an engine means, or the stream
shows it.
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
    """Applies the clears of one source."""

    def __init__(self, cache: EngineCache, removals: Removals) -> None:
        self._cache = cache
        self._removals = removals

    @property
    def all_tiers(self) -> bool:
        """Whether AllBlocksCleared clears every tier: the operator's choice, or else what the stream has shown."""
        rule = self._cache.spec.clears
        return self._cache.stream.clears_all_tiers if rule == "auto" else rule == "all"

    @property
    def empty(self) -> bool:
        """Whether AllBlocksCleared leaves nothing in the engine.

        It leaves nothing if it clears every tier, or if the stream has never named a tier but the device.
        """
        return self.all_tiers or self._cache.media <= {DEVICE_MEDIUM}

    def take_for_empty(self) -> bool:
        """End the unknown beginning of an epoch, after a clear that left nothing; return whether that is certain."""
        self._cache.stream.presumed = not self.all_tiers
        return self.all_tiers

    @property
    def tiers_unknown(self) -> bool:
        """Whether the stream has named a tier after a clear that kvbus took for one of everything.

        Nobody knows what that tier held at the clear.
        """
        return self._cache.stream.presumed and not self.empty

    def apply(self, medium: str | None, *, second: bool) -> bool:
        """Apply a clear of every tier (SGLang), of the device pool alone (vLLM), or of one medium (ATOM).

        vLLM resets the blocks that its pool has moved to other tiers by a ``second`` clear in the same batch. If blocks
        on other tiers stay live, a clear leaves as removals, because to routers AllBlocksCleared means everything.

        Args:
            medium: the index key of the medium that the clear names; None if it names none.
            second: it is not the first clear of its batch without a medium.

        Returns:
            Whether everything the engine is known to have is gone.
        """
        cache, index = self._cache, self._cache.index
        cache.stream.media |= index.media_names
        if medium is None:
            emptied = second or self.empty
        else:  # an engine always has a device, so the clear of another medium never empties it
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
        """Return the media whose blocks a clear leaves."""
        cache = self._cache
        media = cache.index.media_names | cache.left_out.media | {each for each, _ in cache.refused}
        if medium is not None:
            return media - {medium}
        return {each for each in media if not self.all_tiers and (each == DEVICE_MEDIUM) == second}

    def _remove_all(self, media: AbstractSet[str]) -> None:
        """Remove all blocks on these media one by one."""
        index = self._cache.index
        for key, table in index.tables_on(media):
            table.copies.clear()
            for block in list(table.blocks):
                self._removals.remove_one(key, block)
        index.drop_empty(media)

    def _clear(self) -> None:
        """Forget all blocks, and tell routers to do so, unless they were just told."""
        cache = self._cache
        last = Index()
        if cache.names_cleared:
            self._removals.put_back()
            last = cache.index.given_up()
        self._removals.drop()  # the clear says that, too
        if not (cache.leaving and isinstance(cache.leaving[-1], AllBlocksCleared)):
            cache.clear_leaves(lambda: removals_of(last))
        cache.index.clear()
