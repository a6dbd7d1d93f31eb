"""A checkpoint gives back what routers are not told of, too; the rest is in the random relay, which is killed."""

import pytest

from kvbus.core.checkpoint import Loader, dump
from kvbus.core.wire.codec import decode_batch
from tests.core.dsl import Script
from tests.doubles.payloads import payload, plain_all, removed, store


def resumed(*batches, **rules):
    """The normalizer of a relay that was written down behind these batches and loaded into another."""
    first, second = Script(**rules), Script(**rules)
    for events in batches:
        first.source.normalizer.apply(decode_batch(payload(*events)))
    loader = Loader(second.relay)
    for blob in dump(first.relay):
        loader.feed(blob)
    assert loader.complete
    assert second.source.normalizer.entries == first.source.normalizer.entries
    return second


@pytest.mark.parametrize(
    ("event", "reason"), [(store([9], 2, block_size=8), "tail"), (store([9], block_size=32), "coarse")]
)
def test_what_was_left_out_is_recognised_when_it_goes(event, reason):
    script = resumed([store([1, 2])], [event, event], block_size=16)
    for left in (3, 2):
        assert script.source.normalizer.apply(decode_batch(payload(removed([9])))) == []
        assert script.source.normalizer.entries == left
    assert script.stats.filtered == {reason: 2}


def test_a_tail_that_turns_out_to_be_a_block_is_told_after_all():
    """Blocks of a numbered group that came one by one, beside a coarse one, until several came in one event."""
    script = resumed([store([9], block_size=32, group=0)], [store([1], group=0)])
    out = script.source.normalizer.apply(decode_batch(payload(store([2, 3], 1, group=0))))
    assert plain_all(out)[1:] == plain_all([store([1], group=0), store([2, 3], 1, group=0)])
