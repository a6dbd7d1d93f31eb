"""The rules a single event must keep, whatever the state of the cache. Each break has one bounded reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET
from msgspec.structs import astuple

from kvbus.core.types import MAX_HASH_BYTES, Hash, Reason, medium_key
from kvbus.core.wire.codec import lacks_field
from kvbus.core.wire.schema import BlockRemoved, BlockStored
from kvbus.core.wire.tokens import count_tokens

MAX_SIZE: Final = 2**31
"""The largest block size."""

_decode_counts: Final = msgspec.msgpack.Decoder(list[Annotated[int, msgspec.Meta(ge=0)]] | None).decode


def check_hashes(hashes: Sequence[Hash]) -> Reason | None:
    """All integers, or all byte strings of 1 to 64 bytes; never mixed."""
    kinds = set(map(type, hashes))
    if len(kinds) != 1:
        return Reason.HASH_KIND
    if bytes in kinds and not all(0 < len(value) <= MAX_HASH_BYTES for value in hashes):  # type: ignore[arg-type]
        return Reason.HASH_KIND
    return None


def check_stored(event: BlockStored) -> int | Reason:
    """Check one BlockStored; how many tokens it has if it is good.

    A block size of 0 with tokens is what llm-d-inference-sim sends: the size follows from the counts, and is filled in.
    Events without hashes or without tokens are valid here, and so are more tokens than the hashes have: vLLM leaves out
    the hashes of masked blocks. What such events mean is decided by the normalizer.
    """
    if lacks_field(event):
        return Reason.MISSING_FIELD
    fields: tuple[Any, ...] = astuple(event)
    hashes: tuple[Hash, ...] = fields[0]
    if medium_key(event.medium) is None:
        return Reason.UNKNOWN_MEDIUM
    tokens = count_tokens(bytes(fields[2]))
    if isinstance(tokens, Reason):
        return tokens
    count = len(hashes)
    size: int = fields[3]
    if size < 0 or size > MAX_SIZE:
        return Reason.BLOCK_SIZE
    if count and tokens:
        if size == 0:
            if tokens % count:
                return Reason.TOKEN_COUNT
            event.block_size = size = tokens // count
        if size * count > tokens or tokens % size:
            return Reason.TOKEN_COUNT
    if count:
        if (bad := check_hashes(hashes)) is not None:
            return bad
        if len(set(hashes)) != count:
            return Reason.DUPLICATE_HASH
        parent = fields[1]
        if parent is not None and parent is not UNSET and (bad := check_hashes([hashes[0], parent])) is not None:
            return bad
    return tokens


def counts_left(event: BlockRemoved) -> list[int] | None:
    """How many copies of each block are left after a removal (vllm#48933); None if that is not said for each."""
    try:
        counts = _decode_counts(event.remaining_copy_counts)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    return counts if counts is not None and len(counts) == len(event.block_hashes) else None


def check_removed(event: BlockRemoved) -> str | Reason:
    """Check one BlockRemoved; the medium's index key if it is good."""
    medium = medium_key(event.medium)
    if medium is None:
        return Reason.UNKNOWN_MEDIUM
    if event.block_hashes and (bad := check_hashes(event.block_hashes)) is not None:
        return bad
    return medium
