"""Batches that wait: order, limits, and nothing left behind."""

from hypothesis import given
from hypothesis import strategies as st

from kvbus.core.sequencing.reorder_buffer import ReorderBuffer


def held(*seqs, max_batches=1000, max_bytes=10**6):
    kept: ReorderBuffer[bytes] = ReorderBuffer(max_batches, max_bytes)
    for seq in seqs:
        kept.add(seq, b"x" * 10)
    return kept


def test_lowest_and_highest_whatever_the_order():
    kept = held(5, 3, 9, 4)
    assert (kept.first, kept.last, list(kept), len(kept), kept.bytes) == (3, 9, [3, 4, 5, 9], 4, 40)
    assert 4 in kept
    assert 6 not in kept


def test_taken_in_order():
    kept = held(3, 4, 7)
    assert kept.take(2) is None
    assert kept.take(3) == b"x" * 10
    assert (kept.first, len(kept), kept.bytes) == (4, 2, 20)
    kept.take(4)
    assert list(kept) == [7]
    kept.take(7)
    assert (len(kept), kept.bytes, list(kept)) == (0, 0, [])


def test_limits_in_number_and_bytes():
    kept = held(1, 2, max_batches=2)
    assert not kept.fits(b"")
    kept = held(1, 2, max_bytes=25)
    assert kept.fits(b"12345")
    assert not kept.fits(b"123456")


def test_one_batch_always_fits():
    kept: ReorderBuffer[bytes] = ReorderBuffer(0, 0)
    assert kept.fits(b"x" * 1000)


def test_letting_go_from_either_end():
    kept = held(1, 2, 3, 7, 8, 9)
    kept.drop_last()
    assert kept.drop_before(3) == 2
    assert kept.drop_from(8) == 1
    assert list(kept) == [3, 7]
    kept.clear()
    assert (len(kept), kept.bytes) == (0, 0)


@given(st.lists(st.tuples(st.sampled_from(["add", "take", "last", "before", "from"]), st.integers(0, 30))))
def test_as_a_sorted_dictionary_would(steps):
    kept: ReorderBuffer[bytes] = ReorderBuffer(10**6, 10**6)
    model: dict[int, bytes] = {}
    for what, seq in steps:
        if what == "add" and seq not in model:
            kept.add(seq, bytes(seq))
            model[seq] = bytes(seq)
        elif what == "take" and model and seq == min(model):
            assert kept.take(seq) == model.pop(seq)
        elif what == "last" and model:
            kept.drop_last()
            del model[max(model)]
        elif what in ("before", "from"):
            gone = [n for n in model if (n < seq if what == "before" else n >= seq)]
            assert (kept.drop_before(seq) if what == "before" else kept.drop_from(seq)) == len(gone)
            for n in gone:
                del model[n]
        assert list(kept) == sorted(model)
        assert len(kept) == len(model)
        assert kept.bytes == sum(map(len, model.values()))
        assert all(n in kept for n in model)
        if model:
            assert (kept.first, kept.last) == (min(model), max(model))
