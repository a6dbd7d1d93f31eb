"""Tests for the functions that parse and compare blocks in `make real-engine`, which itself needs a real engine."""

from __future__ import annotations

from .outcome import Outcome, Point, Score, blocks_of_text, score
from .readme import README, commands

POOL = {(0, 0, "1"): 1, (0, 0, "2"): 2, (1, 0, "1"): 1}
ROW = '{"rank": %d, "hash": %d, "medium": "GPU", "group_idx": null, "copies": %d}\n'


def test_a_score_counts_missing_dead_and_copied_blocks() -> None:
    held = blocks_of_text(ROW % (0, 1, 1) + ROW % (0, 2, 1) + ROW % (1, 9, 1))
    assert score(POOL, held, counted=True) == Score(missing=1, dead=1, copies=1)
    assert score(POOL, held) == Score(missing=1, dead=1)
    assert score(POOL, POOL, counted=True) == Score(0, 0)


def test_an_outcome_with_one_wrong_point_is_not_exact() -> None:
    outcome = Outcome("engine", "case")
    assert not outcome.exact, "nothing was compared"
    for wrong in (Score(0, 0), Score(0, 3), Score(0, 0)):
        outcome.points.append(Point("", 3, 0, 0, {"kvbus": wrong}, 0.0))
    assert not outcome.exact
    assert outcome.worst("kvbus") == Score(0, 3)
    assert outcome.worst("late router") is None


def test_the_readme_has_the_commands_of_the_real_engine_test() -> None:
    serve, config, lines = commands(README.read_text())
    assert serve[:4] == ["vllm", "serve", "MODEL", "--kv-events-config"]
    assert "replay_endpoint" in config
    assert lines[0].startswith("kvbus check")
    assert lines[-1].startswith("kvbus run --source")
