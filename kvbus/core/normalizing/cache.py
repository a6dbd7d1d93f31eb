"""The cache of one engine as its stream describes it, and the outgoing events of the current batch.

The handlers of stores, removals, clears and reblocking share one :class:`EngineCache`. It holds data and counts, and
makes no decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from kvbus.core.blocks.index import MERGED, Index
from kvbus.core.normalizing.block_size import BlockSizes
from kvbus.core.normalizing.copies import Copies
from kvbus.core.normalizing.left_out import SuppressedBlocks
from kvbus.core.source_spec import SourceSpec
from kvbus.core.stats import SourceStats
from kvbus.core.types import UNKNOWN_MEDIUM, Filtered, Reason, Residencies
from kvbus.core.wire.codec import AnyEvent
from kvbus.core.wire.schema import AllBlocksCleared

MAX_OWNER_CHARS: Final = 256
"""Maximum length of a locality or owner, in characters. kvbus refuses a store with a longer one."""


class Stream:
    """What an engine's stream has shown about the engine in this epoch, except its blocks.

    Attributes:
        hash_kind: the kind of hash (integer or byte string) that most stores have had.
        lead: number of stores with this kind of hash beyond the number of stores with the other kind.
        groups: the groups with at least one store.
        owners: the pairs of locality and owner with at least one store, without the pair of two missing names.
        no_prefix: the groups whose blocks a router cannot match with a prompt's prefix (sliding window, chunked local,
            mamba).
        media: the media that events have named.
        sizes: the block sizes, by group.
        clears_all_tiers: whether AllBlocksCleared applies to every memory tier, and not only to the device.
        presumed: whether kvbus presumed that a clear emptied every tier, because events had named only the device.
            Batches missing before the clear do not matter for an empty cache, so kvbus stopped reporting them.
    """

    def __init__(self, sizes: BlockSizes) -> None:
        self.hash_kind: type = int
        self.lead = 0
        self.groups: set[int | None] = set()
        self.owners: set[tuple[str | None, str | None]] = set()
        self.no_prefix: set[int | None] = set()
        self.media: set[str] = set()
        self.sizes = sizes
        self.clears_all_tiers = False
        self.presumed = False

    def knows(self, group: int | None, max_groups: int) -> bool:
        """Return whether a group is one of the groups that kvbus remembers for this source.

        Remember a new group if there are fewer than ``max_groups`` groups.
        """
        if group not in self.groups and len(self.groups) < max_groups:
            self.groups.add(group)
        return group in self.groups

    def knows_owner(self, locality: str | None, owner: str | None, max_owners: int) -> bool:
        """Return whether a locality and an owner are one of the pairs that kvbus remembers for this source.

        Remember a new pair if there are fewer than ``max_owners`` pairs and its names are short.
        """
        pair = (locality, owner)
        if pair == (None, None) or pair in self.owners:
            return True
        if len(self.owners) >= max_owners or max(len(locality or ""), len(owner or "")) > MAX_OWNER_CHARS:
            return False
        self.owners.add(pair)
        return True

    def takes(self, kind: type) -> bool:
        """Count a store with this kind of hash. Return whether most stores of the stream have had this kind.

        So a single store with the wrong kind of hash does not make kvbus refuse the later stores.
        """
        if kind is not self.hash_kind and self.lead:
            self.lead -= 1
            return not self.lead
        self.hash_kind = kind
        self.lead += 1
        return True


class EngineCache:
    """The cache of one source's engine, as kvbus knows it.

    Args:
        spec: the configuration of the source.
        stats: the counters of the source.
        index: the live blocks, as routers know them.
        stream: what the engine's stream has shown in the current epoch.

    Attributes:
        copies: the counter of copies that blocks have besides the first one.
        left_out: the blocks in the engine's cache that routers do not get.
        refused: medium and reason of each store that was refused. They are kept until the medium is cleared.
        leaving: the events to send for the current batch, in order. ``Removals`` adds its removals only before a store
            or at the end of the batch.
        filed: the same events for routers that take some residencies of a block for one (module ``filing``), by the
            way in which they distinguish residencies. It is empty if the engine has named no locality and no owner.
        cleared: for each AllBlocksCleared in ``leaving``, a function that builds removals of the cleared blocks, as
            routers file them.
        names_cleared: whether some output sends removals in place of an AllBlocksCleared.
    """

    def __init__(self, spec: SourceSpec, stats: SourceStats, index: Index, stream: Stream) -> None:
        self.spec = spec
        self.stats = stats
        self.index = index
        self.stream = stream
        self.copies = Copies(spec.duplicates, stats)
        self.left_out = SuppressedBlocks(stats, self.copies)
        self.refused: set[tuple[str, str]] = set()
        self.leaving: list[AnyEvent] = []
        self.filed: dict[Residencies, list[AnyEvent]] = {}
        self.cleared: list[Callable[..., Sequence[AnyEvent]]] = []
        self.names_cleared = False

    @property
    def media(self) -> set[str]:
        """The media that the engine has named in this epoch."""
        return self.stream.media | self.index.media_names

    @property
    def entries(self) -> int:
        """Number of blocks that kvbus remembers for this source: live blocks, and blocks that routers do not get."""
        return self.index.blocks + len(self.left_out)

    @property
    def bytes(self) -> int:
        """Approximate memory that the remembered blocks of this source need, in bytes."""
        return self.index.bytes + self.left_out.bytes

    def begin_filing(self) -> None:
        """Begin the events of a new batch for routers that take some residencies of a block for one."""
        self.filed.update((residencies, []) for residencies in MERGED)

    def refuse(self, reason: Reason, medium: str = UNKNOWN_MEDIUM) -> None:
        """Count a refused store. It makes the source partial: the engine holds blocks that the index lacks."""
        self.stats.rejected[reason] += 1
        self.refused.add((medium, reason))

    def note(self, reason: Filtered, medium: str) -> None:
        """Count a store whose blocks have no known tokens.

        With the reason ``TOKENLESS``, no router gets its blocks. With ``HASH_ONLY``, only routers that compute no
        hashes from tokens get them.
        """
        self.stats.filtered[reason] += 1
        self.refused.add((medium, reason))

    def has_room(self, blocks: int, size: int) -> bool:
        """Return whether the limits of the index allow to add ``blocks`` blocks, of ``size`` bytes in total.

        If not, count the refusal.
        """
        if self.fits(blocks, size):
            return True
        self.stats.rejected[Reason.INDEX_FULL] += 1
        return False

    def fits(self, blocks: int, size: int) -> bool:
        """Return whether the limits of the index allow to add ``blocks`` blocks, of ``size`` bytes in total."""
        index, left_out, spec = self.index, self.left_out, self.spec
        return (
            index.blocks + left_out.coarse_blocks + left_out.tails.blocks + blocks <= spec.max_blocks
            and index.bytes + left_out.bytes + size <= spec.max_index_bytes
        )

    def clear_leaves(self, removals: Callable[..., Sequence[AnyEvent]]) -> None:
        """Append an AllBlocksCleared to the outgoing events.

        ``removals`` is a function that builds removals of the cleared blocks, for outputs that send removals in place
        of a clear. Its argument says how the routers distinguish residencies.
        """
        for events in (self.leaving, *self.filed.values()):
            events.append(AllBlocksCleared())
        if self.names_cleared:
            self.cleared.append(removals)

    def dump(self) -> dict[str, Any]:
        """Return what kvbus has learned about this cache, such as block sizes, as plain data.

        A new process can load the data. They do not contain the blocks.
        """
        stream = self.stream
        hash_kinds = [stream.lead, 0] if stream.hash_kind is int else [0, stream.lead]
        return {
            "granularity": stream.sizes.dump(),
            "coarse": [
                [*key, block, copies] for key, table in self.left_out.coarse.items() for block, copies in table.items()
            ],
            "intake": [hash_kinds, list(stream.no_prefix), list(stream.groups), list(stream.owners)],
            "clears_all_tiers": stream.clears_all_tiers,
            "media": sorted(self.media),
            "presumed": stream.presumed,
            "refused": sorted(self.refused),
        }

    def load(self, data: dict[str, Any]) -> None:
        """Restore what kvbus has learned about this cache from ``data``, the result of :meth:`dump`.

        The caller restores the blocks of the index and the tail blocks.
        """
        stream = self.stream
        stream.sizes.load(data["granularity"])
        for group, medium, locality, owner, block, copies in data["coarse"]:
            self.left_out.add_coarse((group, medium, locality, owner), block, copies)
        (integers, byte_strings), no_prefix, groups, owners = data["intake"]
        stream.hash_kind, stream.lead = (bytes, byte_strings) if byte_strings else (int, integers)
        stream.no_prefix.update(no_prefix)
        stream.groups.update(groups)
        stream.owners.update((locality, owner) for locality, owner in owners)
        stream.clears_all_tiers = data["clears_all_tiers"]
        stream.media |= set(data["media"])
        stream.presumed = data["presumed"]
        self.refused.update((medium, reason) for medium, reason in data["refused"])
