"""The blocks of one store, and what they share with others."""

from __future__ import annotations

from typing import Any

import msgspec

from kvbus.core.types import Hash
from kvbus.core.wire.tokens import between, decode_tokens


class Meta(msgspec.Struct, frozen=True, gc=False):
    """What the blocks of an event share with those of most others: kept once per distinct value.

    ``weight`` are the bytes of texts so long that they are not shared. A chunk with such a meta has a :class:`Rest`.
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
    """What few chunks have: ``extras`` are fields no struct knows; :class:`Chunk` explains the others."""

    extras: dict[str, bytes] | None = None
    derived: list[Hash] | None = None
    out_parent: Hash | None = None


class Chunk(msgspec.Struct, gc=False):
    """The blocks of one store. ``tokens`` is one msgpack array of ``len(hashes) * block_size`` items, or an empty one.

    ``derived`` holds the derived hashes of a reblocked chunk, ``block_size // base`` for each block. It is None where
    blocks leave as they came. ``out_parent`` is the hash by which routers know the parent of the first sub-block
    (reblocked chunks only). There are six fields: one more would cost 16 bytes for every store of a million.
    """

    hashes: tuple[Hash, ...]
    parent: Hash | None
    tokens: bytes
    meta: Meta
    extra_keys: bytes | None = None
    rest: Rest | None = None

    @property
    def block_size(self) -> int:
        """Tokens per block, as the engine counts them."""
        return self.meta.block_size

    @property
    def extras(self) -> dict[str, bytes] | None:
        """Fields no struct knows, as raw msgpack."""
        return None if self.rest is None else self.rest.extras

    @property
    def derived(self) -> list[Hash] | None:
        """The derived hashes, None where blocks leave as they came."""
        return None if self.rest is None else self.rest.derived

    @property
    def out_parent(self) -> Hash | None:
        """The hash of the sub-block before the first one."""
        return None if self.rest is None else self.rest.out_parent

    def reblock_into(self, derived: list[Hash] | None, out_parent: Hash | None) -> None:
        """Blocks leave under these derived hashes from now on; None: as they came."""
        if derived is not None or self.rest is not None:
            self.rest = Rest(self.extras, derived, out_parent)

    def parent_of(self, i: int) -> Hash | None:
        """The engine's hash of the block before block ``i``."""
        return self.hashes[i - 1] if i else self.parent

    def reblocked(self) -> tuple[list[Hash], int]:
        """The derived hashes of a reblocked chunk, and how many of them make one of the engine's blocks."""
        derived = self.derived or []
        return derived, len(derived) // len(self.hashes)

    def token_list(self) -> list[Any]:
        """All tokens, decoded anew each time."""
        tokens = decode_tokens(self.tokens)
        if not isinstance(tokens, list):  # pragma: no cover - only validated tokens are ever stored
            raise TypeError(tokens)
        return tokens

    @property
    def hash_only(self) -> bool:
        """Whether the tokens of its blocks are not known: ``tokens`` is an empty array."""
        return len(self.tokens) == 1

    def tokens_of(self, a: int, b: int) -> bytes:
        """The tokens of blocks ``[a, b)``, as an array of their own."""
        if self.hash_only:
            return self.tokens
        size = self.meta.block_size
        return between(self.tokens, a * size, b * size)
