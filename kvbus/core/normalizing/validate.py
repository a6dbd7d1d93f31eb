"""The rules a single event must keep, whatever the state of the cache. Each break has one bounded reason."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET

from kvbus.core.types import MAX_HASH_BYTES, MAX_TOKEN_ID, Hash, Reason, medium_key
from kvbus.core.wire.codec import Token, decode_tokens, decode_value
from kvbus.core.wire.schema import CARRIED, BlockRemoved, BlockStored


class Store(msgspec.Struct):
    """A BlockStored that keeps the rules, with what validation found out on the way."""

    event: BlockStored
    tokens: list[Token]
    medium: str
    """The medium's index key, see :func:`~kvbus.core.types.medium_key`."""
    group: int | None
    extras: dict[str, msgspec.Raw] | None = None


def check_hashes(hashes: list[Hash]) -> Reason | None:
    """All integers, or all byte strings of 1 to 64 bytes; never mixed."""
    kinds = set(map(type, hashes))
    if len(kinds) != 1:
        return Reason.HASH_KIND
    if bytes in kinds and not all(0 < len(value) <= MAX_HASH_BYTES for value in hashes):  # type: ignore[arg-type]
        return Reason.HASH_KIND
    return None


def check_stored(event: BlockStored) -> Store | Reason:
    """Check one BlockStored.

    A block size of 0 with tokens is what llm-d-inference-sim sends: the size follows from the counts. Events without
    hashes or without tokens are valid here; what they mean is decided by the normalizer.
    """
    hashes = event.block_hashes
    medium = medium_key(event.medium)
    if medium is None:
        return Reason.UNKNOWN_MEDIUM
    tokens = decode_tokens(event.token_ids)
    if isinstance(tokens, Reason):
        return tokens
    if not _carried_ok(event):
        return Reason.WRONG_TYPE
    count = len(hashes)
    size = event.block_size
    if size < 0 or size > 2**31:
        return Reason.BLOCK_SIZE
    if count and tokens:
        if size == 0:
            if len(tokens) % count:
                return Reason.TOKEN_COUNT
            event.block_size = size = len(tokens) // count
        if size * count != len(tokens):
            return Reason.TOKEN_COUNT
    if count:
        if (bad := check_hashes(hashes)) is not None:
            return bad
        if len(set(hashes)) != count:
            return Reason.DUPLICATE_HASH
        parent = event.parent_block_hash
        if parent is not None and (bad := check_hashes([hashes[0], parent])) is not None:
            return bad
    group = event.group_idx if event.group_idx is not UNSET else None
    return Store(event, tokens, medium, group)


def _carried_ok(event: BlockStored) -> bool:
    """Fields that are only handed on are what routers read: texts, and lists with an entry per block."""
    count = len(event.block_hashes)
    for name in CARRIED:
        raw = getattr(event, name)
        if raw is UNSET:
            continue
        try:
            value = decode_value(raw)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return False
        if name == "extra_keys":
            good = keys_ok(value, count)
        elif name == "lookahead_token_ids":
            good = value is None or (_per_block(value, count) and all(map(_are_tokens, value)))
        else:
            good = value is None or isinstance(value, str)
        if not good:
            return False
    return True


def keys_ok(keys: Any, count: int) -> bool:
    """Whether ``extra_keys`` of so many blocks are null or a list with an entry per block: null, or a list of keys."""
    if keys is None:
        return True
    if not _per_block(keys, count):
        return False
    if keys.count(None) == len(keys):
        return True
    return all(each is None or (isinstance(each, list) and all(map(_is_key, each))) for each in keys)


def _per_block(value: Any, count: int) -> bool:
    """An empty list is a list, too, and what names no block may have any."""
    return isinstance(value, list) and (len(value) == count or not value or not count)


def _is_key(key: Any) -> bool:
    """A key of one block: a name, a digest, a number, or a name and an offset."""
    if isinstance(key, list):
        return len(key) == 2 and type(key[0]) is str and type(key[1]) is int
    return isinstance(key, str | bytes | int | float)


def _are_tokens(tokens: Any) -> bool:
    return isinstance(tokens, list) and all(type(each) is int and 0 <= each <= MAX_TOKEN_ID for each in tokens)


def check_removed(event: BlockRemoved) -> str | Reason:
    """Check one BlockRemoved; the medium's index key if it is good."""
    medium = medium_key(event.medium)
    if medium is None:
        return Reason.UNKNOWN_MEDIUM
    if event.block_hashes and (bad := check_hashes(event.block_hashes)) is not None:
        return bad
    return medium
