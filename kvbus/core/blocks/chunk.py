"""The blocks of one store, and the fields that they share with the blocks of other stores."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw, UnsetType

from kvbus.core.types import Hash
from kvbus.core.wire.schema import BlockStored
from kvbus.core.wire.tokens import decode_tokens, slice_array

ITEM_BYTES: Final = 140
"""Memory overhead in bytes of each chunk and of each block: Python objects, a hash, a table entry."""


class Meta(msgspec.Struct, frozen=True, gc=False):
    """The fields of a store that are the same in most stores. The index keeps one object for each distinct value.

    ``weight`` is the number of bytes in texts that are too long to be shared. A chunk whose meta has a weight has a
    :class:`Rest`.
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
    """Fields that few chunks have. ``extras`` are fields that the event struct does not define.

    :class:`Chunk` explains the other fields.
    """

    extras: dict[str, bytes] | None = None
    derived: list[Hash] | None = None
    out_parent: Hash | None = None


class Chunk(msgspec.Struct, gc=False):
    """The blocks of one store. ``tokens`` is a msgpack array of ``len(hashes) * block_size`` items, or an empty one.

    ``derived`` holds the derived hashes of a reblocked chunk, ``block_size // base`` for each block. It is None if the
    blocks are sent unchanged. ``out_parent`` is the hash by which routers know the parent of the first sub-block (only
    for reblocked chunks). ``live`` is the number of blocks that an index holds through this chunk.
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
        """Tokens per block of the engine."""
        return self.meta.block_size

    @property
    def extras(self) -> dict[str, bytes] | None:
        """Fields that the event struct does not define, as raw msgpack."""
        return None if self.rest is None else self.rest.extras

    @property
    def derived(self) -> list[Hash] | None:
        """The derived hashes; None if the blocks are sent unchanged."""
        return None if self.rest is None else self.rest.derived

    @property
    def out_parent(self) -> Hash | None:
        """The hash of the sub-block before the first sub-block."""
        return None if self.rest is None else self.rest.out_parent

    @property
    def hash_only(self) -> bool:
        """Whether the tokens of the blocks are unknown: ``tokens`` is an empty array."""
        return len(self.tokens) == 1

    @property
    def memory(self) -> int:
        """Approximate size of this chunk in the process's memory, in bytes."""
        count: int = ITEM_BYTES * (1 + len(self.hashes)) + len(self.tokens) + len(self.extra_keys or b"")
        if self.rest is not None:
            count += self.meta.weight
            count += ITEM_BYTES * len(self.derived or ())
            count += sum(len(name) + len(value) for name, value in (self.extras or {}).items())
        return count

    def reblock_into(self, derived: list[Hash] | None, out_parent: Hash | None) -> None:
        """Announce the blocks under these derived hashes from now on. With None, announce them unchanged."""
        if derived is not None or self.rest is not None:
            self.rest = Rest(self.extras, derived, out_parent)

    def parent_of(self, i: int) -> Hash | None:
        """Return the engine's hash of the block before block ``i``."""
        return self.hashes[i - 1] if i else self.parent

    def reblocked(self) -> tuple[list[Hash], int]:
        """Return the derived hashes of a reblocked chunk, and the number of sub-blocks per engine block."""
        derived = self.derived or []
        return derived, len(derived) // len(self.hashes)

    def token_list(self) -> list[Any]:
        """Return all tokens. Each call decodes them again."""
        tokens = decode_tokens(self.tokens)
        if not isinstance(tokens, list):  # pragma: no cover - only validated tokens are ever stored
            raise TypeError(tokens)
        return tokens

    def tokens_of(self, a: int, b: int) -> bytes:
        """Return the tokens of blocks ``[a, b)`` as a separate array."""
        if self.hash_only:
            return self.tokens
        size = self.meta.block_size
        return slice_array(self.tokens, a * size, b * size)


def meta_of(event: BlockStored) -> Meta:
    """Return the shared fields of a store."""
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
    """Return the bytes of a carried field; None if the event has no such field."""
    return None if raw is UNSET else bytes(raw)


def raw_or_unset(value: bytes | None) -> Raw:
    """Return the event field for these bytes: the inverse of :func:`carried_bytes`."""
    return UNSET if value is None else Raw(value)  # type: ignore[return-value]
