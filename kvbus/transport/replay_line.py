"""The order in which requesters have their turns: those that have shown that they read, and newcomers beside them.

A requester that never reads looks like any other at first. A thousand of these may come at once, and whoever reads
would wait until each of them is found out. So there are two lanes. While both have somebody, newcomers get a fifth of
what is handed out.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from kvbus.transport.requester import Requester

ADVANTAGE: Final = 4
"""What requesters that read get for each unit that newcomers get."""


class Line:
    """Requesters that wait for something, in two lanes. What they get is counted in units of the caller's."""

    def __init__(self) -> None:
        self._reading: deque[Requester] = deque()
        self._new: deque[Requester] = deque()
        self._last = self._reading
        self._ahead = 0
        """What the lane of those that read has got more than its part, since both have somebody."""

    def __len__(self) -> int:
        return len(self._reading) + len(self._new)

    def add(self, requester: Requester, *, first: bool = False) -> None:
        """Add a requester at the end of its lane, or in front of it."""
        lane = self._reading if requester.reads else self._new
        if first:
            lane.appendleft(requester)
        else:
            lane.append(requester)

    def next(self) -> Requester:
        """Take out whose turn it is."""
        if not (self._reading and self._new):
            self._ahead = 0
        self._last = self._reading if self._reading and (self._ahead <= 0 or not self._new) else self._new
        return self._last.popleft()

    def overtake(self, line: Line, spared: int) -> tuple[Requester, Requester] | None:
        """Take out the first one here that reads, and the last newcomer of ``line`` beyond the ``spared`` ones."""
        if not self._reading or len(line._new) <= spared:
            return None
        return self._reading.popleft(), line._new.pop()

    def charge(self, amount: int) -> None:
        """Count what the one that was taken out last has got."""
        self._ahead += amount if self._last is self._reading else -ADVANTAGE * amount

    def remove(self, requester: Requester) -> None:
        """Take out a requester, if it is still here."""
        for lane in (self._reading, self._new):
            if requester in lane:
                lane.remove(requester)

    def clear(self) -> None:
        """Take out everybody."""
        self._reading.clear()
        self._new.clear()
