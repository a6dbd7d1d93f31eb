"""Events that are plainly in order, among others that are not."""

import pytest

from kvbus.core.types import Filtered, Reason
from tests.core.dsl import Bench
from tests.doubles.payloads import plain_all, removed, store


def settled(**rules):
    """A group whose size is proven, with blocks 1 to 20 in one chain."""
    bench = Bench(**rules)
    for first in range(1, 20, 2):
        bench.feed(store([first, first + 1], first - 1 or None, lora_id=None, lora_name=None))
    return bench


def whole(hashes, parent=None, **fields):
    return store(hashes, parent, lora_id=None, lora_name=None, **fields)


@pytest.mark.parametrize(
    "odd",
    [
        whole([50, 50]),
        whole([50], tokens=[1] * 15),
        whole([50], medium="HBM"),
        whole([50], 50),
        whole([50, 51], extra_keys=[None]),
        whole([50], session_id=5),
        whole([50], lookahead_token_ids=[[-1]]),
        whole([b"x"]),
    ],
    ids=["twice", "tokens", "medium", "parent", "keys", "session", "lookahead", "kind"],
)
def test_an_odd_event_is_counted_and_those_around_it_leave(odd):
    bench = settled()
    assert bench.feed(whole([30], 20), odd, whole([31], 30)) == plain_all([whole([30], 20), whole([31], 30)])
    assert sum(bench.rejected.values()) == 1


def test_at_the_limit_a_store_is_refused_and_the_next_one_may_fit():
    bench = settled(max_blocks=22)
    out = bench.feed(whole([30, 31, 32]), whole([33]), whole([34]), whole([35]), removed([33]), whole([36]))
    assert [event["block_hashes"] for event in out] == [[33], [34], [33], [36]]
    assert bench.rejected == {Reason.INDEX_FULL: 2}


def test_a_group_that_is_left_out_is_counted_and_the_others_leave():
    bench = settled()
    mamba = whole([60], group=1, kv_cache_spec_kind="mamba")
    for count in (1, 2, 3):
        assert len(bench.feed(mamba, whole([30 + count], 20), removed([60], group=1))) == 1
        assert bench.filtered == {Filtered.GROUP: 2 * count}


def test_fields_of_a_request_go_with_their_blocks():
    bench = settled()
    events = [whole([30 + n], 20, session_id=f"s{n % 3}", cache_salt="x") for n in range(6)]
    assert bench.feed(*events) == plain_all(events)
    assert {event["session_id"] for event in plain_all(bench.normalizer.announce()) if "session_id" in event} == {
        "s0",
        "s1",
        "s2",
    }


def test_the_first_store_on_another_medium_makes_its_table():
    bench = settled()
    bench.feed(whole([20], 19, medium="CPU"))
    assert bench.feed(whole([19], 18, medium="CPU"), whole([20], 19, medium="DISK")) == plain_all(
        [whole([19], 18, medium="CPU"), whole([20], 19, medium="DISK")]
    )


def test_one_hash_is_one_object():
    bench = settled()
    bench.feed(whole([2**40], 20))
    blocks = bench.normalizer.index.tables[None, "GPU"].blocks
    bench.feed(whole([60], 2**40))
    assert blocks[60].parent is blocks[2**40].hashes[0]
