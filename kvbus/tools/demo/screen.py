"""The demo's screen as plain data, for the views to draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from kvbus.http.entries import Counts
from kvbus.tools.demo.story import Line


class Match(Enum):
    """One router's view of one source, compared with the engine's own cache."""

    EQUAL = "equal"
    """The router has applied all batches, and the same blocks are live."""
    DIFFERENT = "different"
    """The router has applied all batches, and the blocks differ."""
    BEHIND = "behind"
    """Batches are on their way, so a comparison means nothing yet."""
    DOWN = "down"
    """The engine is down, or the bus does not know its new epoch yet."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One router's view of one source.

    Attributes:
        blocks: blocks in the view.
        match: comparison with the engine.
        behind: batches that the view lacks.
        missing: blocks that only the engine has, where the two were compared.
        dead: blocks that only the view has, where the two were compared.
    """

    blocks: int
    match: Match
    behind: int = 0
    missing: int = 0
    dead: int = 0


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One engine rank as the bus sees it. ``rate`` is in live batches per second, ``tiers`` in blocks by medium."""

    label: str
    state: str
    epoch: int
    dialect: str | None
    rate: float
    tiers: Mapping[str, int]
    counts: Counts


@dataclass(frozen=True, slots=True)
class Sent:
    """What the bus has sent on all its outputs, in batches, and the replays that routers have asked for."""

    batches: int
    queued: int
    dropped: int
    replays: int


@dataclass(frozen=True, slots=True)
class RouterRow:
    """One router. ``cells`` are in the order of the sources, and empty while the router is away.

    ``direct`` is True for the one that reads the engines themselves.
    """

    name: str
    reads: str
    cells: Sequence[Cell] = ()
    rebuilt: bool = False
    direct: bool = False

    @property
    def joined(self) -> bool:
        """Whether the router runs."""
        return bool(self.cells)

    @property
    def blocks(self) -> int:
        """Blocks in all of its views."""
        return sum(cell.blocks for cell in self.cells)

    @property
    def missing(self) -> int:
        """Blocks that only the engines have."""
        return sum(cell.missing for cell in self.cells)

    @property
    def dead(self) -> int:
        """Blocks that only the router has."""
        return sum(cell.dead for cell in self.cells)

    @property
    def match(self) -> Match | None:
        """The worst of its cells; None while it is away."""
        for match in (Match.DIFFERENT, Match.DOWN, Match.BEHIND, Match.EQUAL):
            if any(cell.match is match for cell in self.cells):
                return match
        return None


@dataclass(frozen=True, slots=True)
class Screen:
    """Everything to show at one moment."""

    elapsed: float
    seconds: float | None
    url: str
    sources: Sequence[SourceRow]
    sent: Sent
    routers: Sequence[RouterRow]
    story: Sequence[Line]
