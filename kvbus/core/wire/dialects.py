"""Engine dialects: find the form of a payload, name its dialect, and translate Mooncake's RFC 1527 events.

No message names the version of its engine. But the form of the first BlockStored shows which releases may have sent it.
If that event is an array, the array's length excludes more releases. docs/PROTOCOL.md has the complete table. The name
of the dialect is shown to people. No code depends on it.

The translation of RFC 1527 follows the publisher of Mooncake's master (Mooncake#2214) and the RFC. It was not checked
with the bytes of a release. Each event is a map with ``event_type``, ``seq_hashes``, ``parent_hash`` and an envelope,
which names the sender and the time. By default the publisher adds ``type``, ``block_hashes`` and ``parent_block_hash``
for older readers. The time of a batch is in milliseconds. Mooncake's pool of blocks does not know tokens, so
``token_ids``, ``block_size`` and ``parent_hash`` are null. kvbus counts such a store as ``tokenless``, and leaves it
out unless the source has the blocks on another medium.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Raw

# -- the form of a payload ------------------------------------------------------------------------------------------

_EVENTS_AT: Final = {0xCB: 10, 0xCA: 6, 0xCF: 10, 0xD3: 10, 0xCE: 6, 0xD2: 6}
"""Offset in bytes of the events array in a batch, by the msgpack type byte of ``ts``.

Every engine sends ``ts`` as float64. Other publishers may send it as another type, which has another length.
"""


def event_offset(payload: bytes | memoryview) -> int:
    """Return the offset of the first byte of the first event in a batch.

    Return 0 if the batch has no events or is not a msgpack array.
    """
    if len(payload) < 4 or payload[0] & 0xF0 != 0x90:
        return 0
    at = _EVENTS_AT.get(payload[1], 2)
    if at >= len(payload):
        return 0
    head = payload[at]
    if 0x91 <= head <= 0x9F:
        return at + 1
    return at + 3 if head == 0xDC else at + 5 if head == 0xDD else 0


def first_event_is_array(payload: bytes | memoryview) -> bool:
    """Return whether the first event of a batch is positional, so that the codec can choose its decoder."""
    at = event_offset(payload)
    return 0 < at < len(payload) and (payload[at] & 0xF0 == 0x90 or payload[at] in (0xDC, 0xDD))


# -- names of dialects ----------------------------------------------------------------------------------------------

_ARRAYS: Final = {
    (2, 6): "vllm-0.9.0",
    (3, 6): "vllm-0.9.1..0.10.0 | sglang-0.4.7..0.5.8",
    (3, 7): "vllm-0.10.2..0.13 | sglang-0.5.9..0.5.17",
    (3, 8): "vllm-0.14..0.16",
    (3, 9): "vllm-0.18",
    (3, 10): "vllm-0.20",
    (3, 12): "vllm-0.22..0.23",
}
_VLLM_KEYS: Final = (b"group_idx", b"extra_keys", b"locality", b"ownership", b"kv_cache_spec_kind")
_decode_raw: Final = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode


class Sniffer:
    """A detector of the dialect in which one source's engine sends its batches.

    It remembers which dialect belongs to which first bytes (of the batch and of its first event). So it parses only the
    first batch with these bytes.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self._names: dict[int, str] = {}
        """Name of the dialect, by the first byte of a batch and the first byte of its first event."""

    def see(self, payload: bytes) -> None:
        """Set ``name`` to the dialect of a batch.

        If the dialect that belongs to its first bytes is already known, do not parse the batch.
        """
        at = event_offset(payload)
        form = payload[0] << 8 | (payload[at] if at < len(payload) else 0)
        name = self._names.get(form)
        if name is None:
            if payload.find(b"BlockRemoved", at, at + 24) >= 0:
                return
            name = sniff(payload)
            if name is None:
                return
            self._names[form] = name
        self.name = name


def sniff(payload: bytes) -> str | None:
    """Return the name of a batch's dialect. The form of its first event shows the dialect.

    Return None if the batch has no events or its first event is not a BlockStored.
    """
    at = event_offset(payload)
    if not 0 < at < len(payload):
        return "vllm-dev (map batch)" if payload[:1] and payload[0] & 0xF0 == 0x80 else None
    head = payload[at]
    if head & 0xF0 == 0x90:
        if payload[at + 1 : at + 13] != b"\xabBlockStored":
            return None
        length = head & 0x0F
        if length == 8 and _seventh_is_map(payload):
            return "sglang-0.5.18..0.5.19"
        return _ARRAYS.get((payload[0] & 0x0F, length), f"array/{length}")
    if head & 0xF0 != 0x80 and head not in (0xDE, 0xDF):
        return None
    # Search for the key in the bytes of the first event without parsing it, to save time. A value that equals the name
    # of a key then counts as the key. This does no harm, because the dialect's name is only shown to people.
    end = at + 4096
    if payload.find(b"\xaaevent_type", at, at + 64) >= 0:
        return "rfc1527 (mooncake)"
    if payload.find(b"\xabBlockStored", at, at + 40) < 0:
        return None
    if payload.find(b"cache_salt", at, end) >= 0:
        known = payload.find(b"extra_keys", at, end) >= 0
        return "sglang (sglang#39991)" if known else "sglang-0.5.20..0.5.23"
    for key in _VLLM_KEYS:
        if payload.find(key, at, end) >= 0:
            return "vllm-0.30..0.33" if payload.find(b"ownership", at, end) >= 0 else "vllm-0.24..0.33"
    return "vllm-0.24.. | sglang-0.5.20.. | dynamo | trt-llm"


def _seventh_is_map(payload: bytes) -> bool:
    batch = _decode_raw(payload)
    seventh = _decode_raw(_decode_raw(batch[1])[0])[7]
    head = memoryview(seventh)[0]
    return head & 0xF0 == 0x80 or head in (0xDE, 0xDF)


# -- Mooncake's RFC 1527 ------------------------------------------------------------------------------------------

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
"""Values that replace null in fields for which the event structs require a value."""

_OF_REMOVALS: Final = frozenset({"block_hashes", "medium"})

_ENVELOPE: Final = frozenset(
    {
        *("event_id", "timestamp", "event_type", "type", "model_name", "tenant_id", "backend_id", "base_block_idx"),
        *("object_key", "group_id", "cache_prefix", "head_or_tp_rank", "layer_id", "block_hashes", "parent_block_hash"),
        "connector_block_hash",
        *("dp_rank", "tp_rank", "pcp_rank", "dcp_rank", "pp_rank"),
    }
)
"""Fields that kvbus drops from each event in the form of Mooncake's RFC 1527.

They hold facts about the sender, names that only Mooncake's pool uses, and copies of other fields for older readers.
"""

_decode: Final = msgspec.msgpack.Decoder().decode

_IN_MILLISECONDS: Final = 1e11
"""A batch's ``ts`` above this number is in milliseconds. In seconds, it would be after the year 5138."""


def translated(fields: dict[str, Raw]) -> tuple[object, dict[str, Raw]]:
    """Translate an RFC 1527 event (Mooncake). Return its type, and its fields under vLLM's names.

    Fields that RFC 1527 does not define are kept.
    """
    event_type = _decode(fields["event_type"])
    tag = _TYPES.get(event_type, event_type) if isinstance(event_type, str) else event_type
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
    """Return the time of a batch in seconds. Publishers of RFC 1527 events send it in milliseconds."""
    return ts / 1000 if ts > _IN_MILLISECONDS else ts
