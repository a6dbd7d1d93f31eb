"""Tests for the pseudonyms in anonymized captures.

Keyed permutations give each original name or number one pseudonym of the same kind and length.
"""

import math
import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvbus.tools.capture.anonymize import Pseudonyms

NAMES = Pseudonyms(b"key")


@pytest.mark.parametrize(("low", "high"), [(-(2**7), -33), (-32, -1), (0, 127), (128, 255)])
def test_small_ranges_of_numbers_are_permuted(low, high):
    numbers = range(low, high + 1)
    names = list(map(NAMES.number, numbers))
    assert sorted(names) == list(numbers)
    assert names != list(numbers)


def spelled(number):
    """Return whether a number is negative, and the numbers of bits of the narrowest signed type and the narrowest
    unsigned type that hold it.
    """
    signed = next(bits for bits in (6, 8, 16, 32, 64, 65) if -(2 ** (bits - 1)) <= number < 2 ** (bits - 1))
    return number < 0, signed, next(bits for bits in (7, 8, 16, 32, 64) if abs(number) < 2**bits)


@given(st.integers(-(2**63), 2**64 - 1), st.integers(-(2**63), 2**64 - 1))
@example(2**64 - 1, 2**63)
@example(-(2**63), -(2**31) - 1)
@example(2**31 - 1, 2**31)
def test_pseudonyms_of_numbers_keep_their_types_and_are_distinct(one, two):
    names = NAMES.number(one), NAMES.number(two)
    assert (names[0] == names[1]) == (one == two)
    for number, name in zip((one, two), names, strict=True):
        if number >= 0:
            assert spelled(number)[2] == spelled(name)[2]
            assert (number < 2**63, number < 2**31, number < 2**15) == (name < 2**63, name < 2**31, name < 2**15)
        else:
            assert spelled(number)[:2] == spelled(name)[:2]


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_pseudonyms_of_byte_strings_keep_their_lengths(one, two):
    names = NAMES.octets(one), NAMES.octets(two)
    assert (names[0] == names[1]) == (one == two)
    assert list(map(len, names)) == [len(one), len(two)]


def test_pseudonyms_permute_all_single_bytes():
    assert len({NAMES.octets(bytes([value])) for value in range(256)}) == 256


def test_the_last_8_bytes_of_a_string_are_renamed_like_a_number():
    number = 0x0123456789ABCDEF
    ends = {NAMES.octets(head * 24 + number.to_bytes(8, "big"))[-8:] for head in (b"a", b"b", b"")}
    assert ends == {NAMES.number(number).to_bytes(8, "big")}


@given(st.text(max_size=20), st.text(max_size=20))
@example("a" * 5000, "a" * 4999 + "b")
def test_pseudonyms_of_texts_are_utf8_of_the_same_length(one, two):
    names = NAMES.text(one.encode()), NAMES.text(two.encode())
    assert (names[0] == names[1]) == (one == two)
    for text, name in zip((one, two), names, strict=True):
        assert len(name) == len(text.encode())
        assert [len(character.encode()) for character in name.decode()] == [len(c.encode()) for c in text]


def is_utf8(raw):
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


@given(st.binary(min_size=1, max_size=8), st.binary(min_size=1, max_size=8))
@example(b"\xc3\xa9\xff", b"\xff")
def test_pseudonyms_of_invalid_utf8_are_invalid_utf8(one, two):
    names = NAMES.text(one), NAMES.text(two)
    assert (names[0] == names[1]) == (one == two)
    assert list(map(is_utf8, names)) == [is_utf8(one), is_utf8(two)]


def test_a_used_name_is_not_given_as_a_pseudonym():
    letters = [chr(code) for code in range(0x41, 0x7F)]
    taken = set("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    names = [NAMES.text(letter.encode(), taken.__contains__).decode() for letter in letters if letter not in taken]
    assert sorted(names) == sorted(set(letters) - taken)


@given(st.floats(), st.floats())
def test_pseudonyms_of_finite_floats_are_finite(one, two):
    names = []
    for value in (one, two):
        bits = int.from_bytes(struct.pack(">d", value), "big")
        name = NAMES.floating(bits, 8)
        names.append((bits, name))
        found = struct.unpack(">d", name.to_bytes(8, "big"))[0]
        assert math.isfinite(found) == math.isfinite(value)
        if value == 0 or not math.isfinite(value):
            assert name == bits
    assert (names[0][0] == names[1][0]) == (names[0][1] == names[1][1])


def test_pseudonyms_depend_on_the_key():
    other = Pseudonyms(b"other")
    assert Pseudonyms(b"key").number(2**40) == NAMES.number(2**40) != other.number(2**40)
    assert Pseudonyms(b"key").text(b"adapter") == NAMES.text(b"adapter") != other.text(b"adapter")
    assert Pseudonyms(b"key").octets(b"0123456789") == NAMES.octets(b"0123456789") != other.octets(b"0123456789")


def test_long_values_with_different_first_bytes_differ_to_the_end():
    """Two long values that differ only in their first byte get pseudonyms that also differ in later chunks.

    A long value is renamed in chunks. The pseudonym of each chunk depends on the chunks before it.
    """
    one, two = NAMES.octets(b"a" * 9000), NAMES.octets(b"b" + b"a" * 8999)
    assert one[5000:8992] != two[5000:8992]
    assert len(set(one[:4096])) > 100
