"""The lanes of one source: what holds for all stores of one residency, as the engine spells them.

Group, medium, locality, owner, kind and a few more fields of a store repeat from store to store. Everything that
follows from them alone is decided when the lane is opened, and not for each store: the table of the index, whether
routers get the blocks, and the fields that all chunks of the lane share. Block sizes are learned, so a lane also says
which stores teach nothing new (:attr:`Lane.size`).
"""

from __future__ import annotations

from typing import Any, Final

from msgspec import UNSET, structs

from kvbus.core.blocks.chunk import Meta, meta_of
from kvbus.core.blocks.index import MAX_SHARED, TableKey
from kvbus.core.normalizing.cache import EngineCache
from kvbus.core.types import PREFIX_KINDS, UNKNOWN_MEDIUM, Filtered, Reason, medium_key
from kvbus.core.wire.carried import odd_fields, text_of
from kvbus.core.wire.schema import BlockRemoved, BlockStored

MAX_LANES: Final = 1024
"""Maximum number of lanes of a source. If there are more, all lanes are opened again when their next stores come."""


class Lane:
    """One residency (group, medium, locality and owner), as the engine spells it in its stores.

    Attributes:
        key: the key of the table that holds the blocks.
        medium: the name of the medium as routers get it.
        unwanted: the reason for which kvbus leaves out all stores of the lane; None if it does not.
        beyond: the reason for which kvbus refuses all stores of the lane, because their group or owner is beyond a
            limit (``max_groups``, ``max_owners``); None if it does not.
        has_usual: whether a store of the lane may be a usual one. It may not if its medium is unknown, if a limit is
            reached, or if routers cannot read a field that the lane's stores share.
        size: the block size of the lane's usual stores: stores that teach kvbus nothing about block sizes, and whose
            blocks are sent unchanged. It is 0 while every store of the lane may teach something.
        most: maximum number of blocks of a usual store.
        meta: the shared fields of usual stores that name no adapter, salt or session.
    """

    __slots__ = ("beyond", "has_usual", "key", "medium", "meta", "most", "size", "unwanted")

    def __init__(
        self, key: TableKey, meta: Meta, unwanted: Filtered | None, beyond: Reason | None, *, has_usual: bool
    ) -> None:
        self.key = key
        self.medium = meta.medium
        self.unwanted = unwanted
        self.beyond = beyond
        self.has_usual = has_usual
        self.size = self.most = 0
        self.meta = meta


class Lanes:
    """The lanes of one source, and the tables that its removals name."""

    def __init__(self, cache: EngineCache) -> None:
        self._cache = cache
        self.opened: dict[tuple[Any, ...], Lane] = {}
        """The open lanes, by the fields of :func:`lane_name`."""
        self._settled: dict[int | None, list[Lane]] = {}
        """The lanes of each group that have usual stores (:attr:`Lane.size`)."""
        self.removals: dict[tuple[Any, Any], TableKey] = {}
        """The key of the table that a removal means, by the removal's medium and group as the engine spells them.

        Only removals that name no locality and no owner are listed.
        """

    def of(self, event: BlockStored) -> Lane:
        """Return the lane of a store. If it is not open, open it."""
        name = lane_name(event)
        return self.opened.get(name) or self._open(name, event)

    def table_of(self, event: BlockRemoved) -> TableKey:
        """Return the key of the table that a removal names, and remember that the engine uses its medium."""
        key = self._key(event)
        sent: Any = event  # typed as Any: fields declared as Raw are UNSET if the engine left them out
        if len(self.removals) >= MAX_LANES:
            self.removals.clear()
        if key[1] != UNKNOWN_MEDIUM and sent.locality is sent.ownership is UNSET:
            self.removals[event.medium, event.group_idx] = key
        return key

    def _open(self, name: tuple[Any, ...], event: BlockStored) -> Lane:
        cache = self._cache
        key = self._key(event)
        beyond = None if cache.stream.knows(key[0], cache.spec.max_groups) else Reason.TOO_MANY_GROUPS
        unwanted = None
        kind = event.kv_cache_spec_kind
        if key[1] in cache.spec.without_media:
            unwanted = Filtered.MEDIUM
        elif cache.spec.groups == "prefix" and isinstance(kind, str) and kind not in PREFIX_KINDS:
            unwanted = Filtered.GROUP
            if beyond is None:
                cache.stream.no_prefix.add(key[0])
        elif beyond is None and not cache.stream.knows_owner(*key[2:], cache.spec.max_owners):
            beyond = Reason.TOO_MANY_OWNERS
        kept = sum(len(each) for each in name if isinstance(each, str | bytes)) <= MAX_SHARED
        usual = kept and beyond is None and key[1] != UNKNOWN_MEDIUM
        usual = usual and not odd_fields(event, ("locality", "ownership"))
        lane = Lane(key, meta_of(event), unwanted, beyond, has_usual=usual)
        if kept:
            if len(self.opened) >= MAX_LANES:
                for group in self._settled:
                    self._unsettle(group)
                self.opened.clear()
            self.opened[name] = lane
        return lane

    def _key(self, event: BlockStored | BlockRemoved) -> TableKey:
        """Return the key of the table that an event names, and remember that the engine uses its medium."""
        group = None if event.group_idx is UNSET else event.group_idx
        return group, self._note_medium(event.medium), text_of(event.locality), text_of(event.ownership)

    def _note_medium(self, medium: Any) -> str:
        """Remember that the engine uses a medium, unless the operator excludes it. Return the medium's index key."""
        key = medium_key(medium) or UNKNOWN_MEDIUM
        if key not in self._cache.spec.without_media:
            self._cache.stream.media.add(key)
        return key

    def learn(self, lane: Lane, size: int, blocks: int, *, tokens: bool) -> None:
        """Learn block sizes from a store of a lane. Decide again which stores of the group's lanes are usual.

        Args:
            lane: the lane of the store.
            size: the block size of the store.
            blocks: the number of blocks whose tokens the store has.
            tokens: whether the store has exactly the tokens of its blocks.
        """
        sizes, (group, medium, _, _) = self._cache.stream.sizes, lane.key
        settled = self._settled.setdefault(group, [])
        before = sizes.groups[group].detector.steady if settled else None
        sizes.observe(group, medium, size, blocks, tokens=tokens)
        if settled and sizes.groups[group].detector.steady != before:
            self._unsettle(group)
        most = sizes.groups[group].usual(medium, size) if tokens and lane.has_usual and not lane.most else 0
        if most:
            settled.append(lane)
            lane.size, lane.most = size, most
            lane.meta = self._cache.index.shared(
                structs.replace(
                    lane.meta,
                    block_size=size,
                    lora_id=None,
                    lora_name=None,
                    session_id=None,
                    cache_salt=None,
                    lookahead=None,
                )
            )

    def _unsettle(self, group: int | None) -> None:
        """Record that every store of a group may teach something about block sizes."""
        for lane in self._settled[group]:
            lane.size = lane.most = 0
        self._settled[group].clear()


def lane_name(event: BlockStored) -> tuple[Any, ...]:
    """Return the fields by which the lane of a store is found, as the engine spells them."""
    shared: Any = event  # typed as Any: fields declared as Raw are UNSET if the engine left them out
    name = (event.group_idx, event.medium, event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window)
    if shared.locality is shared.ownership is UNSET:
        return name
    return (*name, *(each if each is UNSET else bytes(each) for each in (shared.locality, shared.ownership)))
