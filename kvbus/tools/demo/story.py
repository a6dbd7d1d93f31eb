"""The story: the faults and events of the demo, and how the bus repaired them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

_KEPT: Final = 200


class Tone(Enum):
    """The kind of a line."""

    SCENE = "scene"
    FAULT = "fault"
    BUS = "bus"
    WRONG = "wrong"
    DIRECT = "direct"


@dataclass(frozen=True, slots=True)
class Line:
    """One line, ``at`` seconds after the start."""

    at: float
    tone: Tone
    text: str


class Story:
    """The newest lines. A listener gets each new line.

    Args:
        clock: seconds since the start.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.lines: deque[Line] = deque(maxlen=_KEPT)
        self.listener: Callable[[Line], None] | None = None

    def add(self, tone: Tone, text: str) -> None:
        """Add a line."""
        line = Line(self._clock(), tone, text)
        self.lines.append(line)
        if self.listener is not None:
            self.listener(line)


class StoryHandler(logging.Handler):
    """Adds the bus's own warnings to the story; else they would appear across the screen."""

    def __init__(self, story: Story) -> None:
        super().__init__(logging.WARNING)
        self._story = story

    def emit(self, record: logging.LogRecord) -> None:
        """Add one record."""
        self._story.add(Tone.WRONG, record.getMessage())
