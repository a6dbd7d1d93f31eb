"""Tests for copies of a block: the number of copies that a removal ends, by the setting ``duplicates`` or by the
engine's own counts.
"""

import pytest
from msgspec import msgpack

from kvbus.core.types import Filtered, Reason
from kvbus.core.wire.codec import decode
from kvbus.core.wire.schema import Batch
from tests.core.dsl import Bench
from tests.doubles.payloads import plain_all, removed, store


def test_a_second_salt_of_a_live_hash_is_not_announced():
    """A store of a live hash with another salt is not announced.

    Recorded engines do not send one: their hashes include the salt.
    """
    bench = Bench()
    assert bench.feed(store([1], cache_salt="red")) == plain_all([store([1], cache_salt="red")])
    assert bench.feed(store([1], cache_salt="blue")) == []
    assert bench.filtered[Filtered.COPY] == 1
    assert bench.feed(removed([1])) == []
    assert bench.feed(removed([1])) == plain_all([removed([1])])


class TestRemainingCopyCounts:
    @pytest.mark.parametrize("rule", ["count", "last", "ignore"])
    def test_remaining_copy_counts_decide_which_removals_are_sent(self, rule):
        """The counts of remaining copies that an engine sends (vllm#48933) take precedence over every value of
        ``duplicates``.
        """
        bench = Bench(duplicates=rule)
        for _ in range(3):
            bench.feed(store([1, 2]))
        assert bench.feed(removed([1, 2], remaining_copy_counts=[1, 0])) == plain_all([removed([2])])
        assert bench.feed(removed([1])) == plain_all([removed([1])])

    def test_remaining_copy_counts_of_unknown_blocks_are_filtered(self):
        bench = Bench()
        assert bench.feed(removed([1, 2], remaining_copy_counts=[1, 0])) == []
        assert bench.filtered == {Filtered.UNKNOWN_BLOCK: 2}

    @pytest.mark.parametrize("said", [None, [], [1], [1, -1], "ab", [1, "a"], {1: 2}, [1, 2**64 - 1, 3]])
    def test_invalid_remaining_copy_counts_are_ignored(self, said):
        bench = Bench()
        bench.feed(store([1, 2]), store([1, 2]))
        assert bench.feed(removed([2, 1], remaining_copy_counts=said)) == []
        assert bench.feed(removed([2, 1], remaining_copy_counts=said)) == plain_all([removed([2, 1])])
        assert bench.rejected == {}

    def test_remaining_copy_counts_are_not_sent_to_routers(self):
        bench = Bench()
        bench.feed(store([1]))
        (event,) = bench.feed(removed([1], remaining_copy_counts=[0]))
        assert "remaining_copy_counts" not in event

    def test_repeated_stores_are_not_copies_for_an_engine_with_remaining_copy_counts(self):
        """With ``kv_cache_report_mode=full`` the engine stores a block again at each cache hit.

        kvbus must not count these stores as copies. It removes the block at the first removal, which says that no copy
        remains.
        """
        bench = Bench()
        for _ in range(5):
            bench.feed(store([1]))
        assert bench.feed(removed([1], remaining_copy_counts=[0])) == plain_all([removed([1])])


def test_remaining_copy_counts_are_decoded_from_the_encoding_of_vllm():
    """kvbus reads ``remaining_copy_counts`` in the form in which vllm#48933's own test of the encoding sends it.

    There, the field is in a map, and is missing if the engine does not know the counts.
    """
    body = msgpack.encode(
        [
            1.0,
            [
                {
                    "type": "BlockRemoved",
                    "block_hashes": [b"\xab" * 32],
                    "medium": "GPU",
                    "locality": "REMOTE",
                    "remaining_copy_counts": [2],
                }
            ],
            0,
        ]
    )
    batch = decode(body)
    assert isinstance(batch, Batch)
    assert batch.unknown is None
    assert not batch.rejects
    assert Reason.WRONG_TYPE not in batch.rejects
