"""Functions for arrays of tokens in msgpack: count, decode, divide and join them.

A token is an unsigned 32-bit id. With EAGLE, a token is a pair ``[a, b]`` of ids. The functions return arrays in the
shortest msgpack form, so equal tokens have equal bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Raw

from kvbus.core.types import MAX_TOKEN_ID, Reason

Token = int | tuple[int, int]
_Id = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]

_DECODERS: Final[tuple[Callable[[bytes | Raw], list[Any]], ...]] = (
    msgspec.msgpack.Decoder(list[_Id]).decode,
    msgspec.msgpack.Decoder(list[tuple[_Id, _Id]]).decode,
)
_INTEGERS: Final[tuple[Callable[[bytes | Raw], list[Any]], ...]] = (
    msgspec.msgpack.Decoder(list[int]).decode,
    msgspec.msgpack.Decoder(list[tuple[int, int]]).decode,
)
_decode: Final = msgspec.msgpack.Decoder().decode
_encode: Final = msgspec.msgpack.Encoder().encode

_BODY_AT: Final = {0xDC: 3, 0xDD: 5}
"""Offset in bytes of the first item of a msgpack array, by the first byte of the array.

If that byte is not in this table, the offset is 1.
"""


def decode_tokens(raw: Raw | bytes) -> list[Token] | Reason:
    """Decode an array of token ids, each in [0, 2**32), or of EAGLE's pairs of ids.

    Return a reason if ``raw`` is not such an array.
    """
    for decode in _DECODERS:
        try:
            return decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError):
            pass
    for decode in _INTEGERS:
        try:
            decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        return Reason.TOKEN_RANGE
    return Reason.WRONG_TYPE


def count_tokens(raw: Raw | bytes) -> int | Reason:
    """Return the number of tokens in a msgpack array; a reason if ``raw`` is not an array of tokens."""
    try:
        return len(_DECODERS[0](raw))
    except (msgspec.DecodeError, UnicodeDecodeError):
        tokens = decode_tokens(raw)
    return tokens if isinstance(tokens, Reason) else len(tokens)


def are_pairs(tokens: Raw | bytes) -> bool:
    """Return whether the tokens of a msgpack array are pairs of ids, as with EAGLE. Only the first token is checked."""
    raw = memoryview(tokens)
    at = _body_at(raw)
    return len(raw) > at and (raw[at] & 0xF0 == 0x90 or raw[at] in _BODY_AT)


def divide(tokens: bytes, size: int) -> list[bytes]:
    """Divide an array of tokens into arrays of ``size`` tokens each, one for each block.

    The number of tokens must be a multiple of ``size``.
    """
    decoded = _decode(tokens)
    return [_encode(decoded[first : first + size]) for first in range(0, len(decoded), size)]


def joined(arrays: Sequence[bytes], count: int) -> bytes:
    """Join several msgpack arrays to one array. ``count`` is the total number of their items."""
    return array_head(count) + b"".join([array[_body_at(array) :] for array in arrays])


def slice_array(raw: bytes, first: int, end: int) -> bytes:
    """Return items ``[first, end)`` of a msgpack array as a new array."""
    return _encode(_decode(raw)[first:end])


def array_head(count: int) -> bytes:
    """Return the shortest msgpack header for an array of ``count`` items."""
    if count < 1 << 4:
        return bytes([0x90 | count])
    return b"\xdc" + count.to_bytes(2, "big") if count < 1 << 16 else b"\xdd" + count.to_bytes(4, "big")


def _body_at(array: bytes | memoryview) -> int:
    return _BODY_AT.get(array[0], 1)
