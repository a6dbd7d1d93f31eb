"""Token arrays as they are on the wire: counted, compared and divided without decoding them.

A token id is an unsigned integer of 32 bits. With EAGLE a token is a pair ``[a, b]`` of them. Engines write each in its
shortest form, and then equal tokens are equal bytes. Any other spelling is decoded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Raw

from kvbus.core.types import MAX_TOKEN_ID, Reason

if TYPE_CHECKING:
    from mypy_extensions import i64

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
matched: Final = re.compile(_IDS + rb"|" + _PAIRS, re.DOTALL).fullmatch
"""Matches ids, or pairs, in their shortest form, one after the other: three times as fast as decoding them."""


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

_COMPILED: Final = not hasattr(array_head, "__code__")
"""A loop over bytes costs compiled code a sixth of what the pattern does, and an interpreter twice as much."""


def are_tokens(tokens: bytes, at: int) -> bool:
    """Whether what begins there is ids, or pairs, in their shortest form, one after the other, and nothing else."""
    return walked(tokens, at) if _COMPILED else matched(tokens, at) is not None


def walked(tokens: bytes, at: i64) -> bool:
    """As :func:`are_tokens`, from one token to the next."""
    end: i64 = len(tokens)
    return at == end or (0 < at < end and _after(tokens, at, end, end) == end)


def cut(tokens: bytes, at: i64, size: i64) -> list[bytes]:
    """As :func:`divide`, from one token to the next; in their shortest form they begin there."""
    end: i64 = len(tokens)
    blocks: list[bytes] = []
    while at < end:
        first = at
        at = _after(tokens, at, size, end)
        blocks.append(tokens[first:at])
    return blocks


def span(tokens: bytes, first: i64, end: i64) -> tuple[int, int]:
    """Where tokens ``[first, end)`` begin and end; 0 if those up to there are not in their shortest form."""
    length: i64 = len(tokens)
    start: i64 = body_at(tokens)
    if first and start:
        start = _after(tokens, start, first, length)
    return start, _after(tokens, start, end - first, length) if start else 0


def _after(tokens: bytes, at: i64, count: i64, end: i64) -> i64:
    """Where so many tokens end, or as many as there are: ids alone, or pairs alone. 0 if they are anything else."""
    pairs = tokens[at] == _PAIR_HEAD
    ids: i64 = 2 * count if pairs else count
    while at < end and ids > 0:
        if pairs and not ids & 1:
            at += 1
            if at == end or tokens[at - 1] != _PAIR_HEAD:
                return 0
        head: i64 = tokens[at]
        if head == 0xCD:
            at += 3
        elif head < 0x80:
            at += 1
        elif head == 0xCE:
            at += 5
        elif head == 0xCC:
            at += 2
        else:
            return 0
        ids -= 1
    return 0 if pairs and ids & 1 else at


Matcher = Callable[[bytes], object]
"""Says None of anything but what it is for."""


class _Walker:
    """Matches an array of so many tokens without a pattern of its own."""

    __slots__ = ("_head",)

    def __init__(self, head: bytes) -> None:
        self._head = head

    def match(self, tokens: bytes) -> bytes | None:
        return tokens if tokens.startswith(self._head) and are_tokens(tokens, len(self._head)) else None


_MAX_MATCHERS: Final = 64
_matchers: Final[dict[int, Matcher]] = {}
"""By number of tokens, for those that came first: to compile one takes as long as to match thousands of arrays."""


def matcher(count: int) -> Matcher | None:
    """What matches an array of so many tokens, all ids or all pairs, in its shortest form; None if there is none.

    An array that is known to be msgpack is counted by its header, so what comes after that may be of any number.
    """
    found = _matchers.get(count)
    if found is None and count < 1 << 32:
        head = array_head(count)
        if _COMPILED or len(_matchers) >= _MAX_MATCHERS:
            return _Walker(head).match
        found = re.compile(re.escape(head) + rb"(?:" + _IDS + rb"|" + _PAIRS + rb")", re.DOTALL).fullmatch
        _matchers[count] = found
    return found


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
    if _COMPILED:
        return cut(tokens, at, size)
    pattern = _patterns.get(size)
    if pattern is None:
        if len(_patterns) >= _MAX_PATTERNS:
            each = _each_token(tokens, at)
            return [b"".join(each[first : first + size]) for first in range(0, len(each), size)]
        pattern = _patterns[size] = re.compile(_TOKEN + rb"{%d}+" % size, re.DOTALL).findall
    return pattern(tokens, at)


def between(tokens: bytes, first: int, end: int) -> bytes:
    """Tokens ``[first, end)`` of an array that has them, as an array of their own in its shortest form."""
    if _COMPILED:
        start, stop = span(tokens, first, end)
        if stop:
            return array_head(end - first) + tokens[start:stop]
    return _encode(_decode(tokens)[first:end])


def joined(blocks: Sequence[bytes], size: int) -> bytes:
    """The token array of some blocks of so many tokens each, as :func:`divide` gives them."""
    return array_head(len(blocks) * size) + b"".join(blocks)
