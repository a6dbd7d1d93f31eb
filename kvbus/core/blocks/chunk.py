"""A chunk holds the blocks of one store event.

Fields of the event whose values most stores have in common, such as the medium, are in a :class:`Meta` object. Many
chunks share one such object.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw, UnsetType

from kvbus.core.types import Hash
from kvbus.core.wire.schema import BlockStored
from kvbus.core.wire.tokens import decode_tokens, slice_array

NULL: Final = b"\xc0"
"""A msgpack null."""

ITEM_BYTES: Final = 140
"""Number of bytes that kvbus assumes for a chunk, and the same number for each of the chunk's blocks.

They are the memory of the Python objects, the hash and a table entry.
"""


class Meta(msgspec.Struct, frozen=True, gc=False):
    """The fields of a store that are usually equal in many stores, such as medium and adapter.

    Chunks with equal fields share one object. If the texts among the fields are too long, the object is not shared.
    ``weight`` is then the total length of these texts in bytes; otherwise it is 0.
    """

    block_size: int
    lora_id: int | None
    lora_name: str | None
    medium: str | None
    group_idx: Any
    kind: Any
    window: Any
    locality: bytes | None = None
    ownership: bytes | None = None
    session_id: bytes | None = None
    cache_salt: bytes | None = None
    lookahead: bytes | None = None
    weight: int = 0


class Rest(msgspec.Struct, gc=False):
    """The fields of a chunk that few chunks need.

    ``extras`` are fields of the store that the struct BlockStored does not define. The class :class:`Chunk` explains
    the other fields.
    """

    extras: dict[str, bytes] | None = None
    derived: list[Hash] | None = None
    out_parent: Hash | None = None


class Chunk(msgspec.Struct, gc=False):
    """The blocks of one store event.

    ``tokens`` is a msgpack array with ``len(hashes) * block_size`` items. It is empty if the tokens are unknown.
    ``derived`` holds the derived hashes of a reblocked chunk: for each block, one hash for each of its sub-blocks. It
    is None if routers get the blocks unchanged. ``out_parent`` is the hash by which routers know the parent of the
    first sub-block. Only reblocked chunks have it. ``live`` is the number of the chunk's blocks that are live in an
    index.
    """

    hashes: tuple[Hash, ...]
    parent: Hash | None
    tokens: bytes
    meta: Meta
    extra_keys: bytes | None = None
    rest: Rest | None = None
    live: int = 0

    @property
    def block_size(self) -> int:
        """Number of tokens in each block, as the engine announced it."""
        return self.meta.block_size

    @property
    def extras(self) -> dict[str, bytes] | None:
        """Fields of the store that the struct BlockStored does not define, as raw msgpack; None if there are none."""
        return None if self.rest is None else self.rest.extras

    @property
    def derived(self) -> list[Hash] | None:
        """The derived hashes of the sub-blocks; None if routers get the blocks unchanged."""
        return None if self.rest is None else self.rest.derived

    @property
    def out_parent(self) -> Hash | None:
        """The hash by which routers know the parent of the first sub-block.

        It is None if the first sub-block has no parent. It is also None if the chunk is not reblocked: the chunk then
        has no sub-blocks, and routers know its blocks by the engine's hashes.
        """
        return None if self.rest is None else self.rest.out_parent

    @property
    def hash_only(self) -> bool:
        """Whether the engine announced the blocks without tokens.

        ``tokens`` is then an empty msgpack array of one byte.
        """
        return len(self.tokens) == 1

    @property
    def memory(self) -> int:
        """Approximate memory of this chunk, in bytes."""
        count: int = ITEM_BYTES * (1 + len(self.hashes)) + len(self.tokens)
        if self.extra_keys is not None:
            count += len(self.extra_keys)
        if self.rest is not None:
            count += self.meta.weight
            count += ITEM_BYTES * len(self.derived or ())
            count += sum(len(name) + len(value) for name, value in (self.extras or {}).items())
        return count

    def reblock_into(self, derived: list[Hash] | None, out_parent: Hash | None) -> None:
        """Set the derived hashes under which routers get the chunk's blocks from now on.

        If ``derived`` is None, routers get the blocks unchanged. ``out_parent`` is the hash by which routers know the
        parent of the first sub-block.
        """
        if derived is not None or self.rest is not None:
            self.rest = Rest(self.extras, derived, out_parent)

    def parent_of(self, i: int) -> Hash | None:
        """Return the engine's hash for the parent of block ``i`` of this chunk; None if the block has no parent."""
        return self.hashes[i - 1] if i else self.parent

    def reblocked(self) -> tuple[list[Hash], int]:
        """Return the derived hashes of this chunk, and the number of sub-blocks in each block of the engine.

        If the chunk is not reblocked, there are no derived hashes, and the number is 0.
        """
        derived = self.derived or []
        return derived, len(derived) // len(self.hashes)

    def token_list(self) -> list[Any]:
        """Return the tokens of all blocks as a list. Each call decodes the msgpack array again."""
        tokens = decode_tokens(self.tokens)
        if not isinstance(tokens, list):  # pragma: no cover - only validated tokens are ever stored
            raise TypeError(tokens)
        return tokens

    def tokens_of(self, a: int, b: int) -> bytes:
        """Return the tokens of blocks ``[a, b)`` as a msgpack array."""
        if self.hash_only:
            return self.tokens
        size = self.meta.block_size
        return slice_array(self.tokens, a * size, b * size)


def meta_of(event: BlockStored) -> Meta:
    """Return the fields of a store that it may have in common with other stores. The medium is in upper case."""
    return Meta(
        event.block_size,
        None if isinstance(event.lora_id, UnsetType) else event.lora_id,
        None if isinstance(event.lora_name, UnsetType) else event.lora_name,
        None if isinstance(event.medium, UnsetType) or event.medium is None else event.medium.upper(),
        event.group_idx,
        event.kv_cache_spec_kind,
        event.kv_cache_spec_sliding_window,
        carried_bytes(event.locality),
        carried_bytes(event.ownership),
        carried_bytes(event.session_id),
        carried_bytes(event.cache_salt),
        carried_bytes(event.lookahead_token_ids),
    )


def carried_bytes(raw: Raw | UnsetType) -> bytes | None:
    """Return the msgpack bytes of a field that kvbus passes on unread; None if the event has no such field."""
    return None if raw is UNSET else bytes(raw)


def name_bytes(raw: bytes | None) -> bytes | None:
    """Return the msgpack bytes of a chunk's locality or owner; None if the engine sent null or no such field."""
    return None if raw == NULL else raw


def raw_or_unset(value: bytes | None) -> Raw:
    """Return an event's field for these msgpack bytes; UNSET for None. It is the inverse of :func:`carried_bytes`."""
    return UNSET if value is None else Raw(value)  # type: ignore[return-value]
