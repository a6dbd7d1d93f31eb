"""Functions that build the events, batches and messages of an engine, and convert events to a form that tests
compare.
"""

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
    """Return the tokens of a block, computed from its hash. Blocks with different hashes have different tokens."""
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
    """Return a BlockStored event as a map. By default, compute the tokens from the hashes.

    ``more`` has additional fields.
    """
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
    """Return a BlockRemoved event as a map. ``more`` has additional fields."""
    event = {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium}
    if group is not None:
        event["group_idx"] = group
    return event | more


def cleared(medium: str | None = None) -> dict[str, Any]:
    """Return an AllBlocksCleared event as a map. If ``medium`` is given, the event clears only that medium."""
    return {"type": "AllBlocksCleared"} | ({} if medium is None else {"medium": medium})


def payload(*events: Any, ts: Any = 1.0, rank: Any = 0) -> bytes:
    """Return an encoded batch: the msgpack array ``[ts, events, rank]``."""
    return pack([ts, list(events), rank])


def batch(seq: int, *events: Any, ts: Any = 1.0, rank: Any = 0, topic: bytes = b"") -> list[bytes]:
    """Return the frames of a batch's live message: ``[topic, seq, payload]``."""
    return [topic, seq.to_bytes(8, "big"), payload(*events, ts=ts, rank=rank)]


def plain(event: AnyEvent | dict[str, Any]) -> dict[str, Any]:
    """Return an event as a map without the fields that are None, so that a test can compare events with ``==``."""
    fields = unpack(pack(event))
    return {name: value for name, value in fields.items() if value is not None}


def plain_all(events: Iterable[AnyEvent | dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a list of events in the form of :func:`plain`."""
    return [plain(event) for event in events]


def short(event: dict[str, Any]) -> str:
    """Format an event as one line for the message of a failed test."""
    kind = event.get("type")
    where = "".join(f" {name}={event[name]}" for name in ("medium", "group_idx") if event.get(name) is not None)
    if kind == "BlockStored":
        size, count = event.get("block_size"), len(event.get("token_ids") or ())
        return f"store {event['block_hashes']} behind {event.get('parent_block_hash')} ({count}/{size}){where}"
    if kind == "BlockRemoved":
        return f"removed {event['block_hashes']}{where}"
    return "cleared" if kind == "AllBlocksCleared" else repr(event)
