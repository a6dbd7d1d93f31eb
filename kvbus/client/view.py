"""The live blocks of one stream, built from its events."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from msgspec import UNSET, UnsetType

from kvbus.client.updates import Lost, Received, Restarted, Snapshot
from kvbus.core.types import DEVICE_MEDIUM, Hash, Reason, medium_key, printable
from kvbus.core.wire.codec import clears_all
from kvbus.core.wire.schema import AllBlocksCleared, Batch, BlockRemoved, BlockStored
from kvbus.core.wire.tokens import Token, count_tokens, decode_tokens, divide

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvbus.client.updates import Update
    from kvbus.core.wire.schema import Event

Key = tuple[int | None, int | None, str, Hash]
"""(rank, group_idx, medium, hash): the same hash can be stored in several groups and on several media at once."""


class _Tokens:
    """The tokens of one store event as raw msgpack. Its blocks share them. They are divided when first needed."""

    __slots__ = ("_parts", "_raw", "_size")

    def __init__(self, raw: bytes, size: int, count: int, blocks: int) -> None:
        self._size: Final = size
        # vLLM omits the hashes of masked blocks but sends their tokens: the tokens of a single block are then unknown.
        self._raw = raw if count == size * blocks else b""
        self._parts: list[bytes] | None = [] if count else None

    def __bool__(self) -> bool:
        return self._parts is not None

    def of(self, index: int) -> list[Token] | None:
        if self._parts is None:
            return []
        raw = self._raw
        if raw:
            self._parts = divide(raw, self._size)
            self._raw = b""
        if not self._parts:
            return None
        tokens = decode_tokens(self._parts[index])
        return None if isinstance(tokens, Reason) else tokens


class Block:
    """One live block: ``block_size`` tokens on one medium, in one KV-cache group, on one data-parallel rank.

    Attributes:
        hash: the engine's name for the block, an integer (signed or unsigned 64 bits) or raw bytes.
        parent: hash of the block before it; None at the root, or if the engine does not say.
        rank: data-parallel rank; None if the stream carries none.
        medium: upper-case medium, every device name as ``GPU``.
        group_idx: KV-cache group of a hybrid model (vLLM 0.20 and later), else None.
        block_size: tokens in the block (token pairs with EAGLE); 0 from publishers that do not say.
        lora: adapter name, or its id from vLLM before 0.14; None for the base model.
        copies: physical copies counted so far; always 1 in a view that does not count.
    """

    __slots__ = (
        "_index",
        "_tokens",
        "block_size",
        "copies",
        "group_idx",
        "hash",
        "lora",
        "medium",
        "parent",
        "rank",
    )

    def __init__(self, key: Key, event: BlockStored, tokens: _Tokens, index: int) -> None:
        self.rank, self.group_idx, self.medium, self.hash = key
        self.parent = event.block_hashes[index - 1] if index else _sent(event.parent_block_hash)
        self.block_size = event.block_size
        name = _sent(event.lora_name)
        self.lora: str | int | None = name if name is not None else _sent(event.lora_id)
        self.copies = 1
        self._tokens = tokens
        self._index = index

    def __repr__(self) -> str:
        return f"<Block {printable(self.hash)} {self.medium} rank={self.rank} group={self.group_idx}>"

    @property
    def token_ids(self) -> list[Token] | None:
        """The block's tokens (pairs with EAGLE); empty for a placeholder, None if they are unknown."""
        return self._tokens.of(self._index)

    def to_json(self) -> dict[str, Any]:
        """Return the block as plain values; byte hashes become hex strings."""
        return {
            "rank": self.rank,
            "hash": printable(self.hash),
            "parent": printable(self.parent),
            "medium": self.medium,
            "group_idx": self.group_idx,
            "block_size": self.block_size,
            "token_ids": self.token_ids,
            "copies": self.copies,
        }


@dataclass(frozen=True, slots=True)
class Stored:
    """A block became live, or its tokens became known."""

    block: Block


@dataclass(frozen=True, slots=True)
class Removed:
    """A block is no longer live: its last copy was removed."""

    block: Block


@dataclass(frozen=True, slots=True)
class Cleared:
    """All blocks were dropped."""


Change = Stored | Removed | Cleared
"""A change of the live blocks. A set to which the changes are applied in order stays equal to the view."""


class BlockView:
    """The live blocks of one stream.

    Args:
        copies: False follows the rule of routers, right for kvbus's output: the first store stores, one removal
            removes. True counts copies, right for an engine's own stream: vLLM stores a hash once per physical copy and
            removes it as often (not with ``kv_cache_report_mode=full``, where a cache hit is a store too).
        on_lost: ``clear`` drops all blocks when batches are lost, because removals may be among them; ``keep`` keeps a
            view that may be wrong.
        cleared: what AllBlocksCleared drops if it names no medium: ``all`` is the rule of routers and kvbus, ``device``
            is vLLM's (its offloaded blocks survive a reset of the prefix cache, and are deleted by a second clear in
            the same batch). An AllBlocksCleared that names a medium drops the blocks on this medium.

    Attributes:
        refused: number of stores that were not applied because they have too few tokens or unreadable ones, by reason.
    """

    def __init__(
        self,
        *,
        copies: bool = False,
        on_lost: Literal["clear", "keep"] = "clear",
        cleared: Literal["all", "device"] = "all",
    ) -> None:
        self._copies = copies
        self._on_lost = on_lost
        self._cleared = cleared
        self.refused: Final[Counter[Reason]] = Counter()
        self._blocks: dict[Key, Block] = {}
        self._places: dict[Hash, int] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks.values())

    def __contains__(self, block: object) -> bool:
        """Return whether a hash is live under any key, or a complete `Key` is live."""
        return block in self._blocks if isinstance(block, tuple) else block in self._places

    def get(
        self, block: Hash, *, rank: int | None = None, medium: str | None = None, group_idx: int | None = None
    ) -> Block | None:
        """Return the block under exactly this key, or None. Without a medium the key is the device's."""
        return self._blocks.get((rank, group_idx, _medium(medium), block))

    def keys(self) -> Iterator[Key]:
        """Return all live keys."""
        return iter(self._blocks)

    def update(self, update: Update) -> list[Change]:
        """Apply an update of a `Subscriber`. Return the changes in order.

        A batch applies its events. A snapshot replaces everything. A restart clears the view, and so does a loss
        (`on_lost`).
        """
        if isinstance(update, Received):
            return self.apply_batch(update.batch)
        changes: list[Change] = []
        if isinstance(update, Snapshot):
            changes += self.clear()
            for batch in update.batches:
                changes += self.apply_batch(batch)
        elif isinstance(update, Restarted) or (isinstance(update, Lost) and self._on_lost == "clear"):
            changes += self.clear()
        return changes

    def apply_batch(self, batch: Batch) -> list[Change]:
        """Apply a batch's events in order, because one batch may remove and store the same hash.

        A second AllBlocksCleared in a batch drops the offloaded blocks, as vLLM means it.
        """
        changes: list[Change] = []
        cleared = False
        for event in batch.events:
            whole = clears_all(event)
            if cleared and whole:
                self._clear(batch.rank, changes, device=False)
            else:
                changes += self.apply(event, batch.rank)
                cleared = cleared or whole
        return changes

    def apply(self, event: Event, rank: int | None = None) -> list[Change]:
        """Apply one event of this data-parallel rank."""
        changes: list[Change] = []
        if isinstance(event, BlockStored):
            self._store(event, rank, changes)
        elif isinstance(event, BlockRemoved):
            group, medium = _group(event.group_idx), _medium(event.medium)
            for block in event.block_hashes:
                self._remove((rank, group, medium, block), changes)
        elif isinstance(event, AllBlocksCleared):
            if clears_all(event):
                self._clear(rank, changes, device=True)
            else:
                medium = _medium(event.medium)
                for key in [key for key in self._blocks if (key[0], key[2]) == (rank, medium)]:
                    self._drop(key, changes)
        return changes

    def clear(self) -> list[Change]:
        """Drop every block of every rank."""
        changes: list[Change] = [Cleared()] if self._blocks else []
        self._blocks.clear()
        self._places.clear()
        return changes

    def _clear(self, rank: int | None, changes: list[Change], *, device: bool) -> None:
        for key in [key for key in self._blocks if key[0] == rank]:
            if self._cleared == "all" or (key[2] == DEVICE_MEDIUM) == device:
                self._drop(key, changes)

    def _store(self, event: BlockStored, rank: int | None, changes: list[Change]) -> None:
        hashes = event.block_hashes
        raw = bytes(event.token_ids)
        count = count_tokens(raw)
        if not isinstance(count, Reason) and 0 < count < event.block_size * len(hashes):
            # More tokens are right: vLLM omits the hashes of masked blocks.
            count = Reason.TOKEN_COUNT
        if isinstance(count, Reason):
            self.refused[count] += 1
            return
        group, medium = _group(event.group_idx), _medium(event.medium)
        tokens = _Tokens(raw, event.block_size, count, len(hashes))
        for index, block in enumerate(hashes):
            key = (rank, group, medium, block)
            known = self._blocks.get(key)
            if known is None:
                made = self._blocks[key] = Block(key, event, tokens, index)
                changes.append(Stored(made))
                self._places[block] = self._places.get(block, 0) + 1
                continue
            if self._copies:
                known.copies += 1
            # An offloaded block may first be announced without tokens. Replace it by the block with tokens.
            if tokens and not known._tokens:  # noqa: SLF001
                better = Block(key, event, tokens, index)
                better.copies = known.copies
                self._blocks[key] = better
                changes.append(Stored(better))

    def _remove(self, key: Key, changes: list[Change]) -> None:
        known = self._blocks.get(key)
        if known is None:
            return
        if self._copies and known.copies > 1:
            known.copies -= 1
            return
        self._drop(key, changes)

    def _drop(self, key: Key, changes: list[Change]) -> None:
        changes.append(Removed(self._blocks.pop(key)))
        block = key[3]
        left = self._places[block] - 1
        if left:
            self._places[block] = left
        else:
            del self._places[block]


def _sent(value: Any) -> Any:
    return None if value is UNSET else value


def _medium(name: str | UnsetType | None) -> str:
    # A block on a medium that this version does not know must still reach routers.
    return medium_key(name) or str(name).upper()


def _group(group: int | UnsetType | None) -> int | None:
    return None if group is UNSET else group
