"""Keyed permutations of numbers, byte strings and texts: equal values get equal names, and different ones different.

Each is a Feistel network over the digits of a value. A value stays in its class: an integer in the width and sign that
msgpack writes it in, a text in its length in bytes. So what a decoder takes or refuses, it still takes or refuses.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_ROUNDS: Final = 10
"""Of a Feistel network: the number of NIST's FF1, for small domains. It is even, so halves end where they began."""

_CHUNK: Final = 4096
"""Digits that are permuted together; a longer value is a chain of chunks."""

_BOUNDS: Final = (
    *(-(2**63), -(2**31), -(2**15), -(2**7), -(2**5)),
    *(0, 2**7, 2**8, 2**15, 2**16, 2**31, 2**32, 2**63, 2**64),
)
"""Where the classes of integers begin. The bounds at 2^15 and 2^31 are those of positive numbers in signed types."""

_CHARACTERS: Final[Sequence[int]] = (0, 0x20, 0x40, 0x41, 0x7F, 0x80, 0x800, 0xD800, 0xE000, 0x10000, 0x110000)
"""Where the classes of characters begin: each has one length in UTF-8. An ``@`` stays, because it divides topics."""

_OCTETS: Final[Sequence[int]] = (*_CHARACTERS[:6], 0x100)
"""The same for what is no UTF-8, byte by byte."""

_FLOATS: Final = {4: (0x7F800000, 0x80000000), 8: (0x7FF0000000000000, 0x8000000000000000)}
"""By width: the bits of an exponent that makes no finite number, and the sign."""


class Pseudonyms:
    """One renaming of everything. Who has the key can undo it.

    Args:
        key: any bytes; two renamings with equal keys are the same.
    """

    def __init__(self, key: bytes) -> None:
        self._key: Final = hashlib.blake2b(key, person=b"kvbus.anonymize").digest()
        self._keyed: Final = hashlib.blake2b(key=self._key, digest_size=8)

    def number(self, value: int) -> int:
        """The name of an integer between -2^63 and 2^64, in its class."""
        at = bisect_right(_BOUNDS, value)
        low, size = _BOUNDS[at - 1], _BOUNDS[at] - _BOUNDS[at - 1]
        found = value - low
        while True:
            found = self._bits(b"n%d" % at, found, (size - 1).bit_length())
            if found < size:
                return low + found

    def octets(self, value: bytes) -> bytes:
        """The name of a byte string, of the same length.

        Its last eight bytes are renamed as the integer that they are, because some routers read no more of a hash.
        """
        head, tail = value[:-8], value[-8:]
        if len(tail) < 8:
            return bytes(self._digits(b"b", [*value], [256] * len(value)))
        renamed = self._digits(b"b" + tail, [*head], [256] * len(head))
        return bytes(renamed) + self.number(int.from_bytes(tail, "big")).to_bytes(8, "big")

    def text(self, value: bytes, taken: Callable[[str], object] = lambda _: False) -> bytes:
        """The name of a text: as many bytes, and UTF-8 if the value is. ``taken`` says which names are no choice.

        The value itself must not be taken, or no name may be found.
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
        """The name of a float of so many bytes, given and found by its bits. Zeros, infinities and NaN stay."""
        exponent, sign = _FLOATS[width]
        if bits & exponent == exponent or not bits & ~sign:
            return bits
        while True:
            bits = self._bits(b"f", bits, 8 * width)
            if bits & exponent != exponent and bits & ~sign:
                return bits

    def _bits(self, domain: bytes, value: int, bits: int) -> int:
        """A permutation of the integers of so many bits."""
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
        """A permutation of the tuples in which digit i is below ``sizes[i]``."""
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
