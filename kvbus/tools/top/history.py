"""The last minutes of a bus: rates between two moments, and their course."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Final

from kvbus.tools.top.moment import Moment, Output

KEPT: Final = 120
"""Moments."""

RATE_OVER: Final = 5
"""Moments that a rate is taken over, so that it does not flicker."""


class History:
    """Moments of one bus, oldest first. One that has been started anew begins anew: its counters do."""

    def __init__(self) -> None:
        self.moments: deque[Moment] = deque(maxlen=KEPT)

    def add(self, moment: Moment) -> None:
        """Take in the newest."""
        if self.moments and self.moments[-1].started != moment.started:
            self.moments.clear()
        self.moments.append(moment)

    def rate(self, value: Callable[[Moment], float | None]) -> float:
        """The growth of a counter per second; 0 where it is not known twice."""
        now = self.moments[-1]
        end = value(now)
        for then in list(self.moments)[-RATE_OVER - 1 : -1]:
            begin = value(then)
            if end is not None and begin is not None and now.at > then.at:
                return max(0.0, end - begin) / (now.at - then.at)
        return 0.0

    def course(self, value: Callable[[Moment], float | None], length: int) -> list[float]:
        """The growth per second between each two of the last moments, at most ``length`` of them."""
        kept = list(self.moments)[-length - 1 :]
        found = []
        for before, after in itertools.pairwise(kept):
            begin, end = value(before), value(after)
            known = begin is not None and end is not None and after.at > before.at
            found.append(max(0.0, end - begin) / (after.at - before.at) if known else 0.0)  # type: ignore[operator]
        return found


def batches_of(name: str) -> Callable[[Moment], float | None]:
    """What reads the batches taken in of one source."""

    def value(moment: Moment) -> float | None:
        return next((source["counts"]["batches"] for source in moment.sources if source["name"] == name), None)

    return value


def of_output(name: str, field: Callable[[Output], float]) -> Callable[[Moment], float | None]:
    """What reads a field of one output."""

    def value(moment: Moment) -> float | None:
        return next((field(output) for output in moment.outputs if output.name == name), None)

    return value


def of_reason(reason: str) -> Callable[[Moment], float]:
    """What reads the count of one reason."""
    return lambda moment: moment.reasons.get(reason, 0.0)
