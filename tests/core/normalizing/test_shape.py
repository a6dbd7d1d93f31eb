"""What is looked at once for all stores of one spelling."""

import pytest
from msgspec import UNSET, Raw

from kvbus.core.blocks.chunk import Meta
from kvbus.core.blocks.index import MAX_RUN
from kvbus.core.normalizing.block_size import BlockSizeDetector, Treatment
from kvbus.core.normalizing.shape import UNKNOWN_SIZES, Shape, Sizes
from kvbus.core.wire.schema import BlockStored
from tests.doubles.payloads import pack


def shape(size=16, spelled="GPU"):
    return Shape(None, "GPU", spelled, Meta(size, None, None, spelled, UNSET, UNSET, UNSET))


def test_what_a_size_is_follows_from_what_was_learned():
    one, detector = shape(16), BlockSizeDetector()
    one.good = True
    assert one.sizes is UNKNOWN_SIZES
    one.expect(1)
    assert (one.native, one.matchers) == (False, {})
    detector.observe(16, 1)
    one.learn(Sizes(detector))
    one.expect(1)
    one.expect(2)
    assert (one.native, [*one.matchers]) == (True, [1]), "nothing has proven the size"
    detector.observe(16, 2)
    one.expect(2)
    assert [*one.matchers] == [1, 2]
    one.learn(Sizes(BlockSizeDetector(pinned=8, proven=16)))
    assert (one.native, one.matchers) == (False, {})


def test_what_is_expected_is_tokens_of_so_many_blocks():
    one, detector = shape(4), BlockSizeDetector()
    one.good = True
    detector.observe(4, 2)
    one.learn(Sizes(detector))
    one.expect(2)
    match = one.matchers[2]
    assert match(pack([1, 2, 3, 4, 5, 6, 70_000, 2**32 - 1]))
    assert match(pack([[1, 2]] * 8))
    for other in ([1] * 7, [1] * 9, [1] * 7 + [-1], [1] * 7 + [2**32], [1] * 7 + [[1, 2]], [1.0] * 8):
        assert not match(pack(other))


@pytest.mark.parametrize("blocks", [0, MAX_RUN + 1])
def test_stores_of_no_block_and_of_very_many_are_never_plain(blocks):
    one, detector = shape(4), BlockSizeDetector()
    one.good = True
    detector.observe(4, 2)
    one.learn(Sizes(detector))
    one.expect(blocks)
    assert one.matchers == {}


def test_a_group_of_which_nothing_is_known_has_no_native_size():
    one = shape(16)
    one.learn(Sizes(BlockSizeDetector()))
    assert not one.native


def test_what_was_not_sent_is_filled_in():
    event = BlockStored((1,), token_ids=Raw(b"\x90"), block_size=16, medium="gpu")
    shape().as_sent(event)
    assert (event.medium, event.lora_id, event.lora_name) == ("GPU", None, None)
    assert event.group_idx is UNSET


def test_what_becomes_of_a_size_is_kept_until_the_detector_has_learned():
    sizes = Sizes(BlockSizeDetector())
    sizes.detector.observe(32, 1)
    assert sizes.base == 0
    assert (sizes.treatment(32, 1, "GPU"), sizes.treatment(64, 1, "GPU")) == (Treatment.NATIVE, Treatment.COARSE)
    sizes.detector.observe(16, 2)
    assert sizes.treatment(32, 1, "GPU") is Treatment.NATIVE
    sizes.learn(32)
    assert sizes.base == 16
    assert (sizes.treatment(16, 2, "GPU"), sizes.treatment(32, 1, "GPU")) == (Treatment.NATIVE, Treatment.COARSE)
    assert sizes.treatment(8, 1, "GPU") is Treatment.TAIL
    assert sizes.treatment(8, 2, "GPU") is Treatment.REJECT


def test_larger_blocks_are_cut_on_a_medium_without_blocks_of_the_own_size():
    sizes = Sizes(BlockSizeDetector())
    sizes.detector.observe(16, 2)
    assert sizes.treatment(64, 1, "CPU") is Treatment.REBLOCK
    assert sizes.treatment(40, 1, "CPU") is Treatment.REJECT
    sizes.fine.add("CPU")
    assert sizes.treatment(64, 1, "CPU") is Treatment.COARSE
    sizes.learn(16)
    assert sizes.fine == {"GPU", "CPU"}
    sizes.learn(32)
    assert sizes.fine == {"GPU"}
