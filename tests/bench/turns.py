"""Runs that take turns, so that what the machine does meanwhile hits everyone alike."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Found = TypeVar("Found")


def alternate(title: str, runs: int, items: Sequence[Item], measure: Callable[..., Found]) -> dict[Item, list[Found]]:
    """Measure every item ``runs`` times: forwards, backwards, forwards, and so on."""
    found: dict[Item, list[Found]] = {item: [] for item in items}
    for turn in range(runs):
        for item in items if turn % 2 == 0 else reversed(items):
            began = time.monotonic()
            found[item].append(measure(item))
            sys.stderr.write(f"  {title}, run {turn + 1} of {runs}: {item} ({time.monotonic() - began:.1f} s)\n")
    return found
