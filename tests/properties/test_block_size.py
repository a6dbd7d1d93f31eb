"""Tests that kvbus learns the right block size of an engine from stores in any order."""

import math

from hypothesis import given
from hypothesis import strategies as st

from kvbus.core.normalizing.block_size import SETTLE_EVENTS, BlockSizeDetector, Treatment

SIZES = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128])
STORES = st.lists(st.tuples(SIZES, st.sampled_from([1, 1, 1, 2, 5])), min_size=1, max_size=60)
PINNED = st.one_of(st.none(), st.sampled_from([1, 4, 16]))


@given(STORES, PINNED, st.booleans())
def test_the_treatment_of_each_block_size_is_always_possible(stores, pinned, numbered):
    detector = BlockSizeDetector(pinned, numbered)
    for size, blocks in stores:
        detector.observe(size, blocks)
        base, treatment = detector.base, detector.treatment(size, blocks)
        assert base > 0
        if treatment is Treatment.NATIVE:
            assert size == base
        if treatment is Treatment.REBLOCK:
            assert size % base == 0
        if treatment is Treatment.COARSE:
            assert size > detector.size
            assert size % detector.size == 0
        if treatment is Treatment.TAIL:
            assert blocks == 1
            assert size < max(detector.size, base)


@given(STORES, PINNED, st.booleans())
def test_the_detector_reports_every_change_of_an_earlier_treatment(stores, pinned, numbered):
    detector = BlockSizeDetector(pinned, numbered)
    before: dict[tuple[int, int], Treatment] = {}
    base = 0
    for store in stores:
        changed = detector.observe(*store)
        if before and not changed:
            assert detector.base == base
            assert {known: detector.treatment(*known) for known in before} == before
        before[store] = Treatment.NATIVE
        before = {known: detector.treatment(*known) for known in before}
        base = detector.base


@given(st.lists(st.tuples(SIZES, st.just(1)), max_size=80), st.integers(2, 8), PINNED)
def test_single_blocks_do_not_change_the_proven_size_of_a_numbered_group(singles, blocks, pinned):
    detector = BlockSizeDetector(pinned, numbered=True)
    detector.observe(48, blocks)
    for size, one in singles:
        assert not detector.observe(size, one)
    assert detector.size == 48
    assert detector.treatment(48, blocks) is (Treatment.NATIVE if pinned is None else Treatment.REBLOCK)


@given(STORES)
def test_single_blocks_below_the_configured_size_do_not_change_the_detector(stores):
    one, other = BlockSizeDetector(16), BlockSizeDetector(16)
    for size, blocks in stores:
        one.observe(size, blocks)
        if blocks > 1 or size >= 16:
            other.observe(size, blocks)
    assert one == other


@given(st.lists(SIZES, min_size=2, max_size=SETTLE_EVENTS).filter(lambda sizes: len(set(sizes)) > 1), st.randoms())
def test_radix_nodes_of_several_sizes_are_divided_by_their_common_divisor(sizes, random):
    random.shuffle(sizes)
    detector = BlockSizeDetector()
    for size in sizes:
        detector.observe(size, 1)
    assert detector.variable
    assert detector.base == math.gcd(*sizes)
    assert all(detector.treatment(size) is Treatment.REBLOCK for size in sizes)


@given(SIZES, st.lists(st.integers(1, 9), min_size=1, max_size=80))
def test_blocks_of_a_single_size_are_never_divided(size, counts):
    detector = BlockSizeDetector()
    for blocks in counts:
        assert detector.observe(size, blocks) is False
        assert detector.treatment(size) is Treatment.NATIVE


@given(SIZES, st.integers(2, 8), st.lists(st.booleans(), min_size=1, max_size=80))
def test_larger_blocks_after_fine_blocks_are_coarse(fine, factor, which):
    detector = BlockSizeDetector()
    detector.observe(fine, 2)
    for is_coarse in which:
        assert detector.observe(fine * factor if is_coarse else fine, 2) is False
    assert detector.treatment(fine) is Treatment.NATIVE
    assert detector.treatment(fine * factor) is Treatment.COARSE
