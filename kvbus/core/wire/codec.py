"""Decode the payload of a batch into events.

If all events of a batch are well-formed, one typed call of msgspec decodes the batch. If that call fails, the codec
decodes the batch's envelope and then each event separately. It counts each bad event with a reason, and keeps the other
events of the batch. The functions do not raise on bad input, but return a :class:`~kvbus.core.types.Reason`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from math import isfinite
from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw
from msgspec.structs import astuple as fields_of

from kvbus.core.types import Reason
from kvbus.core.wire.carried import as_text, typed_readable
from kvbus.core.wire.dialects import first_event_is_array, seconds, translated
from kvbus.core.wire.schema import (
    CARRIED,
    NO_SIZE,
    NO_TOKENS,
    AllBlocksCleared,
    ArrayBatch,
    Batch,
    BlockInactive,
    BlockRemoved,
    BlockStored,
    ClearedArray,
    Event,
    Extras,
    MapBatch,
    RawBatch,
    RawMapBatch,
    RemovedArray,
    StoredArray,
)

MAX_EVENTS: Final = 65_536
"""Default maximum number of events in a batch of an engine. Real engines send a few hundred events in a batch."""

_decode_maps: Final = msgspec.msgpack.Decoder(MapBatch).decode
_decode_arrays: Final = msgspec.msgpack.Decoder(ArrayBatch).decode
_decode_envelope: Final = msgspec.msgpack.Decoder(RawBatch).decode
_decode_map_envelope: Final = msgspec.msgpack.Decoder(RawMapBatch).decode
_decode_any: Final = msgspec.msgpack.Decoder(Any).decode
_decode_map_event: Final[Callable[[Raw | bytes], Event]] = msgspec.msgpack.Decoder(
    BlockStored | BlockRemoved | AllBlocksCleared | BlockInactive
).decode
_decode_array_event: Final = msgspec.msgpack.Decoder(StoredArray | RemovedArray | ClearedArray).decode
_decode_raw_fields: Final = msgspec.msgpack.Decoder(dict[str, Raw]).decode
_decode_raw_list: Final = msgspec.msgpack.Decoder(list[Raw]).decode
_encode: Final = msgspec.msgpack.Encoder().encode

_EVENT_STRUCTS: Final[dict[str, Any]] = {
    "BlockStored": BlockStored,
    "BlockRemoved": BlockRemoved,
    "AllBlocksCleared": AllBlocksCleared,
}
_STORED_FIELDS: Final = frozenset(BlockStored.__struct_fields__)
_REMOVED_FIELDS: Final = frozenset(BlockRemoved.__struct_fields__)
_CLEARED_FIELDS: Final = frozenset(AllBlocksCleared.__struct_fields__)
_ARRAY_FIELDS: Final[dict[str, tuple[str, ...]]] = {
    "BlockStored": StoredArray.__struct_fields__,
    "BlockRemoved": RemovedArray.__struct_fields__,
    "AllBlocksCleared": ClearedArray.__struct_fields__,
}

AnyEvent = Event | dict[str, Any]
"""An event that can be encoded: a struct, or a map if the event has fields that no struct defines."""


def decode_batch(payload: bytes | memoryview, max_events: int = MAX_EVENTS) -> Batch | Reason:
    """Decode a payload as a router needs it: without events that no router reads, and with every field set.

    It works like :func:`decode`, with two differences. Fields that the engine did not send are set to None. Stores
    without tokens or without a block size are left out, and so are BlockInactive events.
    """
    batch = decode(payload, max_events)
    if isinstance(batch, Reason):
        return batch
    missing = 0
    batch.events = [event for event in batch.events if not isinstance(event, BlockInactive)]
    for event in batch.events:
        if isinstance(event, BlockStored):
            missing += lacks_field(event)
            complete(event)
        elif isinstance(event, BlockRemoved) and event.medium is UNSET:
            event.medium = None
    if missing:
        batch.events = [event for event in batch.events if not (isinstance(event, BlockStored) and lacks_field(event))]
        batch.rejects = [*batch.rejects, *[Reason.MISSING_FIELD] * missing]
    return batch


def decode(payload: bytes | memoryview, max_events: int = MAX_EVENTS) -> Batch | Reason:
    """Decode the payload of a batch, in any engine's dialect.

    Return a reason if the envelope is malformed or the batch has too many events. A batch may contain both positional
    events and maps. Known publishers are vLLM 0.9 to 0.33, SGLang 0.4.7 to 0.5.23, TensorRT-LLM through Dynamo,
    llm-d-inference-sim, and Dynamo's mocker.
    """
    found: MapBatch | ArrayBatch
    try:
        found = _decode_arrays(payload) if first_event_is_array(payload) else _decode_maps(payload)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return _decode_each(payload, max_events)
    if not isfinite(found.ts):
        return Reason.BATCH_SHAPE
    if len(found.events) > max_events:
        return Reason.TOO_MANY_EVENTS
    events: list[Any] = found.events if isinstance(found, MapBatch) else list(map(_from_array, found.events))
    return Batch(found.ts, events, found.rank)


def begins_with_clear(payload: bytes, max_events: int = MAX_EVENTS) -> bool:
    """Return whether the first event of a payload is an AllBlocksCleared that names no medium.

    Such an event drops the blocks of all earlier batches, so a router needs none of them. Each state begins with it.
    """
    batch = decode(payload, max_events)
    return not isinstance(batch, Reason) and bool(batch.events) and clears_all(batch.events[0])


def clears_all(event: object) -> bool:
    """Return whether an event is an AllBlocksCleared that names no medium, so that it clears every medium."""
    return isinstance(event, AllBlocksCleared) and (event.medium is None or event.medium is UNSET)


def lacks_field(event: BlockStored) -> bool:
    """Return whether a store lacks its block size or its tokens because the engine did not send them."""
    return event.block_size == NO_SIZE or event.token_ids == NO_TOKENS


def complete(event: BlockStored) -> None:
    """Set the parent, LoRA id, LoRA name and medium of a store to None if the engine left them out.

    kvbus sends these four fields in every store.
    """
    if event.parent_block_hash is UNSET:
        event.parent_block_hash = None
    if event.lora_id is UNSET:
        event.lora_id = None
    if event.medium is UNSET:
        event.medium = None
    if event.lora_name is UNSET:
        event.lora_name = None


def _decode_each(payload: bytes | memoryview, max_events: int) -> Batch | Reason:
    envelope = _open(payload)
    if isinstance(envelope, Reason):
        return envelope
    if not isfinite(envelope.ts):
        return Reason.BATCH_SHAPE
    if len(envelope.events) > max_events:
        return Reason.TOO_MANY_EVENTS
    unknown: set[str] = set()
    batch = Batch(seconds(envelope.ts), [], envelope.rank, unknown=unknown)
    for raw in envelope.events:
        extras: Extras = {}
        event = _decode_event(raw, extras, unknown)
        if isinstance(event, Reason):
            batch.rejects.append(event)
            continue
        if extras:
            if batch.extras is None:
                batch.extras = {}
            batch.extras[len(batch.events)] = extras
        batch.events.append(event)
    return batch


def _open(payload: bytes | memoryview) -> RawBatch | Reason:
    try:
        return _decode_envelope(payload)
    except RecursionError:
        return Reason.NESTING
    except (msgspec.ValidationError, UnicodeDecodeError):
        pass
    except msgspec.DecodeError:
        return Reason.NOT_MSGPACK
    try:
        named = _decode_map_envelope(payload)
    except RecursionError:
        return Reason.NESTING
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Reason.BATCH_SHAPE
    rank = named.data_parallel_rank if named.data_parallel_rank is not None else named.attn_dp_rank
    return RawBatch(named.ts, named.events, rank)


def _decode_event(raw: Raw, extras: Extras, unknown: set[str]) -> Event | Reason:
    """Decode one event, or return the reason why it is rejected.

    Args:
        raw: the event as msgpack.
        extras: receives the fields that the event structs do not define.
        unknown: receives the names of unknown fields and of an unknown event.
    """
    head = memoryview(raw)[0]
    is_map = 0x80 <= head <= 0x8F or head in (0xDE, 0xDF)
    try:
        if is_map:
            event = _decode_map_event(raw)
            return Reason.MISSING_FIELD if isinstance(event, BlockStored) and lacks_field(event) else event
        return _from_array(_decode_array_event(raw))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        pass
    try:
        return _lenient_map(raw, extras, unknown) if is_map else _lenient_array(raw, extras, unknown)
    except RecursionError:
        return Reason.NESTING
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Reason.WRONG_TYPE


def _lenient_map(raw: Raw, extras: Extras, unknown: set[str]) -> Event | Reason:
    fields = _decode_raw_fields(raw)
    if "event_type" in fields:
        tag, fields = translated(fields)
    else:
        tag = _decode_any(fields.pop("type", b"\xc0"))
    if not isinstance(tag, str) or tag not in _EVENT_STRUCTS:
        note(unknown, EVENT, tag)
        return Reason.UNKNOWN_EVENT
    known = _STORED_FIELDS if tag == "BlockStored" else _REMOVED_FIELDS if tag == "BlockRemoved" else _CLEARED_FIELDS
    for name in [name for name in fields if name not in known]:
        _decode_any(fields[name])  # raises if the field is truncated or nested too deeply
        extras[name] = fields.pop(name)
        note(unknown, f"field of {tag}", name)
    return _typed(tag, fields, extras, unknown)


def _lenient_array(raw: Raw, extras: Extras, unknown: set[str]) -> Event | Reason:
    items = _decode_raw_list(raw)
    tag = _decode_any(items[0]) if items else None
    if not isinstance(tag, str) or tag not in _EVENT_STRUCTS:
        note(unknown, EVENT, tag)
        return Reason.UNKNOWN_EVENT
    names = _ARRAY_FIELDS[tag]
    # The array of a later engine version may have more items. kvbus drops them, because no encoding has a name or a
    # position for them.
    if len(items) > 1 + len(names):
        note(unknown, f"field of {tag}", f"number {2 + len(names)}")
    fields = dict(zip(names, items[1:], strict=False))
    if tag == "BlockStored" and "lora_name" in fields:
        seventh = _decode_any(fields["lora_name"])
        if isinstance(seventh, dict) and "cache_salt" in seventh:
            del fields["lora_name"]
            fields["cache_salt"] = Raw(_encode(seventh["cache_salt"]))
    return _typed(tag, fields, extras, unknown)


MAX_UNKNOWN: Final = 32
"""Maximum number of unknown fields and events whose names are kept for one batch, and also for one source.

The operator sees these names.
"""

_LONGEST_NAME: Final = 48

EVENT: Final = "event"
"""Word before the type of an unknown event, in the names of unknown events and fields."""


def note(unknown: set[str], kind: str, name: Any) -> None:
    """Add the name of an unknown field or event to the set ``unknown``, from which it is shown to the operator.

    The name is shortened, and has only characters that are safe in terminals, logs and HTML. The word ``kind`` is put
    before it.
    """
    if len(unknown) < MAX_UNKNOWN:
        text = name if isinstance(name, str) else ""
        short = re.sub(r"[^A-Za-z0-9_. -]", "?", text[:_LONGEST_NAME]) or "without a name"
        unknown.add(f"{kind} {short}{'…' if len(text) > _LONGEST_NAME else ''}")


_REQUIRED: Final = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size"),
    "BlockRemoved": ("block_hashes",),
    "AllBlocksCleared": (),
}


_OUT_OF_RANGE: Final = ("Expected `int` >=", "Expected `int` <=")
"""Texts with which msgspec's error message begins if an integer is outside the range of its field."""


def _typed(tag: str, fields: Extras, extras: Extras, unknown: set[str]) -> Event | Reason:
    """Return the event struct for an event's fields.

    If a field has a bad value, return the reason to reject the event.

    Args:
        tag: the event's type, such as ``BlockStored``.
        fields: the fields that the struct defines, as raw msgpack.
        extras: the event's other fields. A store's fields with values of an unexpected type are added.
        unknown: the names of unknown fields and values, to which the names of these fields are added.
    """
    for name in _REQUIRED[tag]:
        if name not in fields:
            if name == "parent_block_hash":
                fields[name] = Raw(b"\xc0")  # SGLang 0.5.20 and later omit fields that are None
                continue
            return Reason.MISSING_FIELD
    for name, raw in fields.items():
        if name in CARRIED:
            _decode_any(raw)
    if tag == "BlockStored":
        odd = typed_readable(fields)
        extras.update(odd)
        for name in odd:
            note(unknown, "value of", name)
    try:
        return _decode_map_event(_encode({"type": tag, **fields}))
    except msgspec.ValidationError as error:
        where = str(error)
        if "`$.block_hashes" in where or "`$.parent_block_hash" in where:
            value = _decode_any(fields["block_hashes"])
            return Reason.HASH_KIND if isinstance(value, list) else Reason.WRONG_TYPE
        return Reason.INTEGER_RANGE if where.startswith(_OUT_OF_RANGE) else Reason.WRONG_TYPE


def _from_array(event: StoredArray | RemovedArray | ClearedArray) -> Event:
    if type(event) is StoredArray:
        hashes, parent, tokens, size, lora_id, medium, seventh, keys, group, kind, window = fields_of(event)
        salted = type(seventh) is dict and "cache_salt" in seventh
        name = None if salted else seventh if type(seventh) is not dict else as_text(seventh)
        stored: BlockStored = BlockStored(
            hashes, parent, tokens, size, lora_id, medium, name, group, kind, window, keys
        )
        if salted:
            stored.cache_salt = Raw(_encode(seventh["cache_salt"]))
        return stored
    if type(event) is RemovedArray:
        return BlockRemoved(event.block_hashes, event.medium, event.group_idx)
    return AllBlocksCleared() if event.medium is None else AllBlocksCleared(event.medium)
