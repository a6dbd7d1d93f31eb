"""What leaves of the batch under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_

from kvbus.core.wire.codec import AnyEvent, Batch


class Leaving:
    """The events that leave, in order; the removals of a run wait in :mod:`~kvbus.core.normalizing.removals`."""

    __slots__ = ("as_it_came", "cleared", "events", "touched")

    def __init__(self) -> None:
        self.events: list[AnyEvent] = []
        self.touched = False
        """An event does not leave as it came, though it is the same object."""
        self.as_it_came = False
        """The events are those of the payload, exactly: it says what leaves."""
        self.cleared: list[Callable[[], Sequence[AnyEvent]]] = []
        """For each clear, what makes the removals that say the same."""

    def begin(self) -> list[AnyEvent]:
        """A batch begins; the events that will leave."""
        events: list[AnyEvent] = []
        self.events = events
        self.touched = False
        if self.cleared:
            self.cleared = []
        return events

    def finish(self, batch: Batch) -> None:
        """The batch ends."""
        came, left = batch.events, self.events
        self.as_it_came = batch.canonical and not self.touched and len(left) == len(came) and all(map(is_, left, came))
