"""Tests for the rules by which kvbus refuses a single event: each violation has one reason."""

import pytest

from kvbus.core.normalizing.admission import check_hashes, check_removed, check_stored
from kvbus.core.types import MEDIA, Reason, medium_key
from kvbus.core.wire.schema import BlockRemoved, BlockStored
from tests.doubles.payloads import payload, removed, store
from tests.typed import well_formed


def checked(event):
    (decoded,) = well_formed(payload(event)).events
    if isinstance(decoded, BlockStored):
        return check_stored(decoded)
    assert isinstance(decoded, BlockRemoved)
    return check_removed(decoded)


@pytest.mark.parametrize("hashes", [[1, b"x"], [b"x", 1], [b""], [b"x", b""], [b"x" * 65]], ids=repr)
def test_mixed_empty_or_too_long_hashes_are_rejected(hashes):
    assert check_hashes(hashes) is Reason.HASH_KIND
    assert checked(store(hashes)) is Reason.HASH_KIND
    assert checked(removed(hashes)) is Reason.HASH_KIND


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (store([1], b"x"), Reason.HASH_KIND),
        (store([b"x"], 1), Reason.HASH_KIND),
        (store([b"x"], b""), Reason.HASH_KIND),
        (store([b"x"], b"x" * 65), Reason.HASH_KIND),
        (store([1], tokens=[-1] * 16), Reason.TOKEN_RANGE),
        (store([1], tokens=[0] * 15 + [2**32]), Reason.TOKEN_RANGE),
        (store([1], tokens=[1.0] * 16), Reason.WRONG_TYPE),
        (store([1], tokens=["1"] * 16), Reason.WRONG_TYPE),
        (store([1], tokens=None) | {"token_ids": None}, Reason.WRONG_TYPE),
        (store([1], tokens=[[1, 2, 3]] * 16), Reason.WRONG_TYPE),
        (store([1], tokens=[0] * 15), Reason.TOKEN_COUNT),
        (store([1], tokens=[0] * 17), Reason.TOKEN_COUNT),
        (store([1, 2], tokens=[0] * 16), Reason.TOKEN_COUNT),
        (store([1, 2], tokens=[0] * 33, block_size=0), Reason.TOKEN_COUNT),
        (store([1], tokens=[0] * 16, block_size=2**31), Reason.TOKEN_COUNT),
        (store([1], tokens=[0] * 16, block_size=-1), Reason.BLOCK_SIZE),
        (store([1], tokens=[0] * 16, block_size=2**31 + 1), Reason.BLOCK_SIZE),
        (store([1], tokens=[0] * 16, block_size=2**64 - 1), Reason.BLOCK_SIZE),
        (store([1], tokens=[], block_size=-(2**63)), Reason.BLOCK_SIZE),
        (store([1, 1]), Reason.DUPLICATE_HASH),
        (store([b"x", b"y", b"x"]), Reason.DUPLICATE_HASH),
        (store([1], medium="HBM"), Reason.UNKNOWN_MEDIUM),
        (store([1], medium=""), Reason.UNKNOWN_MEDIUM),
        (removed([1], medium="HBM"), Reason.UNKNOWN_MEDIUM),
    ],
)
def test_an_event_that_breaks_a_rule_is_rejected_with_its_reason(event, reason):
    assert checked(event) is reason


@pytest.mark.parametrize("medium", [None, *MEDIA, *(name.lower() for name in MEDIA)])
def test_a_removal_is_checked_into_the_key_of_its_medium(medium):
    assert checked(store([1], medium=medium)) == 16
    assert checked(removed([1], medium=medium)) == medium_key(medium)


@pytest.mark.parametrize(("hashes", "size"), [([1], 32), ([1, 2], 16), ([1, 2, 3, 4], 8)])
def test_a_block_size_of_zero_is_computed_from_tokens_and_hashes(hashes, size):
    (event,) = well_formed(payload(store(hashes, tokens=list(range(32)), block_size=0))).events
    assert isinstance(event, BlockStored)
    assert check_stored(event) == 32
    assert event.block_size == size


@pytest.mark.parametrize(
    "event",
    [
        store([], tokens=list(range(16))),
        store([], tokens=[]),
        store([1], tokens=[], block_size=0),
        store([1, 2], tokens=[]),
        removed([]),
        removed([1, 1]),
    ],
    ids=["no hashes", "nothing", "no tokens", "no tokens, a size", "nothing gone", "two copies gone"],
)
def test_odd_events_of_real_engines_are_accepted(event):
    assert not isinstance(checked(event), Reason)
