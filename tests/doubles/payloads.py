"""Builders of engines' events, batches and messages, and a normal form to compare events."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from kvbus.core.types import Hash
from kvbus.core.wire.codec import AnyEvent

pack: Final = msgspec.msgpack.encode
unpack: Final = msgspec.msgpack.decode


def tokens_of(block: Hash, size: int = 16) -> list[int]:
    """Return tokens that only this block has: equal for equal hashes, different otherwise."""
    first = zlib.crc32(repr(block).encode()) % 2**31
    return list(range(first, first + size))


def store(
    hashes: list[Any],
    parent: Any = None,
    *,
    tokens: Any = None,
    block_size: Any = 16,
    medium: Any = "GPU",
    group: Any = None,
    **more: Any,
) -> dict[str, Any]:
    """Return a BlockStored as a map. Tokens follow from the hashes by default. ``more`` are additional fields."""
    if tokens is None:
        tokens = [token for block in hashes for token in tokens_of(block, block_size)]
    event = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": block_size,
        "medium": medium,
    }
    if group is not None:
        event["group_idx"] = group
    return event | more


def removed(hashes: list[Any], *, medium: Any = "GPU", group: Any = None, **more: Any) -> dict[str, Any]:
    """Return a BlockRemoved as a map."""
    event = {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium}
    if group is not None:
        event["group_idx"] = group
    return event | more


def cleared(medium: str | None = None) -> dict[str, Any]:
    """Return an AllBlocksCleared as a map, for one medium if one is given."""
    return {"type": "AllBlocksCleared"} | ({} if medium is None else {"medium": medium})


def payload(*events: Any, ts: Any = 1.0, rank: Any = 0) -> bytes:
    """Return an encoded batch, ``[ts, events, rank]``."""
    return pack([ts, list(events), rank])


def batch(seq: int, *events: Any, ts: Any = 1.0, rank: Any = 0, topic: bytes = b"") -> list[bytes]:
    """Return the frames of a live message, ``[topic, seq, payload]``."""
    return [topic, seq.to_bytes(8, "big"), payload(*events, ts=ts, rank=rank)]


def plain(event: AnyEvent | dict[str, Any]) -> dict[str, Any]:
    """Return an event as a map without its fields that are None or absent, so that equal events compare equal."""
    fields = unpack(pack(event))
    return {name: value for name, value in fields.items() if value is not None}


def plain_all(events: Iterable[AnyEvent | dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each event as :func:`plain` does."""
    return [plain(event) for event in events]


def short(event: dict[str, Any]) -> str:
    """Return an event in one line."""
    kind = event.get("type")
    where = "".join(f" {name}={event[name]}" for name in ("medium", "group_idx") if event.get(name) is not None)
    if kind == "BlockStored":
        size, count = event.get("block_size"), len(event.get("token_ids") or ())
        return f"store {event['block_hashes']} behind {event.get('parent_block_hash')} ({count}/{size}){where}"
    if kind == "BlockRemoved":
        return f"removed {event['block_hashes']}{where}"
    return "cleared" if kind == "AllBlocksCleared" else repr(event)
