"""Tests for kvbus's decision which events of a batch it applies.

``test_normalizer`` tests each reason to refuse an event.
"""

import pytest

from kvbus.core.blocks.index import MAX_RUN, MAX_SHARED
from kvbus.core.types import Filtered, Reason
from tests.core.dsl import Bench
from tests.doubles.payloads import plain_all, removed, store, tokens_of


@pytest.mark.parametrize("keys", [None, "each", "none"])
def test_a_long_store_is_split_into_a_chain_of_stores(keys):
    hashes = list(range(1, 2 * MAX_RUN + 2))
    named = {"each": [["k", block] for block in hashes], "none": [], None: None}[keys]
    events = Bench().feed(store(hashes, 9000, extra_keys=named, novelty=1, mm_keys=hashes))
    assert [event["block_hashes"] for event in events] == [hashes[:MAX_RUN], hashes[MAX_RUN:-1], hashes[-1:]]
    assert [event["parent_block_hash"] for event in events] == [9000, MAX_RUN, 2 * MAX_RUN]
    assert [token for event in events for token in event["token_ids"]] == [
        token for block in hashes for token in tokens_of(block)
    ]
    assert [event["novelty"] for event in events] == [1] * 3
    assert [event["mm_keys"] for event in events] == [event["block_hashes"] for event in events]
    if keys == "each":
        assert [key for event in events for key in event["extra_keys"]] == named
    else:
        assert {str(event.get("extra_keys")) for event in events} == {str(named)}


@pytest.mark.parametrize("name", ["token_ids", "block_size"])
@pytest.mark.parametrize("before", [0, 8])
def test_a_store_that_lacks_a_required_field_is_rejected(name, before):
    bench = Bench()
    for n in range(before):
        bench.feed(store([10 + 2 * n, 11 + 2 * n]))
    event = {field: value for field, value in store([1]).items() if field != name}
    assert bench.feed(event, store([2])) == plain_all([store([2])])
    assert bench.rejected == {Reason.MISSING_FIELD: 1}
    assert bench.stats.stored == before + 1


def test_the_stores_of_thousands_of_adapters_keep_their_adapter_ids():
    bench = Bench()
    for n in range(5000):
        (event,) = bench.feed(store([n], lora_id=n))
        assert event["lora_id"] == n
    assert (bench.stats.stored, bench.rejected) == (5000, {})
    assert [event["lora_id"] for event in plain_all(bench.normalizer.announce())] == list(range(5000))


@pytest.mark.parametrize("kind", [None, "mamba"])
def test_stores_with_very_long_fields_are_not_cached(kind):
    bench = Bench()
    long = [store([n], lora_name="x" * MAX_SHARED + str(n), kv_cache_spec_kind=kind, group=1) for n in (1, 2)]
    left = plain_all(long) if kind is None else []
    assert bench.feed(store([8, 9]), *long) == plain_all([store([8, 9])]) + left
    assert bench.feed(*[removed([n], group=1) for n in (1, 2)]) == plain_all(
        [removed([n], group=1) for n in (1, 2) if left]
    )
    assert bench.filtered == ({} if left else {Filtered.GROUP: 4})


def test_a_learned_block_size_applies_to_all_adapters_of_a_group():
    """If kvbus learns a block size from a store of one LoRA adapter, it applies it to the blocks of all adapters.

    A store has a larger block than earlier stores of its group (none). This shows that the blocks without a group
    number are radix nodes, so kvbus cuts them. It does not cut the blocks of group 5.
    """
    bench = Bench()
    bench.feed(store([1], lora_id=1), store([2], lora_id=2), store([3], lora_id=3, group=5))
    bench.feed(store([4], block_size=24, lora_id=1))
    assert bench.stats.rebuilds == 1
    (again,) = bench.feed(store([5], lora_id=2))
    assert (len(again["block_hashes"]), again["block_size"]) == (2, 8)
    assert bench.feed(store([6], lora_id=3, group=5)) == plain_all([store([6], lora_id=3, group=5)])
    assert bench.announced().blocks == bench.router.blocks


def test_a_restarted_normalizer_rejects_and_filters_as_before():
    bench = Bench(max_groups=2)
    bench.feed(store([1], group=1), store([2], group=2, kv_cache_spec_kind="mamba"))
    bench.restart()
    assert bench.feed(store([3], group=3), store([b"x"], group=1), removed([4], group=2)) == []
    assert bench.rejected == {Reason.TOO_MANY_GROUPS: 1, Reason.HASH_KIND: 1}
    assert bench.filtered == {Filtered.GROUP: 2}
    assert bench.normalizer.full


def test_a_store_with_tokens_overrules_the_block_size_of_stores_without_tokens():
    bench = Bench()
    bench.feed(store([1, 2], tokens=[], block_size=8))
    assert bench.normalizer.engine_block_size == 8
    bench.feed(store([1, 2]))
    bench.feed(store([1, 2], tokens=[], block_size=8))
    assert bench.normalizer.engine_block_size == 16


def test_a_tail_block_may_be_the_first_block_of_its_group():
    """A block that is smaller than the configured block size is a tail block, even if it is the first block of its
    group.

    kvbus does not announce tail blocks, but announces the later blocks of the configured size.
    """
    bench = Bench(block_size=64)
    bench.feed(store([1]), store([2]))
    for n in (3, 5):
        event = store([n, n + 1], block_size=64)
        assert bench.feed(event, store([n + 90])) == plain_all([event])
    assert bench.filtered == {Filtered.TAIL: 4}


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("extra_keys", [None], [1]),
        ("extra_keys", [["a"]], [["a"], None]),
        ("cache_salt", "s", 5),
        ("session_id", "s", ["s"]),
        ("session_id", "s" * MAX_SHARED + "s", 5),
        ("lookahead_token_ids", [[1]], [[-1]]),
    ],
)
def test_every_store_is_checked_for_odd_values_of_carried_fields(field, good, bad):
    bench = Bench(block_size=16)
    for n in range(40):
        bench.feed(store([n]))
    for n in range(100, 106, 2):
        event = store([n], **{field: good})
        odd = store([n + 1], **{field: bad})
        assert bench.feed(event, odd, event) == plain_all([event, odd])
    assert bench.filtered == {Filtered.COPY: 3, Filtered.ODD_FIELD: 3}
    assert [event.get(field) for event in plain_all(bench.normalizer.announce())][-6:] == [good, bad] * 3
