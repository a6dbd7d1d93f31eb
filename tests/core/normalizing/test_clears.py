"""Tests for AllBlocksCleared: which tiers it empties, and which blocks remain."""

from typing import Any

import pytest

from kvbus.client.view import BlockView
from tests.core.dsl import Bench
from tests.doubles.payloads import cleared, payload, plain_all, removed, store, tokens_of
from tests.doubles.router import PlainSetRouter
from tests.typed import well_formed


class TestClear:
    @pytest.mark.parametrize("clears", [2, 3, 5])
    def test_a_second_clear_in_a_batch_empties_the_other_tiers(self, clears):
        """A second clear in the same batch empties the other tiers.

        vLLM sends two clears without a medium in one batch if it also resets its offloaded blocks (``reset_external``).
        """
        bench = Bench()
        bench.feed(*[store([i], medium=medium) for medium in ("GPU", "CPU", "DISK") for i in range(184)])
        assert bench.feed(*[cleared()] * clears) == plain_all([cleared()])
        assert bench.router.blocks == {}
        assert bench.normalizer.entries == 0
        assert bench.feed(removed([1], medium="CPU")) == []


class TestClearedTiers:
    """Tests for the blocks that remain after a clear, if the engine had blocks on two tiers."""

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
    def test_the_setting_clears_decides_which_tiers_a_clear_empties(self, clears, opens, left):
        bench = Bench(clears=clears)
        first = [cleared()] if opens else []
        bench.feed(*first, store([1]), store([2], medium="CPU"), first_of_epoch=True)
        bench.feed(cleared())
        assert {medium for medium, count in bench.normalizer.index.media().items() if count} == left


class TestEmptied:
    """Tests for the flag which says that a clear has emptied all tiers of the engine."""

    def test_a_clear_empties_an_engine_that_has_named_only_its_device(self):
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


class TestNamedClears:
    """Tests for outputs that send removals of all blocks in place of a clear."""

    def feed(self, bench, *events):
        """Apply events, and return the events of an output that sends removals in place of a clear."""
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

    @pytest.mark.parametrize(("clears", "left"), [("auto", {3, 5}), ("all", {5})])
    def test_several_clears_in_a_batch_become_removals(self, clears, left):
        """A batch has several clears.

        With ``clears: auto``, the first empties only the device, and the next only other tiers.

        So block 3, which is stored on the device after the first clear, stays. With ``all``, each clear empties every
        tier.
        """
        bench = Bench(clears=clears)
        self.feed(bench, store([1, 2]))
        self.feed(bench, removed([2]), cleared(), store([3, 4]), removed([4]), cleared(), cleared(), store([5]))
        assert bench.live == left

    @pytest.mark.parametrize("gone", [[], [1], [2], [1, 2]], ids=str)
    def test_a_clear_of_divided_blocks_becomes_removals_of_sub_blocks(self, gone):
        bench = Bench(block_size=16)
        tokens = tokens_of(1, 96)
        self.feed(bench, store([1], tokens=tokens[:64], block_size=64), store([3], tokens=tokens[:32], block_size=32))
        self.feed(bench, store([2], 1, tokens=tokens[64:], block_size=32))
        removals = [removed(gone)] if gone else []
        self.feed(bench, *removals, cleared(), store([4], block_size=32))
        assert len(bench.live) == 2


class TestOneMedium:
    """Tests for an AllBlocksCleared that names the emptied medium, as ATOM sends it."""

    @pytest.mark.parametrize(
        "event",
        [["AllBlocksCleared", "CPU"], cleared("cpu"), cleared("CPU") | {"novelty": 1}],
        ids=["array", "map", "extra"],
    )
    @pytest.mark.parametrize("opens", [False, True], ids=["vllm", "sglang"])
    def test_a_clear_of_one_medium_keeps_the_blocks_of_other_media(self, event, opens):
        bench = Bench()
        bench.feed(*[cleared()] * opens, first_of_epoch=True)
        bench.feed(store([1, 2]), store([1, 2], medium="CPU"), store([3], medium="DISK"), store([1], medium="CPU"))
        assert bench.feed(event) == plain_all([removed([2, 1], medium="CPU")])
        assert set(bench.router.blocks) == {(None, "GPU", 1), (None, "GPU", 2), (None, "DISK", 3)}
        assert bench.announced().blocks == bench.router.blocks

    @pytest.mark.parametrize("clears", ["auto", "all", "device"])
    @pytest.mark.parametrize("medium", ["GPU", "CPU"])
    def test_only_a_clear_of_the_device_empties_an_unknown_engine(self, clears, medium):
        bench = Bench(clears=clears)
        bench.feed(cleared(medium))
        assert bench.normalizer.emptied is (medium == "GPU" and clears != "all")

    def test_a_clear_whose_medium_is_not_a_text_is_refused(self):
        bench = Bench()
        bench.feed(store([1]))
        assert bench.feed(["AllBlocksCleared", 7], {"type": "AllBlocksCleared", "medium": 7}) == []
        assert bench.rejected == {"wrong_type": 2}
        assert bench.live == {1}

    def test_a_chained_kvbus_and_a_client_apply_the_clears_of_a_medium(self):
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

    def test_a_clear_of_an_unknown_medium_is_rejected(self):
        bench = Bench()
        bench.feed(store([1]))
        assert bench.feed(cleared("HBM")) == []
        assert bench.rejected == {"unknown_medium": 1}
        assert bench.live == {1}
