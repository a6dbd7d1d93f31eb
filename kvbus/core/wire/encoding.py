"""Functions for outgoing events: read a field, divide a store, leave fields out, and encode a batch.

An event is a struct of :mod:`~kvbus.core.wire.schema`, or a map if it has fields that no struct defines. A batch is
encoded with its events as maps, as vLLM sends them, or as arrays, for routers that read only arrays.
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
"""An empty array of tokens. kvbus sends it for a store without tokens, because every router requires the field."""

CONTENT: Final = frozenset({"token_ids", "extra_keys", "session_id", "cache_salt", "lookahead_token_ids"})
"""The fields of a store that reveal the content or the sender of a prompt.

They hold tokens, name the prompt's images or adapters, or name the prompt's sender.
"""

_ROUTING: Final = {"type", *BlockStored.__struct_fields__} - CONTENT
_POSITIONAL: Final = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")


# -- values and fields ----------------------------------------------------------------------------------------------


def encode_value(value: Any) -> Raw:
    """Encode a plain value as raw msgpack, which can be put into a field of an event."""
    return Raw(_encode(value))


def decode_value(raw: Raw | bytes) -> Any:
    """Decode raw msgpack from a field of an event.

    :func:`~kvbus.core.wire.codec.decode` has checked that it is valid.
    """
    return _decode_any(raw)


def is_store(event: AnyEvent) -> bool:
    """Return whether an event is a store, as a struct or as a map."""
    return "token_ids" in event if isinstance(event, dict) else hasattr(event, "token_ids")


def field(event: AnyEvent, name: str) -> Any:
    """Return a field of an event; UNSET if the event cannot have this field or the engine did not send it.

    The event may be a struct or a map.
    """
    return event.get(name, UNSET) if isinstance(event, dict) else getattr(event, name, UNSET)


def value(event: AnyEvent, name: str) -> Any:
    """Return a field of an event; None if the event cannot have this field or the engine did not send it.

    The event may be a struct or a map.
    """
    found = field(event, name)
    return None if found is UNSET else found


def hashes_of(event: AnyEvent) -> Sequence[Hash]:
    """Return the hashes of the blocks that an event stores or removes. An AllBlocksCleared has none."""
    return () if isinstance(event, AllBlocksCleared) else cast("Sequence[Hash]", field(event, "block_hashes"))


def changed(event: AnyEvent, changes: dict[str, Any]) -> AnyEvent:
    """Return a copy of an event in which the fields named in ``changes`` have new values.

    The value UNSET removes a field. If ``changes`` is empty, return the event itself.
    """
    if not changes:
        return event
    if isinstance(event, dict):
        return {name: value for name, value in {**event, **changes}.items() if value is not UNSET}
    return structs.replace(event, **changes)


def with_extras(event: BlockStored, extras: Extras) -> dict[str, Any]:
    """Return a store as a map that also has ``extras``, the fields that no struct defines."""
    known = {name: value for name in event.__struct_fields__ if (value := getattr(event, name)) is not UNSET}
    return {"type": "BlockStored", **known, **extras}


# -- parts of events ------------------------------------------------------------------------------------------------


def parts(event: AnyEvent, runs: Sequence[tuple[int, int]]) -> list[AnyEvent]:
    """Divide a store or a removal into one event for each range ``[first, end)`` of its blocks in ``runs``."""
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

    A field that is known to have one entry per block (:data:`~kvbus.core.wire.schema.PER_BLOCK`) is cut to these
    blocks. If it does not have ``count`` entries, it is returned complete: kvbus does not know which entries belong to
    which block.
    """
    found = {name: Raw(value) for name, value in extras.items()}
    if end - first < count:
        for name in PER_BLOCK:
            entries = _entries(found.get(name), count)
            if entries is not None:
                found[name] = encode_value(entries[first:end])
    return found


def _entries(raw: Any, count: int) -> list[Raw] | None:
    """Return the entries of a msgpack array; None if ``raw`` is not an array with ``count`` entries."""
    try:
        entries = _decode_entries(raw) if isinstance(raw, Raw) else []
    except msgspec.DecodeError:
        return None
    return entries if len(entries) == count else None


def without_content(event: AnyEvent) -> AnyEvent:
    """Return a store without the token ids and the other fields that reveal the content or the sender of a prompt.

    Fields that no struct defines may also reveal it, so they are left out. Any other event is returned unchanged.
    """
    if not is_store(event):
        return event
    if isinstance(event, dict):
        return {name: each for name, each in event.items() if name in _ROUTING} | {"token_ids": NOTHING}
    return structs.replace(
        event, token_ids=NOTHING, extra_keys=UNSET, session_id=UNSET, cache_salt=UNSET, lookahead_token_ids=UNSET
    )


def block_by_block(event: AnyEvent) -> list[AnyEvent]:
    """Divide a store into one event for each of its blocks. Any other event is returned unchanged."""
    count = len(hashes_of(event))
    if count < 2 or not is_store(event):
        return [event]
    return parts(event, [(at, at + 1) for at in range(count)])


def first_of_pairs(event: AnyEvent) -> AnyEvent:
    """Return a store with only the first token of each EAGLE pair ``[a, b]``. Any other event is returned unchanged."""
    if not is_store(event):
        return event
    raw = field(event, "token_ids")
    if not are_pairs(raw):
        return event
    return changed(event, {"token_ids": encode_value([first for first, _ in decode_value(raw)])})


def without_adapter_key(event: AnyEvent) -> AnyEvent:
    """Return a store whose extra keys do not include the name of its LoRA adapter.

    vLLM puts that name first in the extra keys of each block.
    """
    name, raw = value(event, "lora_name"), value(event, "extra_keys")
    if name is None or raw is None:
        return event
    keys = [own[1:] or None if own and own[0] == name else own for own in decode_value(raw) or ()]
    return changed(event, {"extra_keys": encode_value(keys)})


# -- batches --------------------------------------------------------------------------------------------------------


def encode_batch(events: Sequence[AnyEvent], ts: float, rank: int | None) -> bytes:
    """Encode a batch as ``[ts, events, rank]`` with events as maps, as vLLM 0.24 and later send it."""
    return _encode((ts, events, rank))


def encode_positional_batch(events: Sequence[AnyEvent], ts: float, rank: int | None) -> bytes:
    """Encode a batch as ``[ts, events, rank]`` with positional events, for routers that do not read maps.

    A store ends with the field ``medium``, as in vLLM 0.10.2. If it belongs to a KV-cache group, it ends with
    ``group_idx``, as in vLLM 0.20, because the same hash may be live in several groups. Fields that have no position
    are left out.
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
