"""Whether tests run at length: ``TEST_LONG=1``, which ``make test-all`` sets."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final, TypeVar

T = TypeVar("T")

LONG: Final = os.environ.get("TEST_LONG") == "1"


def sample(values: Sequence[T], every: int) -> list[T]:
    """All of them at length, else every so many of them, with the first and the last."""
    return list(values) if LONG else [*values[:-1:every], *values[-1:]]
