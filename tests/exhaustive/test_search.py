"""Tests that a short search finds no failure in kvbus, and that it finds each of some defects that a test adds to
kvbus.
"""

from __future__ import annotations

import pytest

from kvbus.core.outgoing import Outgoing
from kvbus.core.outputs.stream import IncompleteSeqs
from kvbus.core.sequencing.epoch import History
from kvbus.core.sequencing.fingerprints import Fingerprints
from kvbus.core.sequencing.request import OpenRequest
from kvbus.core.write_ahead_log import Frame, Records
from tests.exhaustive.search import FAULTS, SCENES, CounterExampleError, Limits, Search, one_block_a_batch
from tests.long import LONG

SHORT = {"start": 4, "first": 3, "fed": 3, "again": 3, "reading": 3, "running": 3}
DEPTH = {"start": 5, "first": 4, "fed": 4, "again": 4, "reading": 4, "running": 4} if LONG else SHORT


def explore(scene: str, depth: int) -> Search:
    search = Search(scene, Limits(depth))
    for _ in search.levels():
        pass
    return search


@pytest.mark.parametrize("scene", SCENES)
def test_every_order_of_actions_keeps_every_invariant(scene: str) -> None:
    found = explore(scene, DEPTH[scene]).found
    assert len(found.levels) == DEPTH[scene]
    assert all(found.levels), "a search that finds no new state sees nothing"
    assert {*found.exact_after} <= {*FAULTS, "no fault"}


def test_the_running_scene_has_no_open_action_and_exact_routers() -> None:
    with one_block_a_batch():
        model = Search("running", Limits(0)).at(())
    assert next(model.fair(), None) is None
    assert model.settled
    assert model.finish() == 0.0


# -- defects that a short search finds -----------------------------------------------------------------------------


def forgotten(records: Records) -> Frame:
    records.heads.clear()
    return Frame(b"\x90", [])


DEFECTS = {
    "no clear at a new epoch": (Outgoing, "clear", lambda *_: None, "start", "announced is"),
    "another epoch's answer is accepted": (OpenRequest, "contradicts", lambda *_: False, "first", "not exact"),
    "a batch of another epoch passes for a copy": (Fingerprints, "matches", lambda *_: True, "first", "not exact"),
    "batches are sent before their records are written": (Records, "take", forgotten, "first", "the log does not"),
    "a seq inside a state is a cursor": (IncompleteSeqs, "add", lambda *_: None, "reading", "router that checks holds"),
    "what nobody answered for is not asked for again": (History, "due", lambda *_: False, "again", "not exact"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_the_search_finds_each_defect(monkeypatch: pytest.MonkeyPatch, defect: str) -> None:
    where, name, instead, scene, what = DEFECTS[defect]
    monkeypatch.setattr(where, name, instead)
    with pytest.raises(CounterExampleError, match=what):
        explore(scene, SHORT[scene])
