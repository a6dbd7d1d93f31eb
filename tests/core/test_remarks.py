"""What is said of a stream of which nothing is missing: only with evidence that no captured engine has given."""

import pytest

from kvbus.core.events import BatchReceived
from kvbus.core.remarks import MIN_COPIES, MIN_LEFT_OUT, Remark, remarks
from tests.core.dsl import Script, live
from tests.doubles.payloads import removed, store
from tests.wire.captures import CAPTURES, load

PREFIX = store([1, 2, 3])


def fed(*batches, **rules):
    script = Script(**rules)
    script.after(*(live(seq, *events) for seq, events in enumerate(batches)))
    return script.source


def window(block):
    return store([block], group=1, kv_cache_spec_kind="sliding_window")


def test_a_model_with_nothing_but_windows_gives_routers_nothing():
    source = fed(*([window(n)] for n in range(MIN_LEFT_OUT)))
    assert list(remarks(source)) == [Remark.NO_PREFIX]
    assert "groups: all" in remarks(source)[Remark.NO_PREFIX]


@pytest.mark.parametrize(
    "batches",
    [
        [[window(n)] for n in range(MIN_LEFT_OUT - 1)],
        [*([window(n)] for n in range(MIN_LEFT_OUT)), [store([1], group=0, kv_cache_spec_kind="full_attention")]],
        [[store([n])] for n in range(2 * MIN_LEFT_OUT)],
    ],
    ids=["a few", "a hybrid model", "no groups"],
)
def test_and_no_other_model(batches):
    assert remarks(fed(*batches)) == {}
    assert remarks(fed(*([window(n)] for n in range(MIN_LEFT_OUT)), groups="all")) == {}


@pytest.mark.parametrize("settled", [0, 8], ids=["from the start", "later"])
def test_hits_that_are_announced_again_are_noticed(settled):
    first = [[store([100 + 2 * n, 101 + 2 * n])] for n in range(settled)]
    source = fed(*first, [PREFIX], *([PREFIX] for _ in range(MIN_COPIES)))
    assert source.stats.reannounced == MIN_COPIES
    assert list(remarks(source)) == [Remark.REANNOUNCED]
    assert "duplicates: ignore" in remarks(source)[Remark.REANNOUNCED]


@pytest.mark.parametrize(
    "again",
    [store([2, 3], 1), store([1]), store([1, 2, 3, 4])],
    ids=["not from the root", "one block", "not all live"],
)
def test_another_shape_is_none(again):
    source = fed([PREFIX], *([again, removed([4])] for _ in range(2 * MIN_COPIES)))
    assert source.stats.reannounced == 0
    assert remarks(source) == {}


def test_where_copies_do_not_count_there_is_nothing_to_say():
    source = fed([PREFIX], *([PREFIX] for _ in range(2 * MIN_COPIES)), duplicates="ignore")
    assert source.stats.reannounced == 2 * MIN_COPIES
    assert remarks(source) == {}


def test_copies_that_are_removed_are_copies():
    source = fed([PREFIX], *([PREFIX, removed([3, 2, 1])] for _ in range(2 * MIN_COPIES)))
    assert remarks(source) == {}


@pytest.mark.parametrize("name", CAPTURES)
def test_no_captured_engine_is_remarkable(name):
    script = Script()
    for message in load(name):
        script.relay.handle(BatchReceived(0, [b"", message.seq.to_bytes(8, "big"), message.payload]), script.now)
    assert remarks(script.source) == {}
