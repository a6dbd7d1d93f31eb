"""Outgoing events: read a field of any form of event, divide a store, leave fields out, and encode a batch.

An event is a struct of :mod:`~kvbus.core.wire.schema`, or a map if it carries fields that no struct defines. Batches
are encoded as maps, as vLLM sends them, or as arrays, for routers that read only arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import msgspec
from msgspec import UNSET, Raw, structs

from kvbus.core.types import Hash
from kvbus.core.wire.codec import AnyEvent
from kvbus.core.wire.schema import PER_BLOCK, AllBlocksCleared, BlockRemoved, BlockStored, Extras
from kvbus.core.wire.tokens import are_pairs

_encode: Final = msgspec.msgpack.Encoder().encode
_decode_any: Final = msgspec.msgpack.Decoder().decode
_decode_entries: Final = msgspec.msgpack.Decoder(list[Raw]).decode

NOTHING: Final = Raw(_encode([]))
"""An empty array of tokens. Every decoder requires the field."""

CONTENT: Final = frozenset({"token_ids", "extra_keys", "session_id", "cache_salt", "lookahead_token_ids"})
"""The fields of a store that hold tokens, that name images or adapters of a prompt, or that name its sender."""

_ROUTING: Final = {"type", *BlockStored.__struct_fields__} - CONTENT
_POSITIONAL: Final = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")


# -- values and fields ----------------------------------------------------------------------------------------------


def encode_value(value: Any) -> Raw:
    """Return a plain value as raw msgpack, to be put into an event."""
    return Raw(_encode(value))


def decode_value(raw: Raw | bytes) -> Any:
    """Return the plain value of raw msgpack. It must be valid: an event's fields were decoded before."""
    return _decode_any(raw)


def is_store(event: AnyEvent) -> bool:
    """Return whether an event is a store."""
    return "token_ids" in event if isinstance(event, dict) else hasattr(event, "token_ids")


def field(event: AnyEvent, name: str) -> Any:
    """Return a field of any form of event; UNSET if the event has no such field, or the engine did not send it."""
    return event.get(name, UNSET) if isinstance(event, dict) else getattr(event, name, UNSET)


def value(event: AnyEvent, name: str) -> Any:
    """Return a field of any form of event; None if the event has no such field, or the engine did not send it."""
    found = field(event, name)
    return None if found is UNSET else found


def hashes_of(event: AnyEvent) -> Sequence[Hash]:
    """Return the hashes of the blocks that an event names."""
    return () if isinstance(event, AllBlocksCleared) else cast("Sequence[Hash]", field(event, "block_hashes"))


def changed(event: AnyEvent, changes: dict[str, Any]) -> AnyEvent:
    """Return a copy of the event with these fields changed; UNSET drops a field.

    Without changes, return the event itself.
    """
    if not changes:
        return event
    if isinstance(event, dict):
        return {name: value for name, value in {**event, **changes}.items() if value is not UNSET}
    return structs.replace(event, **changes)


def with_extras(event: BlockStored, extras: Extras) -> dict[str, Any]:
    """Return the store as a map that also carries the fields that no struct defines."""
    known = {name: value for name in event.__struct_fields__ if (value := getattr(event, name)) is not UNSET}
    return {"type": "BlockStored", **known, **extras}


# -- parts of events ------------------------------------------------------------------------------------------------


def parts(event: AnyEvent, runs: Sequence[tuple[int, int]]) -> list[AnyEvent]:
    """Return an event for each run ``[first, end)`` of the blocks of a store or a removal."""
    hashes = hashes_of(event)
    if len(runs) == 1 and runs[0] == (0, len(hashes)):
        return [event]
    if not is_store(event):
        return [changed(event, {"block_hashes": hashes[first:end]}) for first, end in runs]
    if not runs:
        return []
    tokens = decode_value(field(event, "token_ids"))
    count = len(hashes)
    lists = {name: each for name in PER_BLOCK if (each := _entries(field(event, name), count)) is not None}
    size = field(event, "block_size")
    found = []
    for first, end in runs:
        changes: dict[str, Any] = {
            "block_hashes": hashes[first:end],
            "token_ids": encode_value(tokens[first * size : end * size]),
        }
        if first:
            changes["parent_block_hash"] = hashes[first - 1]
        for name, entries in lists.items():
            changes[name] = encode_value(entries[first:end])
        found.append(changed(event, changes))
    return found


def extras_of(extras: Mapping[str, Raw | bytes], count: int, first: int, end: int) -> dict[str, Raw]:
    """Return the fields that no struct defines, for blocks ``[first, end)`` of a store of ``count`` blocks.

    The content of these fields has not been validated.
    """
    found = {name: Raw(value) for name, value in extras.items()}
    if end - first < count:
        for name in PER_BLOCK:
            entries = _entries(found.get(name), count)
            if entries is not None:
                found[name] = encode_value(entries[first:end])
    return found


def _entries(raw: Any, count: int) -> list[Raw] | None:
    """Return the entries of a list with one entry for each of ``count`` blocks; None if ``raw`` is anything else."""
    try:
        entries = _decode_entries(raw) if isinstance(raw, Raw) else []
    except msgspec.DecodeError:
        return None
    return entries if len(entries) == count else None


def without_content(event: AnyEvent) -> AnyEvent:
    """Return a store without token ids and other content of a prompt or its sender; any other event unchanged.

    Fields that no struct defines may hold such content, so they are left out too.
    """
    if not is_store(event):
        return event
    if isinstance(event, dict):
        return {name: each for name, each in event.items() if name in _ROUTING} | {"token_ids": NOTHING}
    return structs.replace(
        event, token_ids=NOTHING, extra_keys=UNSET, session_id=UNSET, cache_salt=UNSET, lookahead_token_ids=UNSET
    )


def block_by_block(event: AnyEvent) -> list[AnyEvent]:
    """Return a store as one event for each of its blocks; any other event unchanged."""
    count = len(hashes_of(event))
    if count < 2 or not is_store(event):
        return [event]
    return parts(event, [(at, at + 1) for at in range(count)])


def first_of_pairs(event: AnyEvent) -> AnyEvent:
    """Return a store with the first token of each of EAGLE's pairs ``[a, b]``; any other event unchanged."""
    if not is_store(event):
        return event
    raw = field(event, "token_ids")
    if not are_pairs(raw):
        return event
    return changed(event, {"token_ids": encode_value([first for first, _ in decode_value(raw)])})


def without_adapter_key(event: AnyEvent) -> AnyEvent:
    """Return a store without its adapter's name in the extra keys. vLLM puts that name first in each block's keys."""
    name, raw = value(event, "lora_name"), value(event, "extra_keys")
    if name is None or raw is None:
        return event
    keys = [own[1:] or None if own and own[0] == name else own for own in decode_value(raw) or ()]
    return changed(event, {"extra_keys": encode_value(keys)})


# -- batches --------------------------------------------------------------------------------------------------------


def encode_batch(events: Sequence[AnyEvent], ts: float, rank: int | None) -> bytes:
    """Encode ``[ts, events, rank]`` with map events, as vLLM 0.24 and later send them."""
    return _encode((ts, events, rank))


def encode_positional_batch(events: Sequence[AnyEvent], ts: float, rank: int | None) -> bytes:
    """Encode ``[ts, events, rank]`` with positional events, for routers that read only these.

    A store has the length of vLLM 0.10.2's stores (through ``medium``). A store of a group has the length of vLLM
    0.20's (through ``group_idx``), because the same hash may be live in several groups. Fields without a position are
    left out.
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
