"""Events as Mooncake's RFC 1527 names them, made into those of this wire.

Read from the publisher of Mooncake's master (Mooncake#2214) and its RFC, not from bytes of a release. Each event is a
map with ``event_type``, ``seq_hashes``, ``parent_hash`` and an envelope: who says it, and when. With its option for
older readers, the default, ``type``, ``block_hashes`` and ``parent_block_hash`` are there, too. The time of a batch is
in milliseconds.

A pool of blocks knows no tokens: ``token_ids``, ``block_size`` and ``parent_hash`` are null. Such a store is
``tokenless`` unless the blocks are known from another medium of the source.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Raw

_TYPES: Final = {"stored": "BlockStored", "removed": "BlockRemoved", "cleared": "AllBlocksCleared"}
_NAMES: Final = {
    "seq_hashes": "block_hashes",
    "parent_hash": "parent_block_hash",
    "additional_salt": "cache_salt",
    "lora_name": "lora_name",
    "medium": "medium",
    "token_ids": "token_ids",
    "block_size": "block_size",
}
_NULLS: Final = {"token_ids": Raw(b"\x90"), "block_size": Raw(b"\x00"), "block_hashes": Raw(b"\x90")}
"""What stands for null where there has to be a value."""

_OF_REMOVALS: Final = frozenset({"block_hashes", "medium"})

_ENVELOPE: Final = frozenset(
    {
        *("event_id", "timestamp", "event_type", "type", "model_name", "tenant_id", "backend_id", "base_block_idx"),
        *("object_key", "group_id", "cache_prefix", "head_or_tp_rank", "layer_id", "block_hashes", "parent_block_hash"),
        "connector_block_hash",
        *("dp_rank", "tp_rank", "pcp_rank", "dcp_rank", "pp_rank"),
    }
)
"""What is said about the sender, the pool's own names, and what older readers read."""

_decode: Final = msgspec.msgpack.Decoder().decode

_IN_MILLISECONDS: Final = 1e11
"""A time of day that is no number of seconds before the year 5138."""


def translated(fields: dict[str, Raw]) -> tuple[object, dict[str, Raw]]:
    """The kind of an event with ``event_type``, and its fields under their names here. What nobody knows is kept."""
    said = _decode(fields["event_type"])
    tag = _TYPES.get(said, said) if isinstance(said, str) else said
    found = {name: raw for name, raw in fields.items() if name not in _NAMES and name not in _ENVELOPE}
    for theirs, ours in _NAMES.items():
        raw = fields.get(theirs)
        if raw is None or tag == "AllBlocksCleared" or (tag == "BlockRemoved" and ours not in _OF_REMOVALS):
            continue
        if bytes(raw) != b"\xc0":
            found[ours] = raw
        elif ours in _NULLS:
            found[ours] = _NULLS[ours]
    return tag, found


def seconds(ts: float) -> float:
    """A batch's time, which a publisher of such events gives in milliseconds."""
    return ts / 1000 if ts > _IN_MILLISECONDS else ts
