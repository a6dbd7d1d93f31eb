"""Payloads of events for tests of the client: block ``n`` has the two tokens ``2n`` and ``2n + 1``."""

from __future__ import annotations

from typing import Any

import msgspec

from kvbus.core.wire.encoding import encode_batch
from kvbus.core.wire.schema import AllBlocksCleared, BlockRemoved, BlockStored


def tokens(*blocks: int) -> list[int]:
    return [token for block in blocks for token in (2 * block, 2 * block + 1)]


def stored(*blocks: int, parent: int | None = None, **fields: Any) -> BlockStored:
    raw = msgspec.Raw(msgspec.msgpack.encode(tokens(*blocks)))
    return BlockStored(blocks, parent, raw, 2, **fields)


def removed(*blocks: int, **fields: Any) -> BlockRemoved:
    return BlockRemoved(blocks, **fields)


def batch(*events: BlockStored | BlockRemoved | AllBlocksCleared, rank: int | None = 0) -> bytes:
    return encode_batch(events, 1.0, rank)
