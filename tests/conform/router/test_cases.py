"""Tests for the table of cases of the conformance kit for routers.

Each clause for readers has a case, or a reason why it has none. The expected cache of each case follows from its steps.
"""

from __future__ import annotations

import re

import pytest

from kvbus.client import BlockView
from kvbus.core.types import Reason
from kvbus.core.wire.codec import decode_batch
from kvbus.core.wire.schema import AllBlocksCleared
from kvbus.tools.conform.report import Level
from kvbus.tools.conform.router.cases import CASES, CLAUSES, Batch, Case, Restart, as_arrays, wide
from kvbus.tools.conform.router.play import chosen
from kvbus.tools.conform.router.views import HeldBlock, canonical
from kvbus.tools.conform.vectors import VECTORS, pack
from tests.conform.test_clauses import OF_READERS
from tests.spec.test_spec import CLAUSES as TEXT

UNTRIED = {
    "2.4": "a topic that is dialled needs an address that nobody should dial",
    "5.5": "snapshots are the router's choice",
    "14.3": "logs and metrics are not asked for",
}
"""Clauses of the specification that bind routers but that no case tests, with the reason."""


def test_each_clause_for_readers_has_a_case_or_a_reason_without_one():
    binding = {number for number, text in TEXT.items() if re.search(r"reader\s+(MUST|SHOULD)", text)}
    assert binding <= CLAUSES.keys() | UNTRIED.keys()
    assert CLAUSES.keys() | UNTRIED.keys() <= TEXT.keys()
    assert not CLAUSES.keys() & UNTRIED.keys()
    assert {number for case in CASES for number in case.clauses} == CLAUSES.keys()
    assert CLAUSES.keys() | UNTRIED.keys() >= OF_READERS


def test_each_test_vector_is_a_case_and_case_names_are_unique():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert VECTORS.keys() <= set(names)


def test_a_case_of_level_should_names_a_clause_with_should():
    for case in CASES:
        if case.level is Level.SHOULD and case.name != "publisher-id":  # the clause of publisher-id says "MAY refuse"
            assert any("SHOULD" in TEXT[number] or number == "3.4" for number in case.clauses), case.name


@pytest.mark.parametrize("case", [case for case in CASES if case.name not in VECTORS], ids=lambda case: case.name)
def test_the_expected_cache_of_a_case_results_from_its_batches(case: Case):
    view = BlockView(copies=True)
    for step in case.steps:
        if isinstance(step, Restart):
            view.apply(AllBlocksCleared(), step.rank)
        frames = getattr(step, "frames", [b""])
        batch = decode_batch(pack([0.0, list(step.events), step.rank]) if isinstance(step, Batch) else frames[-1])
        if not isinstance(batch, Reason):
            view.apply_batch(batch)
    assert {HeldBlock(canonical(block.hash), block.medium, block.group_idx, block.rank) for block in view} == case.cache


def test_the_long_batch_has_the_size_that_every_reader_must_accept():
    (case,) = (case for case in CASES if case.name == "long-batch")
    (batch,) = case.steps
    assert isinstance(batch, Batch)
    payload = pack([0.0, list(batch.events), 0])
    assert 4_190_000 < len(payload) <= 4 * 1024 * 1024


@pytest.mark.parametrize(("hash_", "wider"), [(1, 2**62 + 1), (-5, -(2**62) - 5), (2**64 - 5, 2**64 - 5), (b"x", b"x")])
def test_small_integer_hashes_become_64_bit_hashes(hash_, wider):
    assert wide(hash_) == wider


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_events_as_arrays_result_in_the_same_cache_as_events_as_maps(case: Case):
    def view(tried: Case) -> set[object]:
        found = BlockView(copies=True)
        for step in tried.steps:
            payload = pack([0.0, list(step.events), step.rank]) if isinstance(step, Batch) else None
            batch = decode_batch(payload or getattr(step, "frames", [b""])[-1])
            if not isinstance(batch, Reason):
                found.apply_batch(batch)
        return {(block.hash, block.medium, block.group_idx, block.rank) for block in found}

    arrays = as_arrays(case)
    assert view(arrays) == view(case)
    maps = {type(event) is dict for step in arrays.steps if isinstance(step, Batch) for event in step.events}
    assert maps <= {False}
    assert (arrays.steps == case.steps) is (case.maps or case.name in {"arrays", "longer-array"})


def test_cases_are_selected_by_name_or_clause_and_follow_the_simplest_case():
    assert chosen([]) == list(CASES)
    assert [case.name for case in chosen(["restart", "3.7"])] == ["stores", "pause", "restart"]
    with pytest.raises(ValueError, match=r"'3\.99'"):
        chosen(["3.99"])
