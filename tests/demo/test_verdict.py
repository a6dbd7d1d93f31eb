"""The verdict can fail: each way in which a view can be wrong is found and named."""

import msgspec
import pytest

from kvbus.client import BlockView
from kvbus.core.wire.schema import BlockRemoved, BlockStored
from kvbus.tools.demo import plain
from kvbus.tools.demo.verdict import Verdict, compare, truth_keys, view_keys
from kvbus.tools.sim.engine import EngineOptions, SimEngine
from kvbus.tools.sim.workload import synthetic


def stored(*hashes, medium="GPU", group=0):
    tokens = msgspec.Raw(msgspec.msgpack.encode(list(range(4 * len(hashes)))))
    return BlockStored(tuple(hashes), None, tokens, 4, None, medium, None, group)


def live(block, *, medium="GPU", group=0, kind="full_attention"):
    return {"group_idx": group, "medium": medium, "hash": block, "kind": kind}


def judged(view, truth):
    return compare("router-a", "vllm/0", view_keys(view), truth_keys(truth))


@pytest.fixture
def view():
    view = BlockView()
    view.apply(stored(1, 2, 3), 0)
    view.apply(stored(1, medium="CPU"), 0)
    return view


TRUTH = [live(1), live(2), live(3), live(1, medium="CPU")]


def test_the_same_blocks_are_equal(view):
    result = judged(view, TRUTH)
    assert (result.equal, result.blocks, result.differences()) == (True, 4, "")


@pytest.mark.parametrize(
    ("corrupt", "said"),
    [
        (BlockRemoved((2,), "GPU", 0), "1 missing: GPU 2"),
        (BlockRemoved((1,), "CPU", 0), "1 missing: CPU 1"),
        (stored(9), "1 dead: GPU 9"),
        (stored(1, group=1), "1 dead: GPU 1"),
        (stored(3, medium="DISK"), "1 dead: DISK 3"),
    ],
)
def test_a_corrupted_view_is_named(view, corrupt, said):
    view.apply(corrupt, 0)
    result = judged(view, TRUTH)
    assert (result.equal, result.differences()) == (False, said)


def test_an_empty_view_misses_everything_and_a_few_are_named(view):
    view.clear()
    result = judged(view, TRUTH)
    assert result.differences() == "4 missing: CPU 1, GPU 1, GPU 2, …"


def test_groups_that_carry_no_prefix_are_nobodys_business(view):
    assert judged(view, [*TRUTH, live(7, group=1, kind="sliding_window")]).equal
    assert not judged(view, [*TRUTH, live(7, group=1, kind="mla_attention")]).equal


def test_media_are_compared_by_what_they_mean_and_bytes_by_their_hex():
    view = BlockView()
    view.apply(stored(b"\x01" * 32, medium=None, group=None), 0)
    assert judged(view, [live("01" * 32, medium="DEVICE", group=None, kind=None)]).equal


@pytest.mark.parametrize("dialect", ["vllm-0.33", "sglang-0.5.23"])
def test_the_simulators_truth_has_the_keys_this_reads(dialect):
    engine = SimEngine(dialect, synthetic(1), options=EngineOptions(blocks=100))
    for _ in range(20):
        engine.step(0.0)
    keys = truth_keys(engine.truth())
    assert len(keys) == len(engine.truth()) > 0
    assert {medium for _, medium, _ in keys} == {"GPU"}


def test_one_difference_is_enough_and_nothing_is_not_equal(view):
    good = judged(view, TRUTH)
    bad = judged(view, TRUTH[1:])
    assert Verdict([good, good]).equal
    assert not Verdict([good, bad]).equal
    assert not Verdict([]).equal
    assert Verdict([good, bad]).headline == "NOT EXACT: 1 of 2 views differ from the engines' caches"


def test_the_lines_name_what_differs_and_what_never_came_to_rest(view):
    lines = list(plain.verdict_lines(Verdict([judged(view, TRUTH[1:])], ["vllm/0: 3 batches pending"])))
    assert lines == [
        "verdict: router-a vllm/0: 3 blocks, DIFFERENT, 1 dead: GPU 1",
        "verdict: not at rest: vllm/0: 3 batches pending",
        "verdict: NOT EXACT: 1 of 1 views differ from the engines' caches",
    ]


def test_what_a_router_has_without_kvbus_is_said_and_not_judged(view):
    good, bad = judged(view, TRUTH), judged(view, TRUTH[1:])
    verdict = Verdict([good], direct=[bad, good])
    assert verdict.equal
    assert list(plain.verdict_lines(verdict))[1:] == [
        "verdict: router-a vllm/0: 3 blocks, 0 missing, 1 dead",
        "verdict: router-a vllm/0: 4 blocks, 0 missing, 0 dead",
        "verdict: what a router has without kvbus: 0 missing, 1 dead blocks",
        "verdict: exact: all 1 views hold exactly what the engines' caches hold",
    ]
