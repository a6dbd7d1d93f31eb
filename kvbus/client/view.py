"""The live blocks of one stream, built from the stream's events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from msgspec import UNSET, UnsetType

from kvbus.client.prefix_index import Names, names_of
from kvbus.client.updates import Lost, Received, Restarted, Snapshot
from kvbus.core.types import DEVICE_MEDIUM, LOCAL, Hash, Reason, medium_key, printable
from kvbus.core.wire.codec import clears_all
from kvbus.core.wire.schema import AllBlocksCleared, Batch, BlockRemoved, BlockStored
from kvbus.core.wire.tokens import Token, count_tokens, decode_tokens, divide

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvbus.client.updates import Update
    from kvbus.core.wire.schema import Event

Key = tuple[int | None, int | None, str, Hash]
"""The key of a block: rank, group_idx, medium and hash.

One hash can be stored in several groups and on several media.
"""


_UNNAMED: Final[Mapping[Names, int]] = {(None, None): 1}


class _Tokens:
    """The tokens of one store event as raw msgpack. All blocks of the event share this object.

    The tokens are divided into blocks only when a block's tokens are first needed.

    Args:
        raw: the tokens as msgpack.
        size: number of tokens in a block.
        count: number of tokens in ``raw``.
        blocks: number of blocks of the store.
    """

    __slots__ = ("_parts", "_raw", "_size")

    def __init__(self, raw: bytes, size: int, count: int, blocks: int) -> None:
        self._size: Final = size
        # vLLM omits the hashes of masked blocks but sends their tokens. It is then unknown which tokens belong to which
        # block, so keep none.
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
        hash: the engine's hash of the block: an integer (signed or unsigned, 64 bits) or raw bytes.
        parent: the hash of the block before this one. It is None for the first block of a prompt, and if the engine
            sends no parent.
        rank: the data-parallel rank; None if the stream has no ranks.
        medium: the medium in upper case. Every name of the device becomes ``GPU``.
        group_idx: the KV-cache group of a hybrid model (vLLM 0.20 and later); None for other models.
        block_size: number of tokens in the block (token pairs with EAGLE); 0 if the publisher does not send it.
        lora: the name of the LoRA adapter, or its id from vLLM before 0.14; None for the base model.
        copies: number of copies that the view has counted; always 1 if the view does not count copies.
        residencies: number of copies under each locality and owner (vLLM 0.26 and 0.30). The block is live as long as
            one of them is left.
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
        "residencies",
    )

    def __init__(self, key: Key, event: BlockStored, tokens: _Tokens, index: int) -> None:
        self.rank, self.group_idx, self.medium, self.hash = key
        self.parent = event.block_hashes[index - 1] if index else _sent(event.parent_block_hash)
        self.block_size = event.block_size
        name = _sent(event.lora_name)
        self.lora: str | int | None = name if name is not None else _sent(event.lora_id)
        self.copies = 1
        names = names_of(event)
        self.residencies: Mapping[Names, int] = _UNNAMED if names == (None, None) else {names: 1}
        self._tokens = tokens
        self._index = index

    def __repr__(self) -> str:
        return f"<Block {printable(self.hash)} {self.medium} rank={self.rank} group={self.group_idx}>"

    @property
    def token_ids(self) -> list[Token] | None:
        """The token ids of the block (pairs with EAGLE).

        The list is empty if the block was announced without tokens. It is None if it is unknown which of the announced
        tokens belong to this block.
        """
        return self._tokens.of(self._index)

    def to_json(self) -> dict[str, Any]:
        """Return the block as values for JSON. A hash of raw bytes becomes a string of hex digits."""
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
    """A block has become live, or its tokens have become known."""

    block: Block


@dataclass(frozen=True, slots=True)
class Removed:
    """A block is no longer live, because its last copy was removed."""

    block: Block


@dataclass(frozen=True, slots=True)
class Cleared:
    """All blocks of the view were removed."""


Change = Stored | Removed | Cleared
"""A change of the live blocks. If you apply all changes in order to a set of blocks, it stays equal to the view."""


class BlockView:
    """The live blocks of one stream.

    Args:
        copies: whether to count the copies of a block. False is the rule of routers and right for outputs of kvbus: one
            removal ends a block, regardless of the number of stores. True is right for streams of engines: vLLM stores
            a hash once for each physical copy, and removes it equally often. (With ``kv_cache_report_mode=full`` True
            is wrong, because a cache hit is a store too.)
        on_lost: what happens when batches are lost. ``clear`` removes all blocks, because the lost batches may contain
            removals. ``keep`` keeps the blocks, although the view may be wrong.
        cleared: what an AllBlocksCleared without a medium removes. ``all`` removes all blocks, as routers and kvbus do.
            ``device`` removes the blocks on the device, as vLLM means it: offloaded blocks survive a reset of the
            prefix cache, and a second clear in the same batch removes them. An AllBlocksCleared with a medium removes
            the blocks on this medium.

    Attributes:
        refused: number of stores that were not applied because their tokens are too few or unreadable, by reason.
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
        """Return whether a block is live. ``block`` is a hash, which may be live under any key, or a complete `Key`."""
        return block in self._blocks if isinstance(block, tuple) else block in self._places

    def get(
        self, block: Hash, *, rank: int | None = None, medium: str | None = None, group_idx: int | None = None
    ) -> Block | None:
        """Return the block with exactly this key; None if it is not live.

        Without a medium, the key is that of the block on the device.
        """
        return self._blocks.get((rank, group_idx, _medium(medium), block))

    def keys(self) -> Iterator[Key]:
        """Return the keys of all live blocks."""
        return iter(self._blocks)

    def update(self, update: Update) -> list[Change]:
        """Apply an update of a `Subscriber`, and return the changes in order.

        A batch applies its events. A snapshot replaces all blocks. A restart of the publisher removes all blocks, and
        so does a loss of batches with ``on_lost="clear"``. Other updates change nothing.
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
        """Apply the events of a batch in order, and return the changes.

        The order matters, because one batch may remove and store the same hash. vLLM sends a second AllBlocksCleared in
        a batch to clear its offloaded blocks too, so it removes these blocks from the view.
        """
        changes: list[Change] = []
        cleared = False
        for event in batch.events:
            clears_everything = clears_all(event)
            if cleared and clears_everything:
                self._clear(batch.rank, changes, device=False)
            else:
                changes += self.apply(event, batch.rank)
                cleared = cleared or clears_everything
        return changes

    def apply(self, event: Event, rank: int | None = None) -> list[Change]:
        """Apply one event of a data-parallel rank, and return the changes."""
        changes: list[Change] = []
        if isinstance(event, BlockStored):
            self._store(event, rank, changes)
        elif isinstance(event, BlockRemoved):
            group, medium = _group(event.group_idx), _medium(event.medium)
            names = names_of(event)
            for block in event.block_hashes:
                self._remove((rank, group, medium, block), names, changes)
        elif isinstance(event, AllBlocksCleared):
            if clears_all(event):
                self._clear(rank, changes, device=True)
            else:
                medium = _medium(event.medium)
                for key in [key for key in self._blocks if (key[0], key[2]) == (rank, medium)]:
                    self._drop(key, changes)
        return changes

    def clear(self) -> list[Change]:
        """Remove every block of every rank."""
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
            # Too few tokens are an error. Too many are not, because vLLM omits the hashes of masked blocks but sends
            # their tokens.
            count = Reason.TOKEN_COUNT
        if isinstance(count, Reason):
            self.refused[count] += 1
            return
        group, medium, names = _group(event.group_idx), _medium(event.medium), names_of(event)
        tokens = _Tokens(raw, event.block_size, count, len(hashes))
        for index, block in enumerate(hashes):
            key = (rank, group, medium, block)
            known = self._blocks.get(key)
            if known is None:
                made = self._blocks[key] = Block(key, event, tokens, index)
                changes.append(Stored(made))
                self._places[block] = self._places.get(block, 0) + 1
                continue
            held = known.residencies.get(names, 0)
            if self._copies or not held:
                known.residencies = {**known.residencies, names: held + 1}
                known.copies += self._copies
            # An offloaded block may first be announced without tokens. If a later store has its tokens, replace the
            # block.
            if tokens and not known._tokens:  # noqa: SLF001
                better = Block(key, event, tokens, index)
                better.copies, better.residencies = known.copies, known.residencies
                self._blocks[key] = better
                changes.append(Stored(better))

    def _remove(self, key: Key, names: Names, changes: list[Change]) -> None:
        known = self._blocks.get(key)
        if known is None:
            return
        held = known.residencies
        if names not in held and names[0] in {None, LOCAL}:
            # As in kvbus, a missing locality and LOCAL stand for each other if only one of the two has the block.
            names = (None if names[0] else LOCAL, names[1])
        if names not in held:
            return
        left = {each: count - (each == names) for each, count in held.items()}
        left = {each: count for each, count in left.items() if count}
        if not left:
            self._drop(key, changes)
            return
        known.residencies = left
        known.copies -= self._copies

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
    # Keep the name of an unknown medium, so that its blocks still reach routers.
    return medium_key(name) or str(name).upper()


def _group(group: int | UnsetType | None) -> int | None:
    return None if group is UNSET else group
