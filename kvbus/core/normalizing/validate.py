"""The rules a single event must keep, whatever the state of the cache. Each break has one bounded reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Raw
from msgspec.structs import astuple

from kvbus.core.types import MAX_HASH_BYTES, MAX_TOKEN_ID, Hash, Reason, medium_key
from kvbus.core.wire.codec import lacks_field
from kvbus.core.wire.encoding import decode_value
from kvbus.core.wire.schema import CARRIED, BlockRemoved, BlockStored
from kvbus.core.wire.tokens import count_tokens

MAX_SIZE: Final = 2**31
"""The largest block size."""

_fields_of: Final = astuple
_CARRIED: Final = -len(CARRIED)
"""Among the fields of a store, where those begin that are only carried."""

_NOTHING_CARRIED: Final[tuple[Any, ...]] = (UNSET,) * len(CARRIED)

_decode_text: Final = msgspec.msgpack.Decoder(str | None).decode
_decode_counts: Final = msgspec.msgpack.Decoder(list[Annotated[int, msgspec.Meta(ge=0)]] | None).decode
_decode_lists: Final = msgspec.msgpack.Decoder(
    list[list[Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]]] | None
).decode


def check_hashes(hashes: Sequence[Hash]) -> Reason | None:
    """All integers, or all byte strings of 1 to 64 bytes; never mixed."""
    kinds = set(map(type, hashes))
    if len(kinds) != 1:
        return Reason.HASH_KIND
    if bytes in kinds and not all(0 < len(value) <= MAX_HASH_BYTES for value in hashes):  # type: ignore[arg-type]
        return Reason.HASH_KIND
    return None


def check_stored(event: BlockStored[Any], *, uniform: bool = False) -> int | Reason:
    """Check one BlockStored; how many tokens it has if it is good. Of a ``uniform`` batch hashes are of one kind.

    A block size of 0 with tokens is what llm-d-inference-sim sends: the size follows from the counts, and is filled in.
    Events without hashes or without tokens are valid here; what they mean is decided by the normalizer.
    """
    if lacks_field(event):
        return Reason.MISSING_FIELD
    fields: tuple[Any, ...] = _fields_of(event)
    hashes: tuple[Hash, ...] = fields[0]
    if medium_key(event.medium) is None:
        return Reason.UNKNOWN_MEDIUM
    tokens = count_tokens(bytes(fields[2]))
    if isinstance(tokens, Reason):
        return tokens
    if not _carried_ok(fields):
        return Reason.WRONG_TYPE
    count = len(hashes)
    size: int = fields[3]
    if size < 0 or size > MAX_SIZE:
        return Reason.BLOCK_SIZE
    if count and tokens:
        if size == 0:
            if tokens % count:
                return Reason.TOKEN_COUNT
            event.block_size = size = tokens // count
        if size * count != tokens:
            return Reason.TOKEN_COUNT
    if count:
        if not uniform and (bad := check_hashes(hashes)) is not None:
            return bad
        if len(set(hashes)) != count:
            return Reason.DUPLICATE_HASH
        parent = None if uniform else fields[1]
        if parent is not None and parent is not UNSET and (bad := check_hashes([hashes[0], parent])) is not None:
            return bad
    return tokens


def _carried_ok(fields: tuple[Any, ...]) -> bool:
    if fields[_CARRIED:] == _NOTHING_CARRIED:
        return True
    count = len(fields[0])
    keys, *texts, lookahead = fields[_CARRIED:]
    return (
        (keys is UNSET or keys_ok(keys, count))
        and (lookahead is UNSET or lookahead_ok(lookahead, count))
        and texts_ok(texts)
    )


def texts_ok(raws: Sequence[Any]) -> bool:
    """Whether fields that are only handed on are what routers read: texts, null, or not sent."""
    try:
        for raw in raws:
            if raw is not UNSET:
                _decode_text(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return False
    return True


def lookahead_ok(raw: Raw | bytes, count: int) -> bool:
    """Whether lookahead tokens of so many blocks are null, or a list with tokens for each block."""
    try:
        lists = _decode_lists(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return False
    return lists is None or _per_block(lists, count)


def keys_ok(raw: Raw | bytes, count: int) -> bool:
    """Whether ``extra_keys`` of so many blocks are null or a list with an entry per block: null, or a list of keys."""
    try:
        keys = decode_value(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return False
    if keys is None:
        return True
    if not isinstance(keys, list) or not _per_block(keys, count):
        return False
    if keys.count(None) == len(keys):
        return True
    return all(each is None or (isinstance(each, list) and all(map(_is_key, each))) for each in keys)


def counts_left(event: BlockRemoved[Any]) -> list[int] | None:
    """How many copies of each block are left after a removal (vllm#48933); None if that is not said for each."""
    try:
        counts = _decode_counts(event.remaining_copy_counts)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    return counts if counts is not None and len(counts) == len(event.block_hashes) else None


def _is_key(key: Any) -> bool:
    """A key of one block: a name, a digest, a number, or a name and an offset."""
    if isinstance(key, list):
        return len(key) == 2 and type(key[0]) is str and type(key[1]) is int
    return isinstance(key, str | bytes | int | float)


def _per_block(value: list[Any], count: int) -> bool:
    """An empty list is a list, too, and what names no block may have any."""
    return len(value) == count or not value or not count


def check_removed(event: BlockRemoved[Any]) -> str | Reason:
    """Check one BlockRemoved; the medium's index key if it is good."""
    medium = medium_key(event.medium)
    if medium is None:
        return Reason.UNKNOWN_MEDIUM
    if event.block_hashes and (bad := check_hashes(event.block_hashes)) is not None:
        return bad
    return medium
