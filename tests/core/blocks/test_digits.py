"""Token ids out of a JSON text in C: what it takes is what msgspec takes, and it takes every plain list."""

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvbus.core.blocks.prefix_labels import packed
from tests.digits import packed_digits

IDS = st.lists(st.integers(0, 2**32 - 1), min_size=1)
SPACE = st.text(" \t\r\n", max_size=2)
ODD = st.text('0123456789,,,  -+.eE[]{}"\\\tn\0é', max_size=40)


@pytest.fixture(scope="module")
def digits():
    return packed_digits()


def whole(digits, text):
    return digits(text, 0, len(text))


@given(ids=IDS, space=SPACE)
@example(ids=[0, 9, 10, 2**32 - 1, 999_999_999, 1_000_000_000], space="")
def test_a_list_of_ids_is_packed_however_it_is_spaced(digits, ids, space):
    text = f"{space},{space}".join(map(str, ids)).join((space, space)).encode()
    assert whole(digits, text) == packed(ids)


@given(text=ODD | st.lists(st.integers(-3, 2**66) | st.floats(), max_size=4).map(lambda each: str(each)[1:-1]))
@example(text="01")
@example(text="1,")
@example(text=",1")
@example(text="1 2")
@example(text="4294967296")
@example(text="18446744073709551617")
@example(text="9" * 400)
def test_what_it_takes_is_what_msgspec_takes(digits, text):
    found = whole(digits, text.encode())
    try:
        known = packed(msgspec.json.decode(f"[{text}]", type=list[int]))
    except ValueError:  # msgspec's errors are among them
        known = None
    assert found is None or found == known


@given(ids=IDS, before=st.binary(max_size=9), behind=st.binary(max_size=9))
def test_it_reads_a_part_of_a_text_and_nothing_beside_it(digits, ids, before, behind):
    part = ",".join(map(str, ids)).encode()
    assert digits(before + part + behind, len(before), len(before + part)) == packed(ids)


@pytest.mark.parametrize(("begin", "end"), [(-1, 1), (1, 0), (0, 3), (2**62, 2**62)])
def test_a_part_that_is_not_within_the_text_is_an_error(digits, begin, end):
    with pytest.raises(ValueError, match="not within the text"):
        digits(b"12", begin, end)


@pytest.mark.parametrize("text", ["12", bytearray(b"12"), None])
def test_a_text_is_bytes(digits, text):
    with pytest.raises(TypeError):
        digits(text, 0, 2)
