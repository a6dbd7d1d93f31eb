"""Tests for reading the blocks that a router reports to the conformance kit, in each format.

They also test the comparison of these blocks with the engine's.
"""

from __future__ import annotations

import pytest

from kvbus.tools.conform.router.views import HeldBlock, Score, Source, View, ViewError, canonical, parse, score

PATH = {1: Source(None, [1, 2]), 2: Source(1, [3, 4]), 3: Source(2, [5, 6])}


@pytest.mark.parametrize(
    ("said", "block"),
    [
        (7, 7),
        (-1, 2**64 - 1),
        ("-1", 2**64 - 1),
        (" 18446744073709551615 ", 2**64 - 1),
        ("0xff", 255),
        ("FF", 255),
        (bytes(range(1, 33)), 0x191A1B1C1D1E1F20),
        (bytes(range(1, 33)).hex(), 0x191A1B1C1D1E1F20),
    ],
)
def test_a_view_may_write_a_block_hash_in_each_form(said, block):
    assert canonical(said) == block


@pytest.mark.parametrize("said", ["", "x1", None, True, 1.5, "1 2"])
def test_an_invalid_block_hash_in_a_view_is_refused(said):
    with pytest.raises(ViewError):
        canonical(said)


@pytest.mark.parametrize("text", ["1\n0x2\n", "[1, 2]", '{"held": ["1", 2]}', '"1"\n{"hash": 2}\n', "1\n\n2"])
def test_a_view_may_write_its_blocks_in_each_form(text):
    assert parse(text) == View(frozenset({HeldBlock(1), HeldBlock(2)}))


def test_a_view_names_the_block_fields_that_the_router_reports():
    assert parse('{"hash": 1, "medium": "device", "rank": 3}') == View(
        frozenset({HeldBlock(1, "GPU", None, 3)}), frozenset({"medium", "rank"})
    )
    found = parse('{"held": [], "incomplete": true, "by_prefix": true}')
    assert (found.held, found.incomplete, found.by_prefix) == (frozenset(), True, True)
    assert parse("") == View(frozenset())


@pytest.mark.parametrize("text", ['{"blocks": []}', "[{}]", "nothing here", "[[1]]"])
def test_an_invalid_view_is_refused(text):
    with pytest.raises(ViewError):
        parse(text)


@pytest.mark.parametrize(
    ("held", "tells", "found"),
    [
        ({HeldBlock(1), HeldBlock(2)}, (), (0, 0)),
        ({HeldBlock(1)}, (), (1, 0)),
        ({HeldBlock(1), HeldBlock(2), HeldBlock(9)}, (), (0, 1)),
        ({HeldBlock(1, rank=0), HeldBlock(2, rank=1)}, ("rank",), (0, 0)),
        ({HeldBlock(1, rank=0), HeldBlock(2, rank=0)}, ("rank",), (1, 1)),
        ({HeldBlock(1, "CPU"), HeldBlock(2, "GPU")}, ("medium",), (1, 1)),
    ],
)
def test_a_score_compares_only_the_block_fields_that_the_router_reports(held, tells, found):
    cache = {HeldBlock(1, "GPU", None, 0), HeldBlock(2, "GPU", None, 1)}
    assert score(cache, View(frozenset(held), frozenset(tells)), PATH) == Score(*found)


def test_a_prefix_view_lacks_no_block_after_a_missing_parent():
    cache = {HeldBlock(1), HeldBlock(3)}
    assert score(cache, View(frozenset({HeldBlock(1)}), by_prefix=True), PATH) == (0, 0)
    assert score(cache, View(frozenset({HeldBlock(1)})), PATH) == (1, 0)
