"""Tests for encoded arrays of token ids: counting, decoding, dividing and joining them."""

import pytest

from kvbus.core.types import Reason
from kvbus.core.wire.tokens import (
    are_pairs,
    array_head,
    count_tokens,
    decode_tokens,
    divide,
    joined,
    slice_array,
)
from tests.doubles.payloads import pack
from tests.hostile.bad import DEEP as LEVELS

DEEP = b"\x91" * LEVELS + b"\x01"

IDS = [0, 127, 128, 255, 256, 65_535, 65_536, 2**32 - 1] * 8
PAIRS = [[first, second] for first in IDS[:8] for second in IDS[:8]]


def wide(tokens):
    """Return a token array in which each id takes nine bytes. Decoders accept it, but no engine sends it."""
    return array_head(len(tokens)) + b"".join(b"\xcf" + token.to_bytes(8, "big") for token in tokens)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 2**16 - 1, 2**16, 2**17])
def test_array_head_returns_the_msgpack_header_of_an_array(count):
    assert array_head(count) + b"\x00" * count == pack([0] * count)


class TestCountTokens:
    @pytest.mark.parametrize("tokens", [[], [0], IDS, PAIRS, IDS * 2000], ids=["none", "one", "ids", "pairs", "many"])
    def test_count_tokens_returns_the_number_of_tokens(self, tokens):
        assert count_tokens(pack(tokens)) == len(tokens)

    def test_count_tokens_accepts_longer_encodings(self):
        assert count_tokens(wide(IDS)) == len(IDS)
        assert count_tokens(b"\xdc\x00\x00") == 0

    @pytest.mark.parametrize(
        ("tokens", "reason"),
        [
            ([-1], Reason.TOKEN_RANGE),
            ([1, 2**32], Reason.TOKEN_RANGE),
            ([1, [2, 3]], Reason.WRONG_TYPE),
            ([1.0], Reason.WRONG_TYPE),
            (None, Reason.WRONG_TYPE),
        ],
    )
    def test_count_tokens_returns_the_reason_of_wrong_tokens(self, tokens, reason):
        assert count_tokens(pack(tokens)) is reason


class TestDivide:
    @pytest.mark.parametrize("tokens", [IDS, PAIRS], ids=["ids", "pairs"])
    @pytest.mark.parametrize("size", [1, 2, 16, 64])
    def test_divide_returns_slices_of_the_sent_tokens(self, tokens, size):
        blocks = divide(pack(tokens), size)
        assert blocks == [pack(tokens[at : at + size]) for at in range(0, len(tokens), size)]
        assert joined(blocks[1:3], len(tokens[size : 3 * size])) == pack(tokens[size : 3 * size])


class TestDecodeTokens:
    @pytest.mark.parametrize("tokens", [[], [0], [2**32 - 1], list(range(1000))])
    def test_decode_tokens_returns_token_ids(self, tokens):
        assert decode_tokens(pack(tokens)) == tokens

    @pytest.mark.parametrize("tokens", [[-1], [2**32], [1, 2, -(2**63)], [2**64 - 1], [[0, -1]], [[2**32, 0]]])
    def test_decode_tokens_rejects_ids_out_of_range(self, tokens):
        assert decode_tokens(pack(tokens)) is Reason.TOKEN_RANGE

    @pytest.mark.parametrize(
        "tokens",
        [
            None,
            5,
            "abc",
            b"abc",
            {},
            [1.0],
            ["1"],
            [None],
            [True],
            [[1]],
            [[1, 2, 3]],
            [1, [2, 3]],
            [[1, "2"]],
            [[[1, 2], 3]],
        ],
    )
    def test_decode_tokens_rejects_other_types(self, tokens):
        assert decode_tokens(pack(tokens)) is Reason.WRONG_TYPE

    @pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x91", b"\xdd\xff\xff\xff\xff", b"\x91\xa1\xff", b"\x81\x80\x01"])
    def test_decode_tokens_rejects_invalid_msgpack(self, raw):
        assert decode_tokens(raw) is Reason.WRONG_TYPE

    def test_decode_tokens_rejects_deep_nesting(self):
        assert decode_tokens(DEEP) is Reason.WRONG_TYPE


@pytest.mark.parametrize("count", [0, 1, 15, 16, 2**16])
def test_are_pairs_recognizes_pairs_after_every_array_header(count):
    assert are_pairs(pack([[1, 2]] * count)) is (count > 0)
    assert are_pairs(array_head(count) + b"\xdc\x00\x02\x01\x02" * count) is (count > 0)
    assert not are_pairs(pack([146] * count))


@pytest.mark.parametrize("spelled", [pack, wide], ids=["shortest", "wide"])
@pytest.mark.parametrize(("first", "end"), [(0, 1), (0, 64), (7, 8), (8, 48), (63, 64)])
def test_slice_array_returns_the_shortest_encoding(spelled, first, end):
    assert slice_array(spelled(IDS), first, end) == pack(IDS[first:end])
