"""The seal of one file: what opens, and that nothing else does."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.daemon.state_file import SEAL_BYTES, WRAPPED_BYTES
from kvbus.daemon.state_seal import begin, open_with

KEY, OTHER = b"k" * 32, b"o" * 32


@given(st.binary(max_size=300), st.integers(0, 2**62), st.binary(max_size=40))
def test_what_was_sealed_opens_at_its_place_and_nowhere_else(plain: bytes, at: int, head: bytes) -> None:
    wrapped, seal = begin(KEY, b"header", os.urandom)
    assert len(wrapped) == WRAPPED_BYTES
    sealed = seal.seal(at, head, plain)
    assert len(sealed) == len(plain) + SEAL_BYTES
    again = open_with(KEY, b"header", wrapped)
    assert again is not None
    assert again.open(at, head, sealed) == plain
    assert again.open(at + 1, head, sealed) is None
    assert again.open(at, head + b"x", sealed) is None
    assert again.open(at, head, sealed[:-1]) is None
    _, another = begin(KEY, b"header", os.urandom)
    assert another.open(at, head, sealed) is None


@pytest.mark.parametrize("bit", range(0, 8 * WRAPPED_BYTES, 7))
def test_a_file_s_key_opens_with_its_own_header_alone(bit: int) -> None:
    wrapped, _ = begin(KEY, b"header", os.urandom)
    assert open_with(KEY, b"header", wrapped) is not None
    assert open_with(OTHER, b"header", wrapped) is None
    assert open_with(KEY, b"headeR", wrapped) is None
    flipped = bytearray(wrapped)
    flipped[bit // 8] ^= 1 << bit % 8
    assert open_with(KEY, b"header", bytes(flipped)) is None


def test_no_two_files_have_a_key_or_a_nonce_in_common() -> None:
    found = [begin(KEY, b"header", os.urandom)[0] for _ in range(100)]
    assert len({wrapped[:24] for wrapped in found}) == 100
    sealed = {begin(KEY, b"header", os.urandom)[1].seal(0, b"", b"plain") for _ in range(100)}
    assert len(sealed) == 100
