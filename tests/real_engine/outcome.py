"""Results of the tests with a real engine: the differences between its block pool and what kvbus and routers have."""

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
"""Number of physical copies of each block, by rank, group and hash."""


ARRIVAL = "kvbus comes late"
"""Name of the first comparison in a case. kvbus has then replayed what the engine published before kvbus's start."""


class Score(NamedTuple):
    """The differences between the engine's blocks and a view.

    They are the numbers of missing blocks, of blocks that the engine no longer has, and of wrong copy counts.
    """

    missing: int
    dead: int
    copies: int = 0

    def __str__(self) -> str:
        return f"{self.missing} / {self.dead}" + (f" ({self.copies} wrong copies)" if self.copies else "")


class Point(NamedTuple):
    """The results at a quiet point, at which the engine serves no request.

    Attributes:
        what: what has happened since the last quiet point.
        blocks: number of the engine's blocks.
        copied: number of the engine's blocks with several copies.
        removed: number of removed blocks that the early router has read since the last quiet point. The early router
            reads the stream during the complete case.
        scores: scores of kvbus and of the routers.
        seconds: duration until everything was equal, or until the comparison was given up.
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
    """The results of one case with a real engine."""

    engine: str
    case: str
    points: list[Point] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failure: str = ""

    @property
    def exact(self) -> bool:
        return bool(self.points) and not self.failure and all(point.exact for point in self.points)

    def worst(self, who: str) -> Score | None:
        """Return the worst score of ``who`` (kvbus or a router) in this case.

        Return None if its blocks were never compared with the engine's.
        """
        found = [point.scores[who] for point in self.points if who in point.scores]
        return max(found, key=sum, default=None)

    @contextlib.contextmanager
    def caught(self, directory: Path) -> Iterator[None]:
        """If the ``with`` block fails, record the error as this case's failure, so that the next cases are played.

        The complete traceback goes to the file ``failure`` in ``directory``.
        """
        try:
            yield
        except Exception as error:  # noqa: BLE001
            (directory / "failure").write_text(traceback.format_exc())
            self.failure = f"{type(error).__name__}: {error}"[:300]

    def lines(self) -> list[str]:
        """Return the results of the case as lines for the terminal."""
        failed = [f"FAILED: {self.failure}"] if self.failure else []
        return [f"{self.engine}: {self.case}: {each}" for each in (*self.points, *self.notes, *failed)]


def score(pool: Blocks, held: Blocks, *, counted: bool = False) -> Score:
    """Compare the engine's blocks with those of kvbus or a router.

    If ``counted``, also compare the numbers of copies.
    """
    wrong = sum(held[key] != copies for key, copies in pool.items() if key in held) if counted else 0
    return Score(len(pool.keys() - held.keys()), len(held.keys() - pool.keys()), wrong)


def blocks_of(rows: Iterable[dict[str, Any]]) -> Blocks:
    """Return the blocks that the rows of kvbus's ``/blocks`` or of ``kvbus dump`` describe."""
    return {(row["rank"], row["group_idx"] or 0, str(row["hash"])): row["copies"] for row in rows}


def blocks_of_text(text: str) -> Blocks:
    """Return the blocks in a text with one JSON object in each line."""
    return blocks_of(json.loads(line) for line in text.splitlines())
