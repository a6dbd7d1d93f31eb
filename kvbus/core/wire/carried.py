"""Pass on the fields of a store that kvbus does not interpret, and replace values that routers cannot read.

kvbus does not drop a block because a field has a value of an unexpected type. It keeps the original value, and sends
another value in its place, which every router can read. Values that distinguish prompts (extra keys, salt, adapter) are
replaced by texts made of their bytes, so that different values stay different. Other fields with unreadable values are
left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Raw, UnsetType

from kvbus.core.types import MAX_TOKEN_ID
from kvbus.core.wire.schema import CARRIED, BlockStored, Extras, Small

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder().decode
_decode_text: Final = msgspec.msgpack.Decoder(str | None).decode
_decode_number: Final = msgspec.msgpack.Decoder(Small | None).decode
_decode_lists: Final = msgspec.msgpack.Decoder(
    list[list[Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]]] | None
).decode
_ERRORS: Final = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)

TYPED: Final = ("lora_name", "kv_cache_spec_kind", "kv_cache_spec_sliding_window")
"""Fields of a store that kvbus passes on, and whose values it decodes.

The fields in :data:`CARRIED` are passed on, too, but stay raw msgpack.
"""

_TELL_APART: Final = frozenset({"lora_name", "cache_salt"})
_KNOWN: Final = frozenset(BlockStored.__struct_fields__)


def text_of(raw: Raw | UnsetType | None) -> str | None:
    """Return the text in an undecoded field of an event; None if the field is missing, null, or of another type."""
    if raw is UNSET or raw is None:
        return None
    try:
        text: str | None = _decode_text(raw)
    except _ERRORS:
        return None
    return text


def lookahead_ok(raw: Raw | bytes, count: int) -> bool:
    """Return whether routers can read the field ``lookahead_token_ids`` of a store of ``count`` blocks.

    It must be null, or a list with one list of token ids for each block.
    """
    try:
        lists = _decode_lists(raw)
    except _ERRORS:
        return False
    return lists is None or _per_block(lists, count)


def keys_ok(raw: Raw | bytes, count: int) -> bool:
    """Return whether routers can read the field ``extra_keys`` of a store of ``count`` blocks.

    It must be null, or a list with one entry for each block. An entry is null or a list of keys.
    """
    try:
        keys = _decode(raw)
    except _ERRORS:
        return False
    if keys is None:
        return True
    if not isinstance(keys, list) or not _per_block(keys, count):
        return False
    if keys.count(None) == len(keys):
        return True
    return all(each is None or (isinstance(each, list) and all(map(_is_key, each))) for each in keys)


def odd_fields(event: BlockStored, names: Sequence[str] = CARRIED) -> list[str]:
    """Return those of a store's undecoded fields, among ``names``, whose values routers cannot read."""
    count = len(event.block_hashes)
    return [name for name in names if (raw := getattr(event, name)) is not UNSET and not _ok(name, raw, count)]


def set_aside(event: BlockStored) -> Extras:
    """Replace each value that routers cannot read, in the store's undecoded fields, by one that they can read.

    Return the original values, by field. The undecoded fields are listed in :data:`CARRIED`.
    """
    count = len(event.block_hashes)
    odd: Extras = {}
    for name in odd_fields(event):
        raw = getattr(event, name)
        odd[name] = Raw(_encode(_value(raw)))
        setattr(event, name, _readable(name, raw, count))
    return odd


def typed_readable(fields: Extras) -> Extras:
    """In a store's decoded fields, replace each value that routers cannot read. Return the original values, by field.

    The decoded fields are listed in :data:`TYPED`. ``fields`` are all fields of the store, as raw msgpack.
    """
    odd: Extras = {}
    for name in TYPED:
        raw = fields.get(name)
        if raw is not None and not _ok(name, raw, 0):
            odd[name] = Raw(_encode(_value(fields.pop(name))))
            found = _readable(name, raw, 0)
            if found is not UNSET:
                fields[name] = found
    return odd


def readable(event: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a store in which routers can read all fields that the struct BlockStored defines.

    The store is a map, because it also has fields that the struct does not define, or has values of unexpected types.
    """
    count = len(event["block_hashes"])
    found = dict(event)
    for name in (*CARRIED, *TYPED):
        raw = event.get(name, UNSET)
        if not isinstance(raw, Raw) or (name in CARRIED and _ok(name, raw, count)):
            continue
        own = _readable(name, raw, count)
        if own is UNSET:
            del found[name]
        else:
            found[name] = _decode(own) if name in TYPED else own
    return found


def known_names(extras: Extras) -> list[str]:
    """Return the names of a store's extras that the struct BlockStored defines.

    Most extras are fields that BlockStored does not define. A field that it defines is an extra if its value has an
    unexpected type.
    """
    return [name for name in extras if name in _KNOWN]


def as_text(value: Any) -> str:
    """Return a text for a value of any type, which kvbus sends in place of a value that routers cannot read.

    Different values have different texts.
    """
    return f"msgpack:{_encode(value).hex()}"


def _ok(name: str, raw: Raw, count: int) -> bool:
    if name == "extra_keys":
        return keys_ok(raw, count)
    if name == "lookahead_token_ids":
        return lookahead_ok(raw, count)
    return _decodes(_decode_number if name == "kv_cache_spec_sliding_window" else _decode_text, raw)


def _value(raw: Raw) -> Any:
    """Decode the value of a field. If it cannot be decoded, return a text made of its bytes.

    A router that cannot decode one value would drop the complete batch.
    """
    try:
        return _decode(raw)
    except (*_ERRORS, TypeError):
        return as_text(bytes(raw))


def _readable(name: str, raw: Raw, count: int) -> Any:
    """Return the raw msgpack that replaces a field's unreadable value.

    Return UNSET if kvbus sends the store without it.

    ``count`` is the number of the store's blocks.
    """
    if name in _TELL_APART:
        return Raw(_encode(as_text(_value(raw))))
    if name != "extra_keys":
        return UNSET
    keys = _value(raw)
    if not isinstance(keys, list) or len(keys) != count:
        return Raw(_encode([[as_text(keys)]] * count))
    return Raw(_encode([_readable_keys(each) for each in keys]))


def _readable_keys(entry: Any) -> list[Any] | None:
    if entry is None:
        return None
    if not isinstance(entry, list):
        return [as_text(entry)]
    return [each if _is_key(each) else as_text(each) for each in entry]


def _is_key(key: Any) -> bool:
    """Return whether a value is a valid extra key: a name, a digest, a number, or a pair of a name and an offset."""
    if isinstance(key, list):
        return len(key) == 2 and type(key[0]) is str and type(key[1]) is int
    return isinstance(key, str | bytes | int | float)


def _per_block(value: list[Any], count: int) -> bool:
    """Return whether a list from a store may be the list of entries for ``count`` blocks, one entry for each block.

    An empty list is accepted for any number of blocks. Any list is accepted if ``count`` is 0.
    """
    return len(value) == count or not value or not count


def _decodes(decode: Any, raw: Raw) -> bool:
    try:
        decode(raw)
    except _ERRORS:
        return False
    return True
