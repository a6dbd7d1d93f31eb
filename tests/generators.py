"""Run a generator of kvbus, which yields between slices of its work, to its end."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")


def driven(work: Generator[None, None, T]) -> tuple[T, int]:
    """Return the result of a generator, and how often it yielded."""
    turns = 0
    while True:
        try:
            next(work)
        except StopIteration as done:
            return done.value, turns
        turns += 1
