"""Run a generator of kvbus to its end. kvbus's generators yield between slices of long work."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")


def driven(work: Generator[None, None, T]) -> tuple[T, int]:
    """Run a generator to its end. Return its result, and how often it yielded."""
    turns = 0
    while True:
        try:
            next(work)
        except StopIteration as done:
            return done.value, turns
        turns += 1
