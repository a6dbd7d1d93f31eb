"""Tests for the body of a query to `kvbus index`, in which block hashes may have several forms."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.core.types import MAX_HASH_BYTES
from kvbus.index.questions import RefusedError, read, readings

NUMBERS = st.integers(-(2**63), 2**64 - 1)
WRITTEN = st.sampled_from([lambda n: n, str, lambda n: hex(n) if n >= 0 else str(n)])


@given(st.lists(st.tuples(NUMBERS, WRITTEN), min_size=1, max_size=20))
def test_a_query_may_write_integer_hashes_in_each_form(pairs):
    assert [number for number, _ in pairs] in readings([written(number) for number, written in pairs])


@given(st.lists(st.binary(min_size=1, max_size=MAX_HASH_BYTES), min_size=1, max_size=20))
def test_a_query_may_write_bytes_hashes_as_hexadecimal(hashes):
    assert hashes in readings([each.hex() for each in hashes])
    assert hashes in readings([each.hex().upper() for each in hashes])


def test_hashes_of_only_digits_are_read_as_integers_and_as_bytes():
    assert readings(["12", "34"]) == [[12, 34], [b"\x12", b"\x34"]]
    assert readings([]) == []


@pytest.mark.parametrize(
    "bad", [2**64, -(2**63) - 1, "", "0x", "0x" + "1" * 17, "1.0", "1e3", "abc", "1,2", " 1", "+1", "a" * 129, "\u0661"]
)
def test_an_invalid_hash_in_a_query_is_named(bad):
    with pytest.raises(ValueError, match=r"hashes\[1\] is neither"):
        readings([1, bad])


def test_a_query_may_not_mix_integer_and_bytes_hashes():
    with pytest.raises(ValueError, match="either all integers or all byte strings"):
        readings([1, "ab"])


@given(st.binary(max_size=40) | st.text(max_size=40).map(str.encode))
def test_no_query_body_causes_an_internal_error(body):
    for msgpack in (False, True):
        with contextlib.suppress(RefusedError):
            read(body, msgpack=msgpack)


def test_a_token_that_is_not_an_integer_is_refused():
    with pytest.raises(RefusedError, match="Expected `int`"):
        read(json.dumps({"tokens": [True]}).encode())
