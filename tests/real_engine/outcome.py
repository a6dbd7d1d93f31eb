"""What was seen: how the blocks of kvbus and of routers differ from those of the engine's pool."""

from __future__ import annotations

import contextlib
import json
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

Blocks = dict[tuple[int, int, str], int]
"""Physical copies by (rank, group, hash)."""


ARRIVAL = "kvbus comes late"
"""The first quiet point of a scene: kvbus has replayed everything that was before it."""


class Score(NamedTuple):
    """Blocks that are missing, blocks that the engine no longer has, and blocks with a wrong number of copies."""

    missing: int
    dead: int
    copies: int = 0

    def __str__(self) -> str:
        return f"{self.missing} / {self.dead}" + (f" ({self.copies} wrong copies)" if self.copies else "")


class Point(NamedTuple):
    """A quiet point: no request is under way.

    Attributes:
        what: has happened since the last one.
        blocks: those of the engine.
        copied: those of which it has several copies.
        removed: blocks that the early router was told to drop since the last quiet point.
        scores: of kvbus and of routers.
        seconds: until everything was equal, or was given up.
    """

    what: str
    blocks: int
    copied: int
    removed: int
    scores: dict[str, Score]
    seconds: float

    @property
    def exact(self) -> bool:
        return not any(any(each) for each in self.scores.values())

    def __str__(self) -> str:
        scores = ", ".join(f"{who} {each}" for who, each in self.scores.items())
        have = f"{self.blocks} blocks, {self.copied} with copies, {self.removed} removed"
        return f"{self.what}: {have}; missing / dead: {scores} after {self.seconds:.1f} s"


@dataclass
class Outcome:
    """Of one case."""

    engine: str
    case: str
    points: list[Point] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failure: str = ""

    @property
    def exact(self) -> bool:
        return bool(self.points) and not self.failure and all(point.exact for point in self.points)

    def worst(self, who: str) -> Score | None:
        """Of all points; None: it was never compared."""
        found = [point.scores[who] for point in self.points if who in point.scores]
        return max(found, key=sum, default=None)

    @contextlib.contextmanager
    def caught(self, directory: Path) -> Iterator[None]:
        """Whatever goes wrong is this outcome, and other cases go on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            (directory / "failure").write_text(traceback.format_exc())
            self.failure = f"{type(error).__name__}: {error}"[:300]

    def lines(self) -> list[str]:
        """For people who watch."""
        failed = [f"FAILED: {self.failure}"] if self.failure else []
        return [f"{self.engine}: {self.case}: {each}" for each in (*self.points, *self.notes, *failed)]


def score(pool: Blocks, held: Blocks, *, counted: bool = False) -> Score:
    """Compare; ``counted``: the other side counts copies, too."""
    wrong = sum(held[key] != copies for key, copies in pool.items() if key in held) if counted else 0
    return Score(len(pool.keys() - held.keys()), len(held.keys() - pool.keys()), wrong)


def blocks_of(rows: Iterable[dict[str, Any]]) -> Blocks:
    """Blocks out of rows as ``/blocks`` and ``kvbus dump`` have them."""
    return {(row["rank"], row["group_idx"] or 0, str(row["hash"])): row["copies"] for row in rows}


def blocks_of_text(text: str) -> Blocks:
    """The same of one JSON object a line."""
    return blocks_of(json.loads(line) for line in text.splitlines())
