"""Which events of a batch may be applied; the reasons one by one are in test_normalizer."""

import pytest

from kvbus.core.blocks.index import MAX_RUN, Index
from kvbus.core.normalizing.admission import Admission, complete
from kvbus.core.normalizing.validate import Store
from kvbus.core.stats import SourceStats
from kvbus.core.types import Filtered, Reason
from kvbus.core.wire.codec import decode_batch
from kvbus.core.wire.schema import AllBlocksCleared, BlockRemoved
from tests.core.blocks.chunks import put
from tests.core.dsl import Bench
from tests.doubles.payloads import cleared, payload, plain, removed, store, tokens_of


def taken(admission, *events):
    return admission.steps(decode_batch(payload(*events)))


def test_steps_keep_their_order():
    steps = taken(
        Admission("prefix", 4, SourceStats(), set()), store([1]), removed([1]), store([1, 1]), cleared(), store([2])
    )
    assert [type(step) for step in steps] == [Store, BlockRemoved, AllBlocksCleared, Store]


def test_rejects_of_the_codec_are_counted():
    stats = SourceStats()
    taken(Admission("prefix", 4, stats, set()), {"type": "Nonsense"}, store(["x"], tokens=[1]))
    assert stats.rejected == {Reason.UNKNOWN_EVENT: 1, Reason.HASH_KIND: 1}


def test_unknown_fields_stay_with_their_event():
    bad, good, other = {"type": "Nonsense"}, store([1], novelty=1), store([2])
    steps = taken(Admission("prefix", 4, SourceStats(), set()), bad, good, other)
    assert [list(step.extras or ()) for step in steps] == [["novelty"], []]


def test_the_majority_decides_which_kind_of_hash_is_spoken():
    stats = SourceStats()
    admission = Admission("prefix", 4, stats, set())
    assert len(taken(admission, store([b"x"]))) == 1
    assert [len(taken(admission, store([i]))) for i in range(3)] == [1, 1, 1]
    assert taken(admission, store([b"y"])) == []
    assert stats.rejected == {Reason.HASH_KIND: 1}


def test_a_group_is_known_by_its_kind_even_from_an_event_that_breaks_rules():
    stats = SourceStats()
    admission = Admission("prefix", 4, stats, set())
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
    assert taken(Admission("prefix", 4, stats, set()), event) == []
    assert stats.rejected == {reason: 1}


@pytest.mark.parametrize("event", [store([]), removed([])])
def test_an_event_without_hashes_is_left_out(event):
    stats = SourceStats()
    assert taken(Admission("prefix", 4, stats, set()), event) == []
    assert stats.filtered == {Filtered.NO_HASHES: 1}


def test_groups_are_bounded():
    stats, refused = SourceStats(), set[str]()
    admission = Admission("prefix", 4, stats, refused)
    for group in range(4):
        assert len(taken(admission, store([1], group=group))) == 1
    assert taken(admission, store([1], group=4, medium="cpu")) == []
    assert len(taken(admission, store([1], group=0))) == 1
    assert stats.rejected == {Reason.TOO_MANY_GROUPS: 1}
    assert refused == {"CPU"}


def test_a_group_without_prefixes_is_left_out_and_not_refused():
    stats, refused = SourceStats(), set[str]()
    admission = Admission("prefix", 4, stats, refused)
    for group in range(8):
        assert taken(admission, store([1], group=group, kv_cache_spec_kind="mamba")) == []
    assert stats.filtered == {Filtered.GROUP: 8}
    assert admission.no_prefix == {0, 1, 2, 3}
    assert (stats.rejected, refused) == ({}, set())


def test_whether_all_groups_are_without_prefixes_is_known_from_their_stores():
    admission = Admission("prefix", 4, SourceStats(), set())
    assert not admission.only_without_prefix, "nothing is known yet"
    taken(admission, store([1], group=0, kv_cache_spec_kind="mamba"))
    assert admission.only_without_prefix
    taken(admission, store([1], group=1))
    assert not admission.only_without_prefix


@pytest.mark.parametrize("keys", [None, "each", "none"])
def test_a_long_store_is_split_into_several_that_follow_one_another(keys):
    hashes = list(range(1, 2 * MAX_RUN + 2))
    named = {"each": [["k", block] for block in hashes], "none": [], None: None}[keys]
    steps = taken(Admission("prefix", 4, SourceStats(), set()), store(hashes, 9000, extra_keys=named, novelty=1))
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


@pytest.mark.parametrize(("kind", "counted"), [(int, True), (bytes, False)])
def test_batches_of_the_fast_path_are_counted_by_their_kind_of_hash(kind, counted):
    stats = SourceStats()
    admission = Admission("prefix", 4, stats, set())
    taken(admission, store([1]), store([2]))
    assert admission.count_plain(kind, 3, 1) is counted
    assert (stats.stored, stats.removed) == ((5, 1) if counted else (2, 0))


def test_removals_alone_say_nothing_about_the_kind_of_hash():
    stats = SourceStats()
    admission = Admission("prefix", 4, stats, set())
    taken(admission, store([1]), store([2]))
    assert admission.count_plain(bytes, 0, 2)
    assert not admission.count_plain(bytes, 1, 0)
    assert admission.count_plain(int, 1, 0)
    assert (stats.stored, stats.removed) == (3, 2)


def test_a_dump_is_plain_and_loads():
    admission, loaded = (Admission("prefix", 4, SourceStats(), set()) for _ in range(2))
    taken(admission, store([1], group=3), store([2], group=3), store([3], group=4, kv_cache_spec_kind="mamba"))
    loaded.load(admission.dump())
    assert loaded.dump() == admission.dump()
    assert loaded.no_prefix == {4}
    assert not loaded.count_plain(bytes, 1, 0)


class TestComplete:
    def tokenless(self, *hashes, **fields):
        (step,) = taken(
            Admission("prefix", 4, SourceStats(), set()), store(list(hashes), tokens=[], block_size=0, **fields)
        )
        return step

    def bench(self):
        bench = Bench()
        bench.feed(store([1, 2], lora_name="a"), store([3], 2, lora_name="a"))
        return bench.normalizer.index.find

    def test_tokens_size_parent_and_adapter(self):
        step = self.tokenless(2, 3, medium="CPU")
        assert complete(step, self.bench())
        assert step.tokens == tokens_of(2) + tokens_of(3)
        assert plain(step.event) == plain(store([2, 3], 1, medium="CPU", lora_name="a"))

    def test_its_own_parent_is_kept(self):
        step = self.tokenless(2, parent=9)
        assert complete(step, self.bench())
        assert step.event.parent_block_hash == 9

    def test_its_own_adapter_is_kept(self):
        step = self.tokenless(2, lora_name="b")
        assert complete(step, self.bench())
        assert step.event.lora_name == "b"

    def test_not_across_block_sizes(self):
        index = Index()
        put(index, [2], size=16)
        put(index, [3], size=32)
        step = self.tokenless(2, 3)
        assert not complete(step, index.find)
        assert (step.tokens, step.event.block_size) == ([], 0)

    def test_not_if_one_is_unknown(self):
        assert not complete(self.tokenless(2, 4), self.bench())

    def test_not_across_groups(self):
        assert not complete(self.tokenless(2, group=1), self.bench())
