"""Events and values to payload bytes: maps as vLLM sends them, arrays for routers that read nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw, structs

from kvbus.core.wire.codec import AnyEvent
from kvbus.core.wire.schema import AllBlocksCleared, BlockRemoved, BlockStored, Extras

_encode: Final = msgspec.msgpack.Encoder().encode
_decode_any: Final = msgspec.msgpack.Decoder().decode

_POSITIONAL: Final = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")


def encode_value(value: Any) -> Raw:
    """Any plain value as raw msgpack, to be put into an event."""
    return Raw(_encode(value))


def decode_value(raw: Raw | bytes) -> Any:
    """The plain value of raw msgpack that has been decoded once before (it does not fail)."""
    return _decode_any(raw)


def encode_batch(events: Sequence[AnyEvent], ts: float, rank: int | None) -> bytes:
    """``[ts, events, rank]`` with map events, as vLLM 0.24 and later send them."""
    return _encode((ts, events, rank))


def encode_positional_batch(events: Sequence[AnyEvent], ts: float, rank: int | None) -> bytes:
    """``[ts, events, rank]`` with positional events, all that an array-only router reads.

    vLLM 0.10.2's length (through ``medium``); vLLM 0.20's (through ``group_idx``) where there are groups, because the
    same hash may be live in several of them. Fields without a place are left out.
    """
    return _encode((ts, [_to_array(e) for e in events], rank))


def _to_array(event: AnyEvent) -> tuple[Any, ...]:
    if isinstance(event, AllBlocksCleared):
        return ("AllBlocksCleared",)
    if isinstance(event, BlockRemoved):
        head: tuple[Any, ...] = ("BlockRemoved", event.block_hashes, event.medium)
        return head if event.group_idx is UNSET else (*head, event.group_idx)
    fields = event if isinstance(event, dict) else structs.asdict(event)
    head = ("BlockStored", *(fields[name] for name in _POSITIONAL))
    if fields.get("group_idx", UNSET) is UNSET:
        return head
    extra_keys = fields.get("extra_keys", UNSET)
    return (*head, fields["lora_name"], None if extra_keys is UNSET else extra_keys, fields["group_idx"])


def with_extras(event: BlockStored, extras: Extras) -> dict[str, Any]:
    """The event as a map that also carries fields no struct knows."""
    known = {name: value for name in event.__struct_fields__ if (value := getattr(event, name)) is not UNSET}
    return {"type": "BlockStored", **known, **extras}
