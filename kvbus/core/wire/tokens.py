"""Token arrays as they are on the wire: counted, compared and divided without decoding them.

A token id is an unsigned integer of 32 bits. With EAGLE a token is a pair ``[a, b]`` of them. Engines write each in its
shortest form, and then equal tokens are equal bytes. Any other spelling is decoded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
from msgspec import Raw

from kvbus.core.types import MAX_TOKEN_ID, Reason

Token = int | tuple[int, int]

_decode_tokens: Final = msgspec.msgpack.Decoder(list[int]).decode
_decode_pairs: Final = msgspec.msgpack.Decoder(list[tuple[int, int]]).decode
_decode: Final = msgspec.msgpack.Decoder().decode
_encode: Final = msgspec.msgpack.Encoder().encode

_ID: Final = rb"(?:\xcd..|\xce....|[\x00-\x7f]|\xcc.)"
_PAIR: Final = rb"\x92" + _ID + _ID
_TOKEN: Final = rb"(?:\xcd..|\xce....|[\x00-\x7f]|\xcc.|" + _PAIR + rb")"

_IDS: Final = rb"(?:" + _ID * 4 + rb")*+" + _ID + rb"*+"
_PAIRS: Final = rb"(?:" + _PAIR * 2 + rb")*+(?:" + _PAIR + rb")*+"
_matched: Final = re.compile(_IDS + rb"|" + _PAIRS, re.DOTALL).fullmatch
"""Matches ids alone or pairs alone, each in its shortest form. Matching takes a third of the time of decoding."""


_MAX_PATTERNS: Final = 64
_patterns: Final[dict[int, Callable[[bytes, int], list[bytes]]]] = {}
"""By block size, for those that came first."""

_each_token: Final = re.compile(_TOKEN, re.DOTALL).findall


def array_head(count: int) -> bytes:
    """The msgpack header of an array of so many items, in its shortest form."""
    if count < 1 << 4:
        return bytes([0x90 | count])
    return b"\xdc" + count.to_bytes(2, "big") if count < 1 << 16 else b"\xdd" + count.to_bytes(4, "big")


def body_at(tokens: bytes) -> int:
    """Where the items of a msgpack array begin; 0 if it is none."""
    head = tokens[0]
    return 1 if head & 0xF0 == 0x90 else 3 if head == 0xDC else 5 if head == 0xDD else 0


_PAIR_HEAD: Final = 0x92

MAX_TOKENS: Final = (1 << 32) - 1
"""Items of the longest msgpack array."""


def are_tokens(tokens: bytes, at: int) -> bool:
    """Whether the bytes from ``at`` on are ids alone, or pairs alone, each in its shortest form."""
    return _matched(tokens, at) is not None


def are_pairs(tokens: Raw | bytes) -> bool:
    """Whether an array of tokens is one of pairs."""
    raw = memoryview(tokens)
    at = {0xDC: 3, 0xDD: 5}.get(raw[0], 1)
    return len(raw) > at and raw[at] == _PAIR_HEAD


def count_tokens(tokens: bytes) -> int | Reason:
    """How many tokens one msgpack value holds; a reason if it is anything else than tokens or pairs of them."""
    at = body_at(tokens)
    if at and are_tokens(tokens, at):
        return tokens[0] & 0x0F if at == 1 else int.from_bytes(tokens[1:at], "big")
    decoded = decode_tokens(tokens)
    return decoded if isinstance(decoded, Reason) else len(decoded)


def decode_tokens(raw: Raw | bytes) -> list[Token] | Reason:
    """Token ids (each in [0, 2**32)) or EAGLE's pairs of them; a reason if they are anything else."""
    try:
        tokens = _decode_tokens(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _decode_bigrams(raw)
    if tokens and (min(tokens) < 0 or max(tokens) > MAX_TOKEN_ID):
        return Reason.TOKEN_RANGE
    return tokens  # type: ignore[return-value]


def _decode_bigrams(raw: Raw | bytes) -> list[Token] | Reason:
    try:
        pairs = _decode_pairs(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Reason.WRONG_TYPE
    if any(not 0 <= token <= MAX_TOKEN_ID for pair in pairs for token in pair):
        return Reason.TOKEN_RANGE
    return pairs  # type: ignore[return-value]


def divide(tokens: bytes, size: int) -> list[bytes]:
    """The tokens of each block of so many, in their shortest form. They have been counted: it is a multiple."""
    at = body_at(tokens)
    if not are_tokens(tokens, at):
        tokens = _encode(decode_tokens(tokens))
        at = body_at(tokens)
    pattern = _patterns.get(size)
    if pattern is None:
        if len(_patterns) >= _MAX_PATTERNS:
            each = _each_token(tokens, at)
            return [b"".join(each[first : first + size]) for first in range(0, len(each), size)]
        pattern = _patterns[size] = re.compile(_TOKEN + rb"{%d}+" % size, re.DOTALL).findall
    return pattern(tokens, at)


def between(tokens: bytes, first: int, end: int) -> bytes:
    """Tokens ``[first, end)`` of an array that has them, as an array of their own in its shortest form."""
    return _encode(_decode(tokens)[first:end])


def joined(blocks: Sequence[bytes], size: int) -> bytes:
    """The token array of some blocks of so many tokens each, as :func:`divide` gives them."""
    return array_head(len(blocks) * size) + b"".join(blocks)
