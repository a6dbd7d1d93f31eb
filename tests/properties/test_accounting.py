"""Tests that the random worlds find defects in how kvbus counts missing batches.

Each test adds one defect to kvbus.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvbus.core.sequencing.actions import Lost, LostReason
from kvbus.core.sequencing.gap_tracker import GapTracker
from tests.properties.soak import draw, run

SEEDS = range(60)


def _gives_up_uncounted(self: GapTracker, reason: LostReason) -> None:
    first = self.buffer.first if self.buffer else self.log_end
    self.fingerprints.skip(self.next, first)
    count, self.next = first - self.next, first
    self._actions.append(Lost(count, reason))
    self.drain()


def _finds_uncounted(self: GapTracker, seq: int) -> None:
    self._stats.missing += max(seq + 1 - self.log_end, 0)


def _exposes_uncounted(self: GapTracker, end: int) -> None:
    self.log_end = max(self.log_end, end)


def _ends_with_holes(self: GapTracker) -> None:
    """Replace a method of kvbus by a defect: at the end of an epoch, pending batches are not counted as lost."""


DEFECTS: dict[str, Callable[..., None]] = {
    "give_up": _gives_up_uncounted,
    "_count_found": _finds_uncounted,
    "expose": _exposes_uncounted,
    "write_off": _ends_with_holes,
}


@pytest.mark.parametrize("name", DEFECTS)
def test_an_uncounted_batch_breaks_the_equation_of_missing_batches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GapTracker, name, DEFECTS[name])
    errors = (run(*draw(seed))[1] for seed in SEEDS)
    first = next((error for error in errors if error is not None), None)
    assert isinstance(first, AssertionError)
    assert "missing, " in str(first)
