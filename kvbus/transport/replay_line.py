"""The order in which requesters have their turns: those that have shown that they read, and newcomers beside them.

A requester that never reads looks like any other at first. A thousand of these may come at once, and whoever reads
would wait until each of them is found out. So there are two lanes. While both have somebody, newcomers get one part in
17 of what is handed out. Where they wait for a place, they are taken from both ends: who comes last does not stand
behind all the others, and who comes first not behind all that come later.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from kvbus.transport.requester import Requester

ADVANTAGE: Final = 16
"""What requesters that read get for each unit that newcomers get."""

TURN: Final = 16 * 1024
"""Bytes that a turn counts beside those sent: its CPU time, however short its share is."""

PAUSE: Final = 0.001
"""Seconds that newcomers wait for one that reads and has had its share, before they get more than their part."""

NEWCOMERS: Final = 4
"""Of so many places newcomers have one."""

AGAIN: Final = 8
"""Of so many newcomers that get a place one has had a place before, where others have not."""


class Line:
    """Requesters that take turns, in two lanes. What they get is counted in units of the caller's."""

    def __init__(self) -> None:
        self._reading: deque[Requester] = deque()
        self._new: deque[Requester] = deque()
        self._lanes = [self._reading, self._new]
        self._last = self._reading
        self._ahead = 0
        """What the lane of those that read has got more than its part, since both have somebody."""

    def __len__(self) -> int:
        return self.reading + self.newcomers

    @property
    def reading(self) -> int:
        """How many are here that read."""
        return len(self._reading)

    @property
    def newcomers(self) -> int:
        """How many newcomers are here."""
        return len(self._new)

    @property
    def behind(self) -> bool:
        """Whether newcomers have got less than their part."""
        return self._ahead > 0

    def add(self, requester: Requester, *, first: bool = False) -> None:
        """Add a requester at the end of its lane, or in front of it."""
        lane = self._reading if requester.reads else self._new
        if first:
            lane.appendleft(requester)
        else:
            lane.append(requester)

    def next(self) -> Requester:
        """Take out whose turn it is."""
        reading, newcomers = self.reading, self.newcomers
        if not (reading and newcomers):
            self._ahead = 0
        self._last = self._reading if reading and (self._ahead <= 0 or not newcomers) else self._new
        return self._next_newcomer() if self._last is self._new else self._reading.popleft()

    def _next_newcomer(self) -> Requester:
        return self._new.popleft()

    def charge(self, amount: int) -> None:
        """Count what the one that was taken out last has got."""
        self._ahead += amount if self._last is self._reading else -ADVANTAGE * amount

    def pop_newcomer(self) -> Requester:
        """Take out the newcomer that was added last."""
        return self._new.pop()

    def remove(self, requester: Requester) -> None:
        """Take out a requester, if it is still here."""
        for lane in self._lanes:
            if requester in lane:
                lane.remove(requester)

    def clear(self) -> None:
        """Take out everybody."""
        for lane in self._lanes:
            lane.clear()


class WaitingLine(Line):
    """Requesters that wait for a place among those that take turns."""

    def __init__(self) -> None:
        super().__init__()
        self._tried: deque[Requester] = deque()
        self._lanes.append(self._tried)
        self._taken = 0
        """Newcomers so far."""

    @property
    def newcomers(self) -> int:
        """How many newcomers are here, tried or not."""
        return len(self._new) + len(self._tried)

    def add_tried(self, requester: Requester) -> None:
        """Add a newcomer that has had a place, and has not shown that it reads."""
        self._tried.append(requester)

    def _next_newcomer(self) -> Requester:
        self._taken += 1
        if self._tried and (self._taken % AGAIN == 0 or not self._new):
            return self._tried.popleft()
        return self._new.pop() if self._taken % 2 else self._new.popleft()

    def admissible(self, line: Line, places: int) -> bool:
        """Return whether somebody here may join ``line``, which has so many places, one or more for newcomers."""
        return self.reading > 0 or (self.newcomers > 0 and line.newcomers < max(places // NEWCOMERS, 1))

    def overtake(self, line: Line, places: int) -> tuple[Requester, Requester] | None:
        """Take out the first one here that reads, and the last newcomer of ``line`` beyond those it has places for."""
        if not self._reading or line.newcomers <= places // NEWCOMERS:
            return None
        return self._reading.popleft(), line.pop_newcomer()
