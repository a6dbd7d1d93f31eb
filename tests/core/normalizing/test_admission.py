"""Which events of a batch may be applied; the reasons one by one are in test_normalizer."""

import pytest

from kvbus.core.blocks.index import MAX_RUN, Index
from kvbus.core.normalizing.admission import Admission, Checked
from kvbus.core.stats import SourceStats
from kvbus.core.types import Filtered, Reason
from kvbus.core.wire.codec import Batch, decode
from kvbus.core.wire.schema import AllBlocksCleared, BlockRemoved
from tests.doubles.payloads import cleared, payload, plain, removed, store, tokens_of


def admitting(stats=None, refused=None):
    return Admission(
        Index(),
        SourceStats() if stats is None else stats,
        set() if refused is None else refused,
        pinned=None,
        groups="prefix",
        max_groups=4,
    )


def taken(admission, *events):
    batch = decode(payload(*events))
    assert isinstance(batch, Batch)
    admission.count_rejects(batch.rejects)
    return admission.check_all(batch.events, batch)


def test_steps_keep_their_order():
    steps = taken(admitting(), store([1]), removed([1]), store([1, 1]), cleared(), store([2]))
    assert [type(step) for step in steps] == [Checked, BlockRemoved, AllBlocksCleared, Checked]


def test_rejects_of_the_codec_are_counted():
    stats = SourceStats()
    taken(admitting(stats), {"type": "Nonsense"}, store(["x"], tokens=[1]))
    assert stats.rejected == {Reason.UNKNOWN_EVENT: 1, Reason.HASH_KIND: 1}


def test_unknown_fields_stay_with_their_event():
    bad, good, other = {"type": "Nonsense"}, store([1], novelty=1), store([2])
    steps = taken(admitting(), bad, good, other)
    assert [type(step) for step in steps] == [Checked, Checked]
    assert [list(step.extras or ()) for step in steps] == [["novelty"], []]


def test_the_majority_decides_which_kind_of_hash_is_spoken():
    stats = SourceStats()
    admission = admitting(stats)
    assert len(taken(admission, store([b"x"]))) == 1
    assert [len(taken(admission, store([i]))) for i in range(3)] == [1, 1, 1]
    assert taken(admission, store([b"y"])) == []
    assert stats.rejected == {Reason.HASH_KIND: 1}


def test_a_group_is_known_by_its_kind_even_from_an_event_that_breaks_rules():
    stats = SourceStats()
    admission = admitting(stats)
    assert taken(admission, store([1], tokens=[1], group=2, kv_cache_spec_kind="mamba")) == []
    assert admission.no_prefix == {2}
    assert stats.filtered == {Filtered.GROUP: 1}
    assert stats.rejected == {}


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (removed([1], medium="HBM"), Reason.UNKNOWN_MEDIUM),
        (store([1], medium="HBM"), Reason.UNKNOWN_MEDIUM),
        (store([1], tokens=[1]), Reason.TOKEN_COUNT),
    ],
)
def test_an_event_that_breaks_a_rule_is_counted_and_left_out(event, reason):
    stats = SourceStats()
    assert taken(admitting(stats), event) == []
    assert stats.rejected == {reason: 1}


@pytest.mark.parametrize("event", [store([]), removed([])])
def test_an_event_without_hashes_is_left_out(event):
    stats = SourceStats()
    assert taken(admitting(stats), event) == []
    assert stats.filtered == {Filtered.NO_HASHES: 1}


def test_groups_are_bounded():
    stats, refused = SourceStats(), set[str]()
    admission = admitting(stats, refused)
    for group in range(4):
        assert len(taken(admission, store([1], group=group))) == 1
    assert taken(admission, store([1], group=4, medium="cpu")) == []
    assert len(taken(admission, store([1], group=0))) == 1
    assert stats.rejected == {Reason.TOO_MANY_GROUPS: 1}
    assert refused == {"CPU"}


def test_a_group_without_prefixes_is_left_out_and_not_refused():
    stats, refused = SourceStats(), set[str]()
    admission = admitting(stats, refused)
    for group in range(8):
        assert taken(admission, store([1], group=group, kv_cache_spec_kind="mamba")) == []
    assert stats.filtered == {Filtered.GROUP: 8}
    assert admission.no_prefix == {0, 1, 2, 3}
    assert (stats.rejected, refused) == ({}, set())


def test_whether_all_groups_are_without_prefixes_is_known_from_their_stores():
    admission = admitting()
    assert not admission.only_without_prefix, "nothing is known yet"
    taken(admission, store([1], group=0, kv_cache_spec_kind="mamba"))
    assert admission.only_without_prefix
    taken(admission, store([1], group=1))
    assert not admission.only_without_prefix


@pytest.mark.parametrize("keys", [None, "each", "none"])
def test_a_long_store_is_split_into_several_that_follow_one_another(keys):
    hashes = list(range(1, 2 * MAX_RUN + 2))
    named = {"each": [["k", block] for block in hashes], "none": [], None: None}[keys]
    steps = taken(admitting(), store(hashes, 9000, extra_keys=named, novelty=1))
    events = [plain(step.event) for step in steps]
    assert [event["block_hashes"] for event in events] == [hashes[:MAX_RUN], hashes[MAX_RUN:-1], hashes[-1:]]
    assert [event["parent_block_hash"] for event in events] == [9000, MAX_RUN, 2 * MAX_RUN]
    assert [token for event in events for token in event["token_ids"]] == [
        token for block in hashes for token in tokens_of(block)
    ]
    assert [list(step.extras) for step in steps] == [["novelty"]] * 3
    if keys == "each":
        assert [key for event in events for key in event["extra_keys"]] == named
    else:
        assert {str(event.get("extra_keys")) for event in events} == {str(named)}


def test_a_dump_is_plain_and_loads():
    admission, loaded = (admitting() for _ in range(2))
    taken(admission, store([1], group=3), store([2], group=3), store([3], group=4, kv_cache_spec_kind="mamba"))
    loaded.load(admission.dump())
    assert loaded.dump() == admission.dump()
    assert loaded.no_prefix == {4}
    assert taken(loaded, store([b"x"])) == []
