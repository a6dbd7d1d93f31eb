"""The rules for a single event, independent of the cache's content. Each broken rule has its own reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, cast

from msgspec import UNSET

from kvbus.core.types import MAX_HASH_BYTES, Hash, Reason, medium_key
from kvbus.core.wire.schema import BlockRemoved, BlockStored
from kvbus.core.wire.tokens import count_tokens

MAX_SIZE: Final = 2**31
"""The largest valid block size, in tokens."""


def check_stored(event: BlockStored) -> int | Reason:
    """Return the number of tokens of a store, or the rule it breaks.

    llm-d-inference-sim sends tokens with a block size of 0: the size is computed from the counts and filled in. Stores
    without hashes or without tokens are valid. A store may have more tokens than its hashes account for: vLLM leaves
    out the hashes of masked blocks.
    """
    if medium_key(event.medium) is None:
        return Reason.UNKNOWN_MEDIUM
    tokens = count_tokens(event.token_ids)
    if isinstance(tokens, Reason):
        return tokens
    if not 0 <= event.block_size <= MAX_SIZE:
        return Reason.BLOCK_SIZE
    hashes = event.block_hashes
    count = len(hashes)
    if count and tokens:
        if event.block_size == 0 and tokens % count == 0:
            event.block_size = tokens // count
        size = event.block_size
        if size == 0 or size * count > tokens or tokens % size:
            return Reason.TOKEN_COUNT
    if not count:
        return tokens
    if (reason := check_hashes(hashes)) is not None:
        return reason
    if len(set(hashes)) != count:
        return Reason.DUPLICATE_HASH
    parent = event.parent_block_hash
    reason = None if parent is None or parent is UNSET else check_hashes((hashes[0], parent))
    return tokens if reason is None else reason


def check_removed(event: BlockRemoved) -> str | Reason:
    """Return the index key of a removal's medium, or the rule that the removal breaks."""
    medium = medium_key(event.medium)
    if medium is None:
        return Reason.UNKNOWN_MEDIUM
    reason = check_hashes(event.block_hashes) if event.block_hashes else None
    return medium if reason is None else reason


def check_hashes(hashes: Sequence[Hash]) -> Reason | None:
    """Return a reason unless all hashes are integers, or all are byte strings of 1 to 64 bytes."""
    kinds = set(map(type, hashes))
    if kinds == {bytes}:
        lengths = {len(block) for block in cast("Sequence[bytes]", hashes)}
        return None if min(lengths) > 0 and max(lengths) <= MAX_HASH_BYTES else Reason.HASH_KIND
    return None if kinds == {int} else Reason.HASH_KIND
