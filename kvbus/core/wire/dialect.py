"""A name for the dialect a payload is in, for people: nothing is decided by it.

The wire names no version. The form of the first BlockStored and, for positional events, its length narrow it down to
the releases named here (docs/PROTOCOL.md has the whole table).
"""

from __future__ import annotations

from typing import Final

import msgspec

from kvbus.core.wire.codec import event_offset

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
    """Remembers what it has seen: what comes in a form that has a name costs nothing."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._names: dict[int, str] = {}
        """By the first bytes of a batch and of its first event."""

    def see(self, payload: bytes) -> None:
        """Look at one batch; the form of its first event decides whether it is worth a closer look."""
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
    """The dialect of a batch's first event, None if that is no BlockStored or the batch is empty."""
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
    # the key set is looked for in the first event's bytes: a name that appears as a value there does no harm
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
