"""One moment of the demo as plain data: what the views draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from kvbus.demo.story import Line


class Match(Enum):
    """How one router's view of one source stands to the engine's own cache."""

    EQUAL = "equal"
    """All that the engine has published is applied, and the same blocks are live."""
    DIFFERENT = "different"
    """All is applied, and the blocks differ."""
    BEHIND = "behind"
    """Batches are on their way: nothing can be said yet."""
    DOWN = "down"
    """The engine is away, or the bus is getting to know its new life."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One router's view of one source.

    Attributes:
        blocks: in the view.
        match: against the engine.
        behind: batches that the view lacks, where that is known.
    """

    blocks: int
    match: Match
    behind: int = 0


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One engine rank as the bus sees it; ``rate`` in live batches a second, ``tiers`` in blocks by medium."""

    label: str
    state: str
    epoch: int
    dialect: str | None
    rate: float
    tiers: Mapping[str, int]
    missing: int
    recovered: int
    lost: int
    pending: int


@dataclass(frozen=True, slots=True)
class OutputRow:
    """One output of the bus.

    ``profile`` is whose encoding and framing it speaks, ``endpoint`` that of the first of its ``streams``; ``queue``,
    ``sent`` and ``dropped`` are batches, ``subscribers`` subscriptions of all streams, ``replays`` requests.
    """

    name: str
    profile: str
    endpoint: str
    streams: int
    queue: int
    sent: int
    dropped: int
    subscribers: int
    replays: int


@dataclass(frozen=True, slots=True)
class RouterRow:
    """One router; ``cells`` in the order of the sources, empty while it is away."""

    name: str
    output: str
    cells: Sequence[Cell] = ()
    rebuilt: bool = False

    @property
    def joined(self) -> bool:
        """Whether it is there."""
        return bool(self.cells)

    @property
    def blocks(self) -> int:
        """Blocks in all of its views."""
        return sum(cell.blocks for cell in self.cells)

    @property
    def match(self) -> Match | None:
        """The worst of its cells; None while it is away."""
        for match in (Match.DIFFERENT, Match.DOWN, Match.BEHIND, Match.EQUAL):
            if any(cell.match is match for cell in self.cells):
                return match
        return None


@dataclass(frozen=True, slots=True)
class Frame:
    """Everything there is to see at one moment."""

    elapsed: float
    seconds: float | None
    url: str
    sources: Sequence[SourceRow]
    outputs: Sequence[OutputRow]
    routers: Sequence[RouterRow]
    story: Sequence[Line]
