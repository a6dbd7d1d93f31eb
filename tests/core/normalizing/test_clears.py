"""What a clear speaks of, and what it leaves."""

from typing import Any

import pytest

from kvbus.client.view import BlockView
from kvbus.core.types import Filtered
from tests.core.dsl import Bench
from tests.doubles.payloads import cleared, payload, plain_all, removed, store, tokens_of
from tests.doubles.router import PlainSetRouter
from tests.typed import well_formed


class TestClear:
    def test_of_one_tier_it_is_said_as_it_is(self):
        bench = Bench()
        bench.feed(store([1, 2]))
        assert bench.feed(cleared()) == plain_all([cleared()])
        assert len(bench.normalizer.index) == 0

    def test_of_an_empty_cache_it_is_handed_on(self):
        assert Bench().feed(cleared()) == plain_all([cleared()])

    def test_vllms_speaks_of_the_device_alone(self):
        bench = Bench()
        bench.feed(store([1, 2]), store([1, 2], medium="CPU"), store([3], 2), store([2]))
        (event,) = bench.feed(cleared())
        assert event == plain_all([removed([3, 2, 1])])[0]
        assert set(bench.router.blocks) == {(None, "CPU", 1), (None, "CPU", 2)}
        assert bench.feed(removed([1])) == []

    def test_removals_and_a_device_clear_behind_them_are_one_run(self):
        bench = Bench()
        bench.feed(store([1, 2]), store([9], medium="CPU"))
        bench.feed(removed([1]), cleared())
        assert bench.router.violations == []

    def test_a_device_clear_does_not_split_the_removals_of_another_tier(self):
        bench = Bench()
        bench.feed(store([1, 2], medium="CPU"), store([3]), store([9], medium="CPU"))
        bench.feed(removed([1], medium="CPU"), cleared(), removed([2], medium="CPU"))
        assert bench.router.violations == []

    @pytest.mark.parametrize("clears", [2, 3, 5])
    def test_a_second_one_in_a_batch_speaks_of_the_other_tiers(self, clears):
        """vLLM resets its offloaded blocks too (``reset_external``): two clears, neither of which names a medium."""
        bench = Bench()
        bench.feed(*[store([i], medium=medium) for medium in ("GPU", "CPU", "DISK") for i in range(184)])
        assert bench.feed(*[cleared()] * clears) == plain_all([cleared()])
        assert bench.router.blocks == {}
        assert bench.normalizer.entries == 0
        assert bench.feed(removed([1], medium="CPU")) == []

    @pytest.mark.parametrize("clears", [2, 3])
    def test_events_between_the_clears_of_a_batch(self, clears):
        """The pool's events come first, then the connector's: what the pool stored after its own reset lives on."""
        bench = Bench()
        bench.feed(store([1, 2]), store([1, 2], medium="CPU"), store([1, 2]), store([2], medium="CPU"))
        later = [store([2], medium="CPU"), cleared()] * (clears - 1)
        bench.feed(removed([1]), cleared(), store([5]), removed([1], medium="CPU"), *later, store([6], medium="CPU"))
        assert set(bench.router.blocks) == {(None, "GPU", 5), (None, "CPU", 6)}
        assert bench.router.violations == []
        assert bench.feed(removed([6], medium="CPU")) == plain_all([removed([6], medium="CPU")])

    def test_a_second_one_in_the_next_batch_is_the_devices_again(self):
        bench = Bench()
        bench.feed(store([1]), store([2], medium="CPU"))
        bench.feed(cleared())
        bench.feed(cleared())
        assert set(bench.router.blocks) == {(None, "CPU", 2)}

    def test_a_second_one_of_an_engine_that_clears_everything(self):
        bench = Bench()
        bench.feed(cleared(), first_of_epoch=True)
        bench.feed(cleared(), store([1]), cleared(), store([2], medium="CPU_PINNED"))
        assert set(bench.router.blocks) == {(None, "CPU_PINNED", 2)}

    def test_a_second_one_makes_the_host_tier_whole(self):
        bench = Bench(max_blocks=1)
        bench.feed(store([1], medium="CPU"), store([2], medium="CPU"), store([3]))
        bench.feed(cleared(), cleared())
        assert not bench.normalizer.full

    def test_a_coarse_block_outlives_the_clear_of_another_tier(self):
        bench = Bench()
        bench.feed(store([1, 2]), store([3], medium="CPU"), store([99], block_size=64, medium="CPU"))
        bench.feed(removed([3], medium="CPU"), cleared())
        bench.stats.filtered.clear()
        bench.feed(removed([99], medium="CPU"))
        assert bench.filtered == {Filtered.COARSE: 1}

    def test_copies_are_cleared_with_their_block(self):
        bench = Bench()
        bench.feed(store([1]), store([1]), store([9], medium="CPU"), cleared(), store([1]))
        assert bench.feed(removed([1])) == plain_all([removed([1])])

    def test_an_engine_that_opens_with_one_clears_everything(self):
        bench = Bench()
        bench.feed(cleared(), first_of_epoch=True)
        bench.feed(store([1, 2]), store([1], medium="CPU_PINNED"))
        assert bench.feed(cleared()) == plain_all([cleared()])
        assert bench.router.blocks == {}

    def test_one_that_opens_with_something_else_does_not(self):
        bench = Bench()
        bench.feed(store([1]), store([1], medium="CPU"), first_of_epoch=True)
        bench.feed(cleared())
        assert set(bench.router.blocks) == {(None, "CPU", 1)}

    def test_reblocked_blocks_leave_under_their_derived_names(self):
        bench = Bench(block_size=16)
        bench.feed(store([1], block_size=64), store([2], block_size=64, medium="CPU"))
        bench.feed(cleared())
        assert {key[1] for key in bench.router.blocks} == {"CPU"}
        assert len(bench.router.blocks) == 4
        assert bench.router.violations == []


class TestWhatAClearSpeaksOf:
    """Two tiers, and a clear: what is live after it."""

    @pytest.mark.parametrize(
        ("clears", "opens", "left"),
        [
            ("auto", False, {"CPU"}),
            ("auto", True, set()),
            ("device", False, {"CPU"}),
            ("device", True, {"CPU"}),
            ("all", False, set()),
            ("all", True, set()),
        ],
    )
    def test_the_operator_may_say_it(self, clears, opens, left):
        bench = Bench(clears=clears)
        first = [cleared()] if opens else []
        bench.feed(*first, store([1]), store([2], medium="CPU"), first_of_epoch=True)
        bench.feed(cleared())
        assert {medium for medium, count in bench.normalizer.index.media().items() if count} == left

    def test_what_the_api_shows_counts_where_nothing_is_said(self):
        for clears, empties in (("auto", True), ("device", False), ("all", True)):
            bench = Bench(clears=clears)
            bench.feed(cleared(), store([2], medium="CPU"), first_of_epoch=True)
            assert bench.normalizer.clears.empty is empties


class TestEmptied:
    """Whether a clear has left nothing in the engine."""

    def test_it_does_where_only_the_device_was_spoken_of(self):
        bench = Bench()
        bench.feed(store([1]), cleared())
        assert bench.normalizer.emptied
        assert not bench.normalizer.clears.take_for_empty()
        assert not bench.normalizer.clears.tiers_unknown
        bench.feed(store([2]))
        assert not bench.normalizer.emptied
        bench.feed(store([2], medium="CPU"))
        assert bench.normalizer.clears.tiers_unknown, "nobody knows what it held at the clear"
        bench.feed(cleared())
        assert not bench.normalizer.emptied
        bench.feed(cleared(), cleared())
        assert bench.normalizer.emptied

    def test_what_speaks_of_every_tier_is_certain(self):
        bench = Bench(clears="all")
        bench.feed(store([1]), store([2], medium="CPU"), cleared())
        assert bench.normalizer.emptied
        assert bench.normalizer.clears.take_for_empty()
        bench.feed(store([2], medium="CPU"))
        assert not bench.normalizer.clears.tiers_unknown


class TestNamedClears:
    """Where an output needs removals in place of a clear."""

    def feed(self, bench, *events):
        """What such an output sends."""
        bench.normalizer.names_cleared = True
        out = bench.feed(*events)
        names = [plain_all(make()) for make in bench.normalizer.cleared]
        named = [each for event in out for each in (names.pop(0) if event["type"] == "AllBlocksCleared" else [event])]
        assert names == []
        self.router.apply(bench.seq, payload(*[{"parent_block_hash": None, "medium": None} | each for each in named]))
        assert self.router.violations == []
        assert self.router.blocks == bench.router.blocks
        return named

    @pytest.fixture(autouse=True)
    def _router(self):
        self.router = PlainSetRouter()

    def test_of_all_blocks_leaves_first(self):
        bench = Bench()
        self.feed(bench, store([1, 2]), store([3], 2), store([4], group=1), store([5], medium=None))
        assert self.feed(bench, cleared()) == plain_all(
            [removed([4], group=1), removed([5], medium=None), removed([3, 2, 1])]
        )
        assert self.feed(bench, cleared()) == []
        self.feed(bench, store([1]))
        assert bench.normalizer.cleared == []

    @pytest.mark.parametrize("gone", [[1], [2], [3, 2], [2, 1]], ids=str)
    def test_with_those_whose_removal_has_not_left(self, gone):
        bench = Bench()
        self.feed(bench, store([1, 2]), store([3], 2), store([9]))
        named = self.feed(bench, removed(gone), cleared())
        assert sorted(block for event in named for block in event["block_hashes"]) == [1, 2, 3, 9]

    @pytest.mark.parametrize(("clears", "left"), [("auto", {3, 5}), ("all", {5})])
    def test_several_in_a_batch(self, clears, left):
        """Where a clear speaks of one tier, the second one speaks of the others."""
        bench = Bench(clears=clears)
        self.feed(bench, store([1, 2]))
        self.feed(bench, removed([2]), cleared(), store([3, 4]), removed([4]), cleared(), cleared(), store([5]))
        assert bench.live == left

    @pytest.mark.parametrize("gone", [[], [1], [2], [1, 2]], ids=str)
    def test_of_blocks_that_were_cut(self, gone):
        bench = Bench(block_size=16)
        tokens = tokens_of(1, 96)
        self.feed(bench, store([1], tokens=tokens[:64], block_size=64), store([3], tokens=tokens[:32], block_size=32))
        self.feed(bench, store([2], 1, tokens=tokens[64:], block_size=32))
        removals = [removed(gone)] if gone else []
        self.feed(bench, *removals, cleared(), store([4], block_size=32))
        assert len(bench.live) == 2

    def test_where_block_sizes_turn_out_different(self):
        bench = Bench()
        self.feed(bench, store([1], block_size=96), store([9], block_size=96, medium="CPU"))
        self.feed(bench, removed([9], medium="CPU"), store([2], block_size=64, tokens=tokens_of(1, 96)[:64]))
        assert bench.stats.rebuilds == 1
        assert len(bench.live) == 3
        self.feed(bench, removed([1]), store([3], block_size=16), cleared(), store([3], block_size=16))
        assert len(bench.live) == 1


class TestOneMedium:
    """ATOM's AllBlocksCleared names the medium that was emptied."""

    @pytest.mark.parametrize(
        "event",
        [["AllBlocksCleared", "CPU"], cleared("cpu"), cleared("CPU") | {"novelty": 1}],
        ids=["array", "map", "extra"],
    )
    @pytest.mark.parametrize("opens", [False, True], ids=["vllm", "sglang"])
    def test_the_other_media_keep_their_blocks(self, event, opens):
        bench = Bench()
        bench.feed(*[cleared()] * opens, first_of_epoch=True)
        bench.feed(store([1, 2]), store([1, 2], medium="CPU"), store([3], medium="DISK"), store([1], medium="CPU"))
        assert bench.feed(event) == plain_all([removed([2, 1], medium="CPU")])
        assert set(bench.router.blocks) == {(None, "GPU", 1), (None, "GPU", 2), (None, "DISK", 3)}
        assert bench.announced().blocks == bench.router.blocks

    @pytest.mark.parametrize("medium", ["GPU", "DEVICE"])
    def test_the_device(self, medium):
        bench = Bench()
        bench.feed(store([1]), store([2], medium="CPU"))
        assert bench.feed(cleared(medium)) == plain_all([removed([1])])

    def test_the_only_medium_leaves_as_a_clear_of_everything(self):
        bench = Bench()
        bench.feed(store([1, 2], medium="CPU"))
        assert bench.feed(cleared("CPU")) == plain_all([cleared()])
        assert bench.router.blocks == {}

    def test_is_no_first_clear_of_its_batch(self):
        """The clear without a medium behind it is the batch's first, and of the device alone."""
        bench = Bench()
        bench.feed(store([1]), store([2], medium="CPU"), store([3], medium="DISK"))
        bench.feed(cleared("CPU"), cleared())
        assert set(bench.router.blocks) == {(None, "DISK", 3)}

    def test_does_not_make_an_engine_one_that_clears_every_tier(self):
        bench = Bench()
        bench.feed(cleared("GPU"), store([1]), store([2], medium="CPU"), first_of_epoch=True)
        bench.feed(cleared())
        assert set(bench.router.blocks) == {(None, "CPU", 2)}

    @pytest.mark.parametrize("clears", ["auto", "all", "device"])
    @pytest.mark.parametrize("medium", ["GPU", "CPU"])
    def test_a_clear_of_a_tier_leaves_the_device_unknown(self, clears, medium):
        bench = Bench(clears=clears)
        bench.feed(cleared(medium))
        assert bench.normalizer.emptied is (medium == "GPU" and clears != "all")

    def test_an_unknown_medium_clears_nothing_and_is_counted(self):
        bench = Bench()
        bench.feed(store([1]))
        assert bench.feed(cleared("HBM")) == []
        assert bench.rejected == {"unknown_medium": 1}
        assert bench.live == {1}

    def test_a_medium_of_another_type_is_refused(self):
        bench = Bench()
        bench.feed(store([1]))
        assert bench.feed(["AllBlocksCleared", 7], {"type": "AllBlocksCleared", "medium": 7}) == []
        assert bench.rejected == {"wrong_type": 2}
        assert bench.live == {1}

    def test_a_second_kvbus_and_a_client_hold_the_same(self):
        first, second, view = Bench(), Bench(clears="all"), BlockView()
        batches: list[list[Any]] = [
            [store([1, 2]), store([1], medium="CPU"), store([9], medium="DISK")],
            [["AllBlocksCleared", "CPU"], store([2], medium="CPU")],
            [cleared("GPU")],
            [cleared("disk"), cleared("cpu")],
        ]
        for events in batches:
            left = first.feed(*events)
            second.feed(*left)
            view.apply_batch(well_formed(payload(*left)))
            seen = {(block.group_idx, block.medium, block.hash) for block in view}
            assert seen == set(second.router.blocks) == set(first.router.blocks)
        assert len(view) == 0
