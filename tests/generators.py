"""Work in turns, driven to its end."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")


def driven(work: Generator[None, None, T]) -> tuple[T, int]:
    """What a generator returns, and how often it waited for another turn."""
    turns = 0
    while True:
        try:
            next(work)
        except StopIteration as done:
            return done.value, turns
        turns += 1
