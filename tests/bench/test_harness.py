"""The measuring programs measure: every process does its part, and what goes wrong is an error and no result."""

from __future__ import annotations

import pytest

from .loads import LOADS, SEQUENCE, end, is_empty, probe, stamp, stamped, tally
from .setups import BETWEEN, Setup, running


@pytest.mark.parametrize(("load", "batches", "blocks"), [("1x1", 600, 600), ("8x8", 40, 2560), ("1x64", 40, 2560)])
def test_stores_store_what_their_name_says(load, batches, blocks):
    stored, removed, live = tally(LOADS[load].take(batches))
    assert (stored, removed, len(live)) == (blocks, 0, blocks)


def test_a_mixed_load_keeps_the_cache_full():
    payloads = LOADS["full"].take(4096 // 16 + 200)
    stored, removed, live = tally(payloads)
    assert stored - removed == len(live)
    assert abs(len(live) - 4096) <= 8 * SEQUENCE
    assert removed >= 100 * 8


def test_ranks_and_probes_share_no_block():
    seen = [tally(LOADS["8x8"].take(20, rank))[2] for rank in (0, 1)]
    seen += [tally([probe(number)])[2] for number in (1, 2)] + [tally([end()])[2]]
    assert len(set.union(*seen)) == sum(map(len, seen))


def test_a_stamp_changes_nothing_but_the_time():
    payload = LOADS["8x8"].take(1)[0]
    again = stamp(payload, 12.5)
    assert stamped(again) == 12.5
    assert (again[:2], again[10:]) == (payload[:2], payload[10:])
    assert not is_empty(again)
    assert is_empty(b"\x93\xcb" + bytes(8) + b"\x90\x00")


@pytest.mark.parametrize("between", BETWEEN)
def test_all_of_a_load_arrives_through(between):
    with running(Setup(between, "full", 600, routers=2, ranks=2, verify=True)) as processes:
        result = processes.run()
        if between == "kvbus":
            processes.check_kvbus()
            of_the_load = sum(heard.live for heard in result.heard) // 2
            ends = 2
            assert processes.live_blocks() == of_the_load + processes.probes + ends
    stored, removed, live = tally(LOADS["full"].take(600))
    assert [(heard.batches, heard.stored, heard.removed, heard.live) for heard in result.heard] == [
        (600, stored, removed, len(live))
    ] * 4
    assert result.seconds > 0
    assert min(result.cpu.values()) > 0


def test_a_paced_load_gives_a_latency_for_each_batch():
    with running(Setup("direct", "1x1", 300, rate=1000, prefill=100)) as processes:
        result = processes.run()
    assert len(result.latencies) == 200
    assert 0 < result.latencies[0] < 1
    assert result.seconds > 0.15
