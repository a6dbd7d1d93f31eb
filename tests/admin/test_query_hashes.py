"""Hashes of a question: read many at a time, as one by one would read them."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvbus.admin import query_hashes
from kvbus.admin.query_hashes import names_of, readings, some_names
from tests.admin.hashes import plain


def number(each):
    if isinstance(each, str):
        if re.fullmatch(r"-?[0-9]{1,20}", each):
            each = int(each)
        elif re.fullmatch(r"0[xX][0-9a-fA-F]{1,16}", each):
            each = int(each, 16)
        else:
            return None
    return each if -(2**63) <= each < 2**64 else None


def byte_string(each):
    is_one = isinstance(each, str) and re.fullmatch(r"(?:[0-9a-fA-F]{2}){1,64}", each)
    return bytes.fromhex(each) if is_one else None


def read(hashes):
    """What they may stand for, or what is said of them; and in how many turns."""
    work, turns = names_of(hashes), 0
    while True:
        try:
            next(work)
            turns += 1
        except StopIteration as done:
            return plain(done.value), turns
        except ValueError as error:
            return str(error), turns


HASH = st.one_of(
    st.integers(-(2**64), 2**65),
    st.integers(-(2**64), 2**65).map(str),
    st.integers(0, 2**64).map(hex),
    st.binary(min_size=1, max_size=65).map(bytes.hex),
    st.text("0123456789abcdefExX,.-+_ \n٣", max_size=5),
)


@given(st.one_of(st.lists(HASH, max_size=9), HASH.flatmap(lambda one: st.lists(st.just(one), max_size=9))))
@example(["1,2", "3"])
@example(["ab,cd"])
@example(["ab,cd,ef"])
@example(["1\n"])
@example([""])
@example(["12", "34"])  # both
@example(["1.0"])
@example(["1e3", "1E3"])
@example(["007", "-0"])
@example(["9" * 5000])
def test_many_at_a_time_are_what_they_are_one_by_one(hashes):
    kinds = [[kind(each) for each in hashes] for kind in (number, byte_string)]
    whole = [kind for kind in kinds if None not in kind]
    found, _ = read(hashes)
    if whole:
        assert found == whole
    elif (None, None) in (pairs := list(zip(*kinds, strict=True))):
        assert found.startswith(f"hashes[{pairs.index((None, None))}] is neither")
    else:
        assert found.startswith("hashes are all integers, or all")


@given(st.lists(HASH, max_size=9), st.integers(1, 3))
@example([1, "ab"], 1)
@example(["12", "ab", "1"], 1)
@example(["12", "34"], 1)
@example([-1, 2**64 - 1], 1)
def test_pieces_behind_each_other_are_what_they_are_together(hashes, size):
    parts = [hashes[first : first + size] for first in range(0, len(hashes), size)]
    pieces = [piece for part in parts if (piece := some_names(part)) is not None]
    found, _ = read(hashes)
    if not hashes:
        assert some_names(hashes) is None
    elif len(pieces) < len(parts) or not readings(pieces):
        assert isinstance(found, str)
    else:
        assert (plain(pieces), sum(each.size for each in pieces)) == (found, len(hashes))


@pytest.mark.parametrize(
    ("last", "said"), [("1", None), ("ab", "all integers, or all byte strings"), ("x", "hashes[6144] is neither")]
)
def test_a_turn_reads_some_of_them(last, said):
    """One that is wrong is looked for in turns as well."""
    hashes = ["7"] * 3 * query_hashes.TURN * query_hashes.PIECE + [last]
    found, turns = read(hashes)
    if said is None:
        assert found == [[7] * (len(hashes) - 1) + [1]]
        assert turns == 3
    else:
        assert said in found
        assert turns >= len(hashes) // query_hashes.FEW
