import pytest

from kvbus.core.normalizing.block_size import RELEARN_EVENTS, SETTLE_EVENTS, YOUNG, BlockSizeDetector, Treatment


def learned(*stores, pinned=None, numbered=False):
    """A granularity that has seen these ``(size, blocks)``, one batch each."""
    detector = BlockSizeDetector(pinned, numbered)
    for size, blocks in stores:
        detector.observe(size, blocks)
    return detector


class TestFixedBlocks:
    def test_one_size_is_passed_as_it_is(self):
        detector = learned((16, 1), (16, 3))
        assert (detector.base, detector.variable) == (16, False)
        assert detector.treatment(16) is Treatment.NATIVE

    @pytest.mark.parametrize(("size", "blocks"), [(1, 2), (7, 2), (8, 2), (17, 1), (17, 2), (24, 1)])
    def test_an_odd_size_is_rejected_once_blocks_are_proven(self, size, blocks):
        stores = [(16, 2)] * (YOUNG + 1)
        assert learned(*stores, (size, blocks)).treatment(size, blocks) is Treatment.REJECT

    def test_many_stores_of_one_size_prove_it_too(self):
        assert learned(*[(16, 1)] * SETTLE_EVENTS, (7, 1)).treatment(16) is Treatment.NATIVE

    def test_nothing_is_known_before_the_first_store(self):
        assert BlockSizeDetector().base == 0
        assert BlockSizeDetector(16).base == 16


class TestTwoGranularities:
    @pytest.mark.parametrize("stores", [[(16, 2), (128, 1)], [(16, 2), (128, 2)], [(128, 1), (16, 2)]])
    def test_the_coarse_one_is_left_out(self, stores):
        detector = learned(*stores)
        assert detector.treatment(16) is Treatment.NATIVE
        assert detector.treatment(128) is Treatment.COARSE
        assert detector.treatment(100) is Treatment.REJECT

    @pytest.mark.parametrize("coarse", range(1, YOUNG + 1))
    def test_a_coarse_stream_that_was_there_first_is_overruled_at_once(self, coarse):
        detector = learned(*[(128, 2)] * coarse, (16, 2))
        assert detector.treatment(16) is Treatment.NATIVE
        assert detector.treatment(128) is Treatment.COARSE

    def test_and_after_a_while_when_it_had_proven_itself(self):
        stores = [(128, 2)] * (YOUNG + 1) + [(16, 2)] * (RELEARN_EVENTS - 1)
        assert learned(*stores).treatment(16, 2) is Treatment.REJECT
        assert learned(*stores, (16, 2)).treatment(16, 2) is Treatment.NATIVE

    def test_one_odd_event_does_not_overrule_what_is_proven(self):
        stores = [(16, 2)] * (YOUNG + 1)
        assert learned(*stores, (6, 2)).treatment(16) is Treatment.NATIVE
        assert learned(*stores, (6, 2)).treatment(6, 2) is Treatment.REJECT

    def test_single_blocks_never_overrule(self):
        assert learned((16, 2), *[(8, 1)] * 100).treatment(16) is Treatment.NATIVE

    def test_what_changes_the_past_is_told(self):
        detector = BlockSizeDetector()
        assert detector.observe(128, 1) is False
        assert detector.observe(128, 1) is False
        assert detector.observe(16, 2) is True
        assert detector.observe(16, 2) is False


class TestVariableNodes:
    def test_two_sizes_and_never_several_blocks(self):
        detector = learned((48, 1), (32, 1))
        assert detector.variable
        assert detector.base == 16
        assert detector.treatment(48) is detector.treatment(32) is Treatment.REBLOCK

    def test_the_divisor_shrinks_with_what_is_seen(self):
        assert learned((96, 1), (48, 1)).base == 48
        assert learned((96, 1), (48, 1), (16, 1)).base == 16

    def test_several_blocks_in_one_event_end_the_assumption(self):
        detector = learned((128, 1), (16, 1), (16, 2))
        assert not detector.variable
        assert detector.treatment(16) is Treatment.NATIVE
        assert detector.treatment(128) is Treatment.COARSE

    def test_settled_after_a_while(self):
        stores = [(48, 1), (32, 1)] * (SETTLE_EVENTS // 2)
        detector = learned(*stores)
        assert detector.treatment(40) is Treatment.REJECT


class TestPinned:
    @pytest.mark.parametrize(
        ("size", "treatment"),
        [(16, Treatment.NATIVE), (32, Treatment.REBLOCK), (8, Treatment.REJECT), (24, Treatment.REJECT)],
    )
    def test_what_is_no_multiple_is_rejected_and_multiples_are_cut(self, size, treatment):
        detector = learned((size, 2), pinned=16)
        assert detector.base == 16
        assert detector.treatment(size, 2) is treatment

    def test_variable_nodes_are_cut_to_the_pinned_size(self):
        detector = learned((48, 1), (96, 1), (40, 1), pinned=16)
        assert detector.base == 16
        assert detector.treatment(48) is Treatment.REBLOCK
        assert detector.treatment(40) is Treatment.REJECT

    @pytest.mark.parametrize("stores", [[(16, 1), (32, 2)], [(32, 2), (16, 1)]], ids=["fine first", "coarse first"])
    def test_the_pinned_size_is_never_rejected(self, stores):
        assert learned(*stores, pinned=16).treatment(16) is Treatment.NATIVE


class TestTails:
    """The end of a prompt, announced as one block that is smaller than those of its group."""

    @pytest.mark.parametrize("tail", [1, 7, 16, 32, 63])
    @pytest.mark.parametrize("numbered", [False, True])
    def test_one_of_a_proven_size(self, tail, numbered):
        detector = learned((64, 2), *[(tail, 1)] * 100, numbered=numbered)
        assert detector.treatment(tail) is Treatment.TAIL
        assert detector.treatment(64) is Treatment.NATIVE
        assert not detector.variable

    @pytest.mark.parametrize("stores", [[(64, 1), (16, 1)], [(16, 1), (64, 1)], [(16, 1), (64, 2)]])
    @pytest.mark.parametrize("numbered", [False, True])
    def test_one_of_a_pinned_size_whatever_came_first(self, stores, numbered):
        assert learned((16, 1), pinned=64, numbered=numbered).treatment(16) is Treatment.TAIL
        detector = learned(*stores, pinned=64, numbered=numbered)
        assert detector.treatment(16) is Treatment.TAIL
        assert detector.treatment(64) is Treatment.NATIVE

    @pytest.mark.parametrize("stores", [[(64, 1), (16, 1)], [(16, 1), (64, 1)], [(64, 1)] * 40 + [(16, 1)]])
    def test_a_numbered_group_has_no_radix_nodes(self, stores):
        detector = learned(*stores, numbered=True)
        assert detector.treatment(16) is Treatment.TAIL
        assert detector.treatment(64) is Treatment.NATIVE

    @pytest.mark.parametrize("stores", [[(1024, 2)], [(1024, 1)], [(16, 1), (1024, 1)], [(16, 1), (1024, 2)]])
    def test_one_of_the_size_blocks_are_cut_to(self, stores):
        """It does not make the blocks it is the end of coarse ones."""
        detector = learned(*stores, (16, 1), pinned=16, numbered=True)
        assert detector.treatment(16) is Treatment.TAIL
        assert detector.treatment(1024) is Treatment.REBLOCK

    def test_nodes_of_the_pinned_size_and_larger_ones_are_cut(self):
        detector = learned((64, 1), (128, 1), (16, 1), pinned=64)
        assert detector.treatment(16) is Treatment.TAIL
        assert detector.treatment(64) is detector.treatment(128) is Treatment.REBLOCK

    def test_several_blocks_of_that_size_are_no_tails(self):
        detector = learned((64, 1), (16, 1), (16, 2), numbered=True)
        assert detector.treatment(16) is Treatment.NATIVE
        assert detector.treatment(64) is Treatment.COARSE
        assert learned((64, 2), pinned=64).treatment(16, 2) is Treatment.REJECT
