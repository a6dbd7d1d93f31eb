"""Tests that search for a short time for inputs that cost kvbus more for each of their bytes than a limit."""

import time

import pytest

from kvbus.core.events import BatchReceived, SourceUp, Tick
from tests.cost.search import BYTES, ENDPOINTS, INSTRUCTIONS, bytes_for, instructions_for, make_relay, search
from tests.doubles.payloads import cleared, payload, removed, store


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_short_search_finds_no_input_over_the_cost_budget(endpoint):
    cost, dearest = search(endpoint, seed=1, inputs=150)
    assert 0 < cost <= INSTRUCTIONS[endpoint], dearest
    assert bytes_for(endpoint, dearest) <= BYTES[endpoint], dearest


def test_clears_are_cheap_with_hundreds_of_block_tables():
    """Clears and stores cost kvbus few instructions even after an input with hundreds of groups and media.

    The search of the test above is too short to find such an input. kvbus has a table of blocks for each group and
    medium. If it looked at each table for each event, it would execute 100 instructions for each byte of the input.
    """
    media = ["CPU", "DISK", "FS", "NVME", "OBJ", "SHARED", "REMOTE", "NETWORK"]
    tables = [
        [store([10 * group + n], group=group, medium=medium, block_size=1) for group in range(64)]
        for n, medium in enumerate(media)
    ]
    for event in (cleared(), store([9999], 1, group=70, block_size=1)):
        given = [*tables, [event] * 2000]
        assert instructions_for("engine live", given) <= 40


def test_stores_with_different_numbers_of_tokens_are_cheap():
    """If no two stores of an input have the same number of tokens, kvbus executes few instructions for each of its
    bytes.

    An earlier version compiled a pattern for each new number of tokens.
    """
    given = [[store([n * 100 + k for k in range(count)], block_size=1)] for n, count in enumerate(range(201, 261))]
    assert instructions_for("engine live", given) <= 20


LARGE = list(range(1, 300_001))


@pytest.mark.parametrize("known", [True, False], ids=["known blocks", "unknown blocks"])
def test_no_call_of_the_relay_removes_very_many_blocks(known):
    """kvbus removes 300,000 blocks in several calls, each of which needs a small part of the CPU time.

    An earlier version removed a million blocks in one call, in which kvbus answered no probe for up to 14 s.
    """
    bus = make_relay()
    bus.handle(SourceUp(0), 1.0)
    batches = [payload(store(LARGE, tokens=LARGE, block_size=1))] * known + [payload(removed(LARGE))]
    for seq, body in enumerate(batches):
        calls = []
        todo = [BatchReceived(0, [b"", seq.to_bytes(8, "big"), body])]
        while todo or bus.backlog:
            begun = time.process_time()
            bus.handle(todo.pop() if todo else Tick(1.0), 1.0)
            calls.append(time.process_time() - begun)
        assert len(calls) > 8
    assert max(calls) < 0.4 * sum(calls)
