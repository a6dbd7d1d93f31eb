"""Tests for stores without tokens: the engine announces that a block with known tokens is now on another medium, too.

kvbus adds the known tokens to such a store.
"""

import pytest

from kvbus.core.types import Filtered
from tests.core.dsl import Bench
from tests.doubles.payloads import plain_all, store, tokens_of


def test_an_offload_without_tokens_gets_salt_session_and_keys_of_its_blocks():
    """If a store has no tokens, kvbus adds the tokens, the salt, the session id and the extra keys of its blocks.

    It takes them from the same blocks on another medium. Without salt and extra keys, the block of one tenant would be
    announced as a block for all tenants.
    """
    bench = Bench()
    salted = {"cache_salt": "s", "session_id": "t", "extra_keys": [["s"], None], "lookahead_token_ids": [[5], [6]]}
    bench.feed(store([1, 2], **salted), store([7, 8]))
    images = [[{"hash": "a"}], [], [{"hash": "b"}]]
    out = bench.feed(store([1, 7, 2], tokens=[], block_size=0, medium="CPU", mm_keys=images))
    first = {
        "mm_keys": images[:1],
        "cache_salt": "s",
        "session_id": "t",
        "extra_keys": [["s"]],
        "lookahead_token_ids": [[5]],
    }
    second = {"mm_keys": images[2:], "cache_salt": "s", "session_id": "t", "lookahead_token_ids": [[6]]}
    by_hash = sorted(out, key=lambda event: event["block_hashes"])
    cpu = {"medium": "CPU"}
    assert by_hash == plain_all(
        [store([1], **cpu, **first), store([2], 1, **cpu, **second), store([7], mm_keys=[[]], **cpu)]
    )


def test_an_offload_keeps_its_own_salt_and_keys():
    bench = Bench()
    bench.feed(store([1], cache_salt="s", extra_keys=[["s"]]))
    own = {"cache_salt": "o", "extra_keys": [["o"]]}
    (event,) = bench.feed(store([1], tokens=[], block_size=0, medium="CPU", **own))
    assert (event["cache_salt"], event["extra_keys"]) == ("o", [["o"]])


@pytest.mark.parametrize("fields", [{"group": 1}, {"hashes": [1, 7]}], ids=["another group", "one is unknown"])
def test_an_offload_of_partly_unknown_blocks_is_filtered(fields):
    bench = Bench()
    bench.feed(store([1, 2]))
    event = store(fields.pop("hashes", [1]), tokens=[], block_size=0, medium="CPU", **fields)
    assert bench.feed(event) == []
    assert bench.filtered == {Filtered.TOKENLESS: 1}


def test_an_offload_of_blocks_with_two_sizes_is_filtered():
    bench = Bench()
    bench.feed(store([1], block_size=32), store([2], block_size=48))
    assert bench.feed(store([1, 2], tokens=[], block_size=0, medium="CPU")) == []
    assert bench.filtered == {Filtered.TOKENLESS: 1}


@pytest.mark.parametrize(
    ("named", "stores"),
    [
        ([1, 2, 3], [([1, 2, 3], None)]),
        ([1, 3], [([1], None), ([3], 2)]),
        ([2, 3, 9], [([2, 3], 1), ([9], None)]),
        ([1, 9], [([1], None), ([9], None)]),
        ([2, 1], [([1], None), ([2], 1)]),
        ([3, 2, 1], [([1], None), ([2], 1), ([3], 2)]),
    ],
)
def test_offloaded_blocks_keep_their_known_parents(named, stores):
    bench = Bench()
    bench.feed(store([1, 2, 3]), store([9]))
    out = bench.feed(store(named, tokens=[], block_size=0, medium="CPU"))
    assert [(event["block_hashes"], event.get("parent_block_hash")) for event in out] == stores
    for event in out:
        assert event["token_ids"] == [token for block in event["block_hashes"] for token in tokens_of(block)]
    assert bench.filtered == bench.rejected == {}
