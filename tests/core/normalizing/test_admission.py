"""Which events of a batch may be applied; the reasons one by one are in test_normalize."""

from kvbus.core.normalizing.admission import Admission, complete
from kvbus.core.normalizing.validate import Store
from kvbus.core.stats import SourceStats
from kvbus.core.types import Filtered, Reason
from kvbus.core.wire.codec import decode_batch
from kvbus.core.wire.schema import AllBlocksCleared, BlockRemoved
from tests.core.dsl import Bench
from tests.doubles.payloads import cleared, payload, plain, removed, store, tokens_of


def taken(admission, *events):
    return admission.steps(decode_batch(payload(*events)))


def test_steps_keep_their_order():
    steps = taken(Admission("prefix", SourceStats()), store([1]), removed([1]), store([1, 1]), cleared(), store([2]))
    assert [type(step) for step in steps] == [Store, BlockRemoved, AllBlocksCleared, Store]


def test_rejects_of_the_codec_are_counted():
    stats = SourceStats()
    taken(Admission("prefix", stats), {"type": "Nonsense"}, store(["x"], tokens=[1]))
    assert stats.rejected == {Reason.UNKNOWN_EVENT: 1, Reason.HASH_KIND: 1}


def test_unknown_fields_stay_with_their_event():
    bad, good, other = {"type": "Nonsense"}, store([1], novelty=1), store([2])
    steps = taken(Admission("prefix", SourceStats()), bad, good, other)
    assert [list(step.extras or ()) for step in steps] == [["novelty"], []]


def test_the_majority_decides_which_kind_of_hash_is_spoken():
    stats = SourceStats()
    admission = Admission("prefix", stats)
    assert len(taken(admission, store([b"x"]))) == 1
    assert [len(taken(admission, store([i]))) for i in range(3)] == [1, 1, 1]
    assert taken(admission, store([b"y"])) == []
    assert stats.rejected == {Reason.HASH_KIND: 1}


def test_a_group_is_known_by_its_kind_even_from_an_event_that_breaks_rules():
    stats = SourceStats()
    admission = Admission("prefix", stats)
    assert taken(admission, store([1], tokens=[1], group=2, kv_cache_spec_kind="mamba")) == []
    assert admission.no_prefix == {2}
    assert stats.filtered == {Filtered.GROUP: 1}
    assert stats.rejected == {}


class TestComplete:
    def tokenless(self, *hashes, **fields):
        (step,) = taken(Admission("prefix", SourceStats()), store(list(hashes), tokens=[], block_size=0, **fields))
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

    def test_not_if_one_is_unknown(self):
        assert not complete(self.tokenless(2, 4), self.bench())

    def test_not_across_groups(self):
        assert not complete(self.tokenless(2, group=1), self.bench())
