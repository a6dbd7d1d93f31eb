"""The anonymizer of captures, which replaces tokens, hashes, salts and names, so that a capture can be shared.

A payload is rewritten byte by byte. The msgpack headers and all lengths stay, and only values change. So a payload that
kvbus rejects is still rejected at the same position. An allow-list says which values stay: numbers on which kvbus's
decisions depend, known media and localities, times, and words of the engine's code (types of events, names of fields,
kinds of KV-cache groups). Every other value is replaced by a pseudonym. The key determines which pseudonym a value
gets, and no two values get the same one.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import lru_cache
from typing import Final

import msgspec

from kvbus.core.types import medium_key
from kvbus.tools.capture.format import Message

_ROUNDS: Final = 10
"""Number of rounds of the Feistel network that permutes values, as in NIST's FF1 for small domains.

The number is even, so that both halves of a value end in their original position.
"""

_CHUNK: Final = 4096
"""Maximum number of characters or bytes of a value that are permuted together.

A longer value is divided into chunks. The permutation of a chunk depends on the chunks before it.
"""

_BOUNDS: Final = (
    *(-(2**63), -(2**31), -(2**15), -(2**7), -(2**5)),
    *(0, 2**7, 2**8, 2**15, 2**16, 2**31, 2**32, 2**63, 2**64),
)
"""The first integer of each class of integers. A pseudonym is in the same class as its value.

So a pseudonym is encoded in as many bytes as its value. The bounds are the limits of msgpack's integer formats. 2^15
and 2^31 are the limits of positive numbers in its signed formats.
"""

_CHARACTERS: Final[Sequence[int]] = (0, 0x20, 0x40, 0x41, 0x7F, 0x80, 0x800, 0xD800, 0xE000, 0x10000, 0x110000)
"""The first code point of each class of characters. A character is replaced by one of the same class.

All characters of a class have the same length in UTF-8. ``@`` is the only character of its class and so stays
unchanged, because it separates the parts of topics.
"""

_OCTETS: Final[Sequence[int]] = (*_CHARACTERS[:6], 0x100)
"""The first value of each class of bytes, for texts that are not UTF-8. A byte is replaced by one of the same class."""

_FLOATS: Final = {4: (0x7F800000, 0x80000000), 8: (0x7FF0000000000000, 0x8000000000000000)}
"""Bit masks of a float, by the float's width in bytes: the exponent's bits, and the sign bit.

An infinity or a NaN has all bits of the exponent set.
"""


class Pseudonyms:
    """A keyed mapping of values to pseudonyms. Anyone who has the key can reverse the mapping.

    Args:
        key: any bytes. Equal keys give equal pseudonyms.
    """

    def __init__(self, key: bytes) -> None:
        self._key: Final = hashlib.blake2b(key, person=b"kvbus.anonymize").digest()
        self._keyed: Final = hashlib.blake2b(key=self._key, digest_size=8)

    def number(self, value: int) -> int:
        """Return the pseudonym of an integer from -2^63 up to 2^64 - 1.

        The pseudonym lies between the same two numbers of `_BOUNDS` as the integer, so msgpack encodes both in the same
        number of bytes.
        """
        at = bisect_right(_BOUNDS, value)
        low, size = _BOUNDS[at - 1], _BOUNDS[at] - _BOUNDS[at - 1]
        found = value - low
        while True:
            found = self._bits(b"n%d" % at, found, (size - 1).bit_length())
            if found < size:
                return low + found

    def octets(self, value: bytes) -> bytes:
        """Return the pseudonym of a byte string. It has the same length as the byte string.

        The last eight bytes are replaced like the integer that they encode, because some routers read only these bytes
        of a hash.
        """
        head, tail = value[:-8], value[-8:]
        if len(tail) < 8:
            return bytes(self._digits(b"b", [*value], [256] * len(value)))
        renamed = self._digits(b"b" + tail, [*head], [256] * len(head))
        return bytes(renamed) + self.number(int.from_bytes(tail, "big")).to_bytes(8, "big")

    def text(self, value: bytes, taken: Callable[[str], object] = lambda _: False) -> bytes:
        """Return the pseudonym of a text. It has the text's length in bytes, and is UTF-8 if the text is.

        If a pseudonym must not be used, the pseudonym of this pseudonym is tried next, and so on. The last one of
        this series is the text itself.

        Args:
            value: the text. ``taken`` must return False for it. Otherwise the search may never end.
            taken: function that returns whether a text must not be used as a pseudonym.
        """
        try:
            found, classes = value.decode(), _CHARACTERS
        except UnicodeDecodeError:
            found, classes = value.decode("latin-1"), _OCTETS
        while True:
            places = [bisect_right(classes, ord(character)) for character in found]
            lows = [classes[place - 1] for place in places]
            sizes = [classes[place] - low for place, low in zip(places, lows, strict=True)]
            digits = [ord(character) - low for character, low in zip(found, lows, strict=True)]
            renamed = self._digits(b"t", digits, sizes)
            found = "".join([chr(low + digit) for low, digit in zip(lows, renamed, strict=True)])
            if classes is _CHARACTERS:
                if not taken(found):
                    return found.encode()
            elif not _is_utf8(octets := found.encode("latin-1")):
                return octets

    def floating(self, bits: int, width: int) -> int:
        """Return the bits of the float that is the pseudonym of a float. A zero, an infinity or a NaN stays unchanged.

        Args:
            bits: the bits of the float.
            width: the size of the float in bytes.
        """
        exponent, sign = _FLOATS[width]
        if bits & exponent == exponent or not bits & ~sign:
            return bits
        while True:
            bits = self._bits(b"f", bits, 8 * width)
            if bits & exponent != exponent and bits & ~sign:
                return bits

    def _bits(self, domain: bytes, value: int, bits: int) -> int:
        """Return the integer that replaces ``value`` in a permutation of all integers of ``bits`` bits.

        A Feistel network computes it. ``domain`` selects the permutation.
        """
        low = bits - bits // 2
        left, right = value >> low, value & (1 << low) - 1
        here, there = (1 << bits - low) - 1, (1 << low) - 1
        for number in range(_ROUNDS):
            word = self._keyed.copy()
            word.update(b"%b %d %d" % (domain, number, right))
            left, right = right, left + int.from_bytes(word.digest(), "big") & here
            here, there = there, here
        return left << low | right

    def _digits(self, domain: bytes, digits: list[int], sizes: Sequence[int]) -> list[int]:
        """Return the pseudonym of ``digits``: a list of the same length, whose digit i is also below ``sizes[i]``.

        Two different lists never get the same pseudonym. ``domain`` selects one of many such mappings.
        """
        found: list[int] = []
        for at in range(0, len(digits), _CHUNK):
            end = at + _CHUNK
            found += self._chunk(domain, digits[at:end], sizes[at:end])
            domain = hashlib.blake2b(domain + array("Q", digits[at:end]).tobytes()).digest()
        return found

    def _chunk(self, domain: bytes, digits: list[int], sizes: Sequence[int]) -> list[int]:
        half = len(digits) // 2
        left, right = digits[:half], digits[half:]
        here, there = sizes[:half], sizes[half:]
        key = self._key + len(domain).to_bytes(2, "big") + domain
        for number in range(_ROUNDS):
            seed = key + bytes([number]) + array("Q", right).tobytes()
            words = array("Q", hashlib.shake_256(seed).digest(8 * len(left)))
            left = [(digit + word) % size for digit, word, size in zip(left, words, here, strict=True)]
            left, right, here, there = right, left, there, here
        return left + right


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


class _Role(Enum):
    """The role of a value in a payload, which follows from its position. It decides whether the value is replaced."""

    CONTENT = auto()
    """A value that is replaced by a pseudonym. If it is an array or a map, all values inside are replaced."""
    NUMBER = auto()
    """A number that stays unchanged, because kvbus's decisions depend on it: a size, a group, a rank, a time."""
    NUMBERS = auto()
    """A list of numbers that stay unchanged."""
    BATCH = auto()
    EVENTS = auto()
    EVENT = auto()
    WORD = auto()
    """A word of the engine's code, such as a field's name or the type of an event. It stays unchanged."""
    MEDIUM = auto()
    LOCALITY = auto()
    """The locality of a block. LOCAL and REMOTE stay unchanged, because LOCAL may mean the same as no locality."""
    SEVENTH = auto()
    """The seventh field of a store: the name of a LoRA adapter, or a map with a salt (SGLang 0.5.18 and 0.5.19)."""
    SALT_NAME = auto()
    """A key in the map with a salt that SGLang 0.5.18 and 0.5.19 send as the seventh field of a store."""


_C, _N, _W, _M = _Role.CONTENT, _Role.NUMBER, _Role.WORD, _Role.MEDIUM
_BATCH_ROW: Final = (_N, _Role.EVENTS, _N)
_BATCH_FIELDS: Final = {b"ts": _N, b"events": _Role.EVENTS, b"data_parallel_rank": _N, b"attn_dp_rank": _N}
_EVENT_FIELDS: Final = {
    b"type": _W,
    b"event_type": _W,
    b"block_size": _N,
    b"medium": _M,
    b"locality": _Role.LOCALITY,
    b"group_idx": _N,
    b"kv_cache_spec_kind": _W,
    b"kv_cache_spec_sliding_window": _N,
    b"remaining_copy_counts": _Role.NUMBERS,
}
_OF: Final = {_Role.EVENTS: _Role.EVENT, _Role.NUMBERS: _N}
"""By the role of an array: the role of its items."""

_TAG: Final = (_W,)
_ROWS: Final = {
    b"BlockStored": (*_TAG, _C, _C, _C, _N, _C, _M, _Role.SEVENTH, _C, _N, _W, _N),
    b"BlockRemoved": (*_TAG, _C, _M, _N),
}
"""By the tag of an event that is an array: the roles of the event's items."""

_is_word: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}").fullmatch
_STAYS: Final[dict[_Role, Callable[[str], bool]]] = {
    _W: lambda text: _is_word(text) is not None,
    _M: lambda text: medium_key(text) is not None,
    _Role.LOCALITY: lambda text: text in {"LOCAL", "REMOTE"},
    _Role.SALT_NAME: lambda text: text == "cache_salt",
}
"""By role: a function that returns whether a text in this role stays unchanged. Other texts get a pseudonym."""

_WIDTHS: Final = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
"""Number of bytes that follow the first byte of a msgpack number. The key is this first byte."""

_LENGTHS: Final = {0xD9: 1, 0xDA: 2, 0xDB: 4, 0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4}
"""By the first msgpack byte of a text, a byte string or an extension: how many bytes encode its length."""

_COUNTS: Final = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
"""By the first msgpack byte of an array or a map: how many bytes encode its number of items."""

_TIME: Final = 0xFF
"""The msgpack extension type of a timestamp."""

_REMEMBERED: Final = 1 << 18
"""Maximum number of integers whose pseudonyms are cached.

Computing a pseudonym takes fifty times as long as a look-up in the cache.
"""


@dataclass(slots=True)
class _Open:
    """An array or a map whose items are being read. The items of a map are alternately keys and values.

    The role of an item (:class:`_Role`) decides whether the item is copied or replaced.

    Attributes:
        left: number of unread items.
        role: role of all items that ``row``, ``name`` and ``fields`` do not name.
        row: roles of the first items of an array.
        name: role of the keys of a map; None in an array.
        fields: roles of the values of a map, by key.
    """

    left: int
    role: _Role = _Role.CONTENT
    row: tuple[_Role, ...] = ()
    name: _Role | None = None
    fields: Mapping[bytes, _Role] = field(default_factory=dict)
    _at: int = 0
    _value: _Role = _Role.CONTENT

    def next_role(self) -> _Role:
        """Count the next item of the array or map as read, and return its role: whether it is copied or replaced."""
        at = self._at
        self._at += 1
        self.left -= 1
        if self.name is None:
            return self.row[at] if at < len(self.row) else self.role
        if at & 1:
            return self._value
        self._value = self.role
        return self.name

    def read_text(self, value: bytes) -> None:
        """Remember ``value`` as the text that was read last in this array or map.

        If the text is a key of the map or the tag of an event, it shows what the following values are, and so how they
        are anonymized (their roles).
        """
        if self.name is not None:
            if self._at & 1:
                self._value = self.fields.get(value, self.role)
        elif self.row is _TAG and self._at == 1:
            self.row = _ROWS.get(value, _TAG)


def _opened(role: _Role, count: int, *, is_map: bool) -> _Open:
    """Return an `_Open` for an array or a map whose items are read next.

    Args:
        role: the role of the array or map.
        count: number of items of the array, or of key-value pairs of the map.
        is_map: whether it is a map.
    """
    if is_map:
        if role is _Role.BATCH:
            return _Open(2 * count, name=_W, fields=_BATCH_FIELDS)
        if role is _Role.EVENT:
            return _Open(2 * count, name=_W, fields=_EVENT_FIELDS)
        return _Open(2 * count, name=_Role.SALT_NAME if role is _Role.SEVENTH else _C)
    if role in _OF:
        return _Open(count, _OF[role])
    return _Open(count, row=_BATCH_ROW if role is _Role.BATCH else _TAG if role is _Role.EVENT else ())


def _bounds(data: bytes, at: int) -> tuple[int, int]:
    """Return the positions in ``data`` at which the content of a msgpack value begins and ends.

    ``at`` is the position at which the value's header begins.

    If the value is truncated or is not msgpack, the returned end is beyond the end of ``data``. The content of an array
    or a map is empty, because its items are separate values.
    """
    head = data[at]
    start, size = at + 1, 0
    if head in _WIDTHS:
        size = _WIDTHS[head]
    elif 0xA0 <= head <= 0xBF:
        size = head & 0x1F
    elif 0xD4 <= head <= 0xD8:
        start, size = at + 2, 1 << head - 0xD4
    elif head in _LENGTHS:
        start = at + 1 + _LENGTHS[head]
        size = int.from_bytes(data[at + 1 : start], "big")
        start += 0xC7 <= head <= 0xC9
    elif head in _COUNTS:
        start = at + 1 + _COUNTS[head]
    elif head == 0xC1:
        size = len(data)
    return (start, start + size) if start <= len(data) else (at + 1, len(data) + 1)


class Anonymizer:
    """An anonymizer of messages. It keeps no message.

    It replaces each value in a message by a pseudonym, which ``names`` computes.
    """

    def __init__(self, names: Pseudonyms) -> None:
        self._names: Final = names
        self._number: Final = lru_cache(_REMEMBERED)(names.number)
        self.unreadable = 0
        """Number of payloads so far that are not exactly one complete msgpack value."""

    def message(self, message: Message) -> Message:
        """Return the message with pseudonyms in its topic and payload. The time and the seq stay unchanged."""
        return Message(message.t, self.topic(message.topic), message.seq, self.payload(message.payload))

    def topic(self, topic: bytes) -> bytes:
        """Return the pseudonym of a topic. A leading ``kv@`` stays unchanged, because llm-d requires it."""
        if topic.startswith(b"kv@"):
            return b"kv@" + self._names.text(topic[3:])
        return self._names.text(topic, lambda name: name.startswith("kv@"))

    def payload(self, payload: bytes) -> bytes:
        """Return a payload in which pseudonyms replace the values. A pseudonym has the same length as its value.

        The payload may be a batch or any other bytes.
        """
        out = bytearray()
        complete, at = self._read(payload, out)
        self.unreadable += not (complete and at == len(payload))
        out += self._names.octets(payload[at:])
        return bytes(out)

    def _read(self, data: bytes, out: bytearray) -> tuple[bool, int]:
        """Anonymize the first msgpack value in ``data``, and append it to ``out``.

        Return whether the value is complete, and the position at which it ends or stops being msgpack.
        """
        stack = [_Open(1, _Role.BATCH)]
        at = 0
        while stack:
            if not stack[-1].left:
                stack.pop()
                continue
            if at == len(data):
                return False, at
            role = stack[-1].next_role()
            head = data[at]
            start, end = _bounds(data, at)
            out += data[at:start]
            if end > len(data):
                return False, start
            if 0x80 <= head <= 0x9F or head in _COUNTS:
                count = int.from_bytes(data[at + 1 : start], "big") if head in _COUNTS else head & 0x0F
                stack.append(_opened(role, count, is_map=head <= 0x8F or head >= 0xDE))
            elif start == end and (head <= 0x7F or head >= 0xE0):
                if role is not _N:
                    out[-1] = self._number(int.from_bytes(data[at:end], "big", signed=True)) & 0xFF
            elif start < end:
                out += self._renamed(data[at:start], data[start:end], role)
                if 0xA0 <= head <= 0xBF or 0xD9 <= head <= 0xDB:
                    stack[-1].read_text(data[start:end])
            at = end
        return True, at

    def _renamed(self, header: bytes, value: bytes, role: _Role) -> bytes:
        """Return the pseudonym of a number, a text, a byte string or an extension, without a header.

        Args:
            header: the msgpack header of the value.
            value: the content of the value.
            role: the role of the value in the payload.
        """
        head = header[0]
        if 0xA0 <= head <= 0xBF or 0xD9 <= head <= 0xDB:
            return self._text(value, role)
        if head in _WIDTHS:
            if role is _N:
                return value
            if head >= 0xCC:
                signed = head >= 0xD0
                number = self._number(int.from_bytes(value, "big", signed=signed))
                return number.to_bytes(len(value), "big", signed=signed)
            return self._names.floating(int.from_bytes(value, "big"), len(value)).to_bytes(len(value), "big")
        if header[-1] != _TIME or head <= 0xC6:
            return self._names.octets(value)
        if _is_time(header + value):
            return value
        while _is_time(header + (value := self._names.octets(value))):
            pass
        return value

    def _text(self, value: bytes, role: _Role) -> bytes:
        stays = _STAYS.get(role)
        if stays is None:
            return self._names.text(value)
        try:
            if stays(value.decode()):
                return value
        except UnicodeDecodeError:
            pass
        return self._names.text(value, stays)


def _is_time(raw: bytes) -> bool:
    try:
        msgspec.msgpack.decode(raw)
    except msgspec.DecodeError:
        return False
    return True
