"""Derived hashes: names for the fixed-size sub-blocks of an event that named only the whole.

``derived(i) = blake2b(msgpack([parent, salt, tokens]), person="kvbus.block.v1")``, where the parent is the sub-block
before. So equal prefixes get equal names whatever blocks the engine makes of them, on every kvbus, in every run. A
derived hash has eight bytes, read as an unsigned 64-bit integer, where the engine's hashes are integers, and 32 bytes
where they are bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Final

import msgspec
from msgspec import Raw

from kvbus.core.blocks.chunk import Chunk
from kvbus.core.types import Hash
from kvbus.core.wire.encoding import decode_value
from kvbus.core.wire.tokens import array_head, divide

_encode: Final = msgspec.msgpack.Encoder().encode
_of_integers: Final = blake2b(digest_size=8, person=b"kvbus.block.v1")
_of_bytes: Final = blake2b(digest_size=32, person=b"kvbus.block.v1")
"""To be copied: that costs a fifth of beginning anew."""


def derive(parent: Hash | None, tokens: Sequence[Any] | Raw, salt: bytes, *, as_bytes: bool) -> Hash:
    """The hash of one sub-block behind ``parent``. ``salt`` separates equal tokens (LoRA, cache salt)."""
    hasher = (_of_bytes if as_bytes else _of_integers).copy()
    hasher.update(_encode((parent, salt, tokens)))
    digest = hasher.digest()
    return digest if as_bytes else int.from_bytes(digest, "big")


def derive_chunk(chunk: Chunk, base: int, parent_out: Hash | None) -> list[Hash]:
    """Derived hashes of all sub-blocks of a chunk, in order. ``parent_out`` is the sub-block before the first."""
    meta = chunk.meta
    keys = decode_value(chunk.extra_keys) if chunk.extra_keys is not None else None
    as_bytes = isinstance(chunk.hashes[0], bytes)
    head, per_block = array_head(base), meta.block_size // base
    salt = b""
    derived: list[Hash] = []
    previous = parent_out
    for at, tokens in enumerate(divide(chunk.tokens, base)):
        block, first = divmod(at, per_block)
        if not first:
            key = keys[block] if isinstance(keys, list) and block < len(keys) else None
            salt = _encode((meta.lora_id, meta.lora_name, meta.cache_salt, key))
        previous = derive(previous, Raw(head + tokens), salt, as_bytes=as_bytes)
        derived.append(previous)
    return derived
