"""What is looked at once for all stores of one spelling."""

import msgspec
import pytest
from msgspec import UNSET, Raw

from kvbus.core.blocks.chunk import Meta
from kvbus.core.normalizing.block_size import BlockSizeDetector
from kvbus.core.normalizing.shape import UNKNOWN_SIZES, Shape, Sizes, own_copy
from kvbus.core.wire.schema import BlockStored


def shape(size=16, spelled="GPU"):
    return Shape(None, "GPU", spelled, Meta(size, None, None, spelled, UNSET, UNSET, UNSET))


@pytest.mark.parametrize(("size", "blocks"), [(4, 1), (4, 4), (16, 4095), (16, 4096), (2**31, 1)])
def test_tokens_of_so_many_blocks_begin_with_their_number(size, blocks):
    for _ in range(2):
        head = shape(size).head(blocks)
        assert int.from_bytes(head[1:] or bytes([head[0] & 0x0F]), "big") == size * blocks


def test_no_tokens_are_of_more_than_msgpack_can_count():
    with pytest.raises(msgspec.DecodeError):
        msgspec.msgpack.decode(shape(2**31).head(2))


def test_heads_are_bounded():
    one = shape()
    for blocks in range(1, 3000):
        one.head(blocks)
    assert len(one.heads) <= 1024


def test_what_a_size_is_follows_from_what_was_learned():
    one, detector = shape(16), BlockSizeDetector()
    assert one.sizes is UNKNOWN_SIZES
    assert (one.native, one.several) == (False, False)
    detector.observe(16, 1)
    one.learn(Sizes(detector))
    assert (one.native, one.several) == (True, False)
    detector.observe(16, 2)
    one.learn(one.sizes)
    assert (one.native, one.several) == (True, True)
    one.learn(Sizes(BlockSizeDetector(pinned=8, proven=16)))
    assert (one.native, one.several) == (False, False)


def test_a_group_of_which_nothing_is_known_has_no_native_size():
    one = shape(16)
    one.learn(Sizes(BlockSizeDetector()))
    assert not one.native


def test_what_was_not_sent_is_filled_in():
    event = BlockStored((1,), token_ids=Raw(b"\x90"), block_size=16, medium="gpu")
    shape().as_sent(event)
    assert (event.medium, event.lora_id, event.lora_name, event.parent_block_hash) == ("GPU", None, None, None)
    assert event.group_idx is UNSET


def test_fields_that_are_kept_hold_no_payload():
    payload = msgspec.msgpack.encode(["x" * 1000, "session"])
    _, session = msgspec.msgpack.decode(payload, type=list[Raw])
    kept = own_copy([UNSET, session])
    assert kept == [UNSET, session]
    assert kept[1] is not session
