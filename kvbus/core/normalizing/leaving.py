"""What leaves of the batch under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvbus.core.wire.codec import AnyEvent


class Leaving:
    """The events that leave, in order; the removals of a run wait in :mod:`~kvbus.core.normalizing.removals`."""

    __slots__ = ("cleared", "events", "touched")

    def __init__(self) -> None:
        self.events: list[AnyEvent] = []
        self.touched = False
        """An event does not leave as it came, though it is the same object."""
        self.cleared: list[Callable[[], Sequence[AnyEvent]]] = []
        """For each clear, what makes the removals that say the same."""
