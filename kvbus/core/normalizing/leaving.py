"""What leaves of the batch under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvbus.core.wire.codec import AnyEvent


class Leaving:
    """The events that leave, in order; the removals of a run wait in :mod:`~kvbus.core.normalizing.removals`."""

    __slots__ = ("cleared", "events")

    def __init__(self) -> None:
        self.events: list[AnyEvent] = []
        self.cleared: list[Callable[[], Sequence[AnyEvent]]] = []
        """For each clear, what makes the removals that say the same."""
