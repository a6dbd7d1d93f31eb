"""The hashes of a question, in the engine's own numbers or texts: read some at a time, beside the stream."""

from __future__ import annotations

import re
from array import array
from collections.abc import Generator, Sequence
from typing import Any, Final, NamedTuple, cast

import msgspec

from kvbus.core.blocks.prefix_paths import NamedBlocks
from kvbus.core.types import MAX_HASH_BYTES

PIECE: Final = 1024
"""Hashes of which it is kept together where their blocks are."""

TURN: Final = 2
"""Pieces that are read in one go: 0.1 ms, in hexadecimal 0.8."""

FEW: Final = 128
"""Hashes that are looked at one by one in one go, to say which is wrong."""

_NUMBER: Final = r"(?:-?[0-9]{1,20}|0[xX][0-9a-fA-F]{1,16})"
_BYTES: Final = rf"(?:[0-9a-fA-F]{{2}}){{1,{MAX_HASH_BYTES}}}"
_OF_FRACTIONS: Final = ".eE"
_numbers: Final = re.compile(rf"{_NUMBER}(?:,{_NUMBER})*").fullmatch
_byte_strings: Final = re.compile(rf"{_BYTES}(?:,{_BYTES})*").fullmatch


class Names(NamedTuple):
    """What some hashes of a question stand for; where they cannot, None. Digits may be both.

    Attributes:
        numbers: integers of 64 bits.
        byte_strings: what was written in hexadecimal.
    """

    numbers: NamedBlocks | None
    byte_strings: NamedBlocks | None

    @property
    def size(self) -> int:
        """How many they are."""
        return max(len(each.names) for each in self if each is not None)


def some_names(hashes: Sequence[int | str], before: Names | None = None) -> Names | None:
    """What up to :data:`PIECE` hashes stand for; None: for nothing, or there are none.

    Args:
        hashes: these.
        before: what those before them stand for, if there are any: nothing else is tried.
    """
    numbers = _as_numbers(hashes) if before is None or before.numbers is not None else None
    byte_strings = _as_bytes(hashes) if before is None or before.byte_strings is not None else None
    if numbers is None and byte_strings is None:
        return None
    return Names(
        None if numbers is None else NamedBlocks(numbers), None if byte_strings is None else NamedBlocks(byte_strings)
    )


def readings(pieces: Sequence[Names]) -> list[list[NamedBlocks]]:
    """What pieces behind each other may stand for, all in one way."""
    ways = [[each.numbers for each in pieces], [each.byte_strings for each in pieces]]
    return [[each for each in way if each is not None] for way in ways if None not in way]


def names_of(hashes: Sequence[int | str]) -> Generator[None, None, list[Names]]:
    """The names that hashes may stand for, in pieces: all integers, or all byte strings in hexadecimal.

    Raises:
        ValueError: one of them is neither, or they are not of one kind.
    """
    pieces: list[Names] = []
    for first in range(0, len(hashes), PIECE):
        if first and first % (TURN * PIECE) == 0:
            yield
        some = some_names(hashes[first : first + PIECE], pieces[-1] if pieces else None)
        if some is None:
            break
        pieces.append(some)
    else:
        return pieces
    for at, each in enumerate(hashes):
        if _as_numbers([each]) is None and _as_bytes([each]) is None:
            raise ValueError(f"hashes[{at}] is neither an integer of 64 bits nor a byte string in hexadecimal")
        if at % FEW == FEW - 1:
            yield
    raise ValueError("hashes are all integers, or all byte strings in hexadecimal")


def _as_numbers(hashes: Sequence[int | str]) -> Sequence[int] | None:
    """All as integers of 64 bits, None if that is not what they are."""
    try:
        numbers: Sequence[int] | None = cast("Sequence[int]", hashes)
        fit = _fit(hashes)
    except TypeError:  # there are texts among them
        try:
            numbers = _decimal(hashes) or _any(hashes)
        except ValueError:  # a comma of its own
            return None
        fit = numbers is not None and _fit(numbers)
    return numbers if fit else None


def _fit(numbers: Sequence[Any]) -> bool:
    """Whether there are any, and all of 64 bits.

    Raises:
        TypeError: they are no numbers.
    """
    try:
        return len(array("Q", numbers)) > 0  # as most are; half of what a look at types and extremes takes
    except OverflowError:
        return bool(min(numbers) >= -(2**63) and max(numbers) < 2**64)


def _decimal(hashes: Sequence[int | str]) -> Sequence[int] | None:
    """As most texts are, several times as fast."""
    try:
        text = ",".join(hashes)  # type: ignore[arg-type]
        if not any(each in text for each in _OF_FRACTIONS):
            return msgspec.convert(hashes, list[int], strict=False)
    except (TypeError, msgspec.ValidationError):  # an integer beside texts; zeros before one
        pass
    return None


def _any(hashes: Sequence[int | str]) -> Sequence[int] | None:
    text = ",".join(map(str, hashes))
    if _numbers(text) is None:
        return None
    return [_number(each) for each in hashes] if "x" in text.lower() else list(map(int, hashes))


def _number(text: int | str) -> int:
    return int(text, 0 if text[:2] in {"0x", "0X"} else 10) if isinstance(text, str) else text


def _as_bytes(hashes: Sequence[int | str]) -> Sequence[bytes] | None:
    """All as byte strings, None if that is not what they are."""
    if any(not isinstance(each, str) or len(each) % 2 for each in hashes):
        return None
    texts = [str(each) for each in hashes]
    if _byte_strings(",".join(texts)) is None:
        return None
    try:
        return [bytes.fromhex(each) for each in texts]
    except ValueError:  # a comma of its own
        return None
