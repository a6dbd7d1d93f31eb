"""Whether this is a long test run, in which tests take longer and test more: ``TEST_LONG=1``, as ``make test-all``
sets it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final, TypeVar

T = TypeVar("T")

LONG: Final = os.environ.get("TEST_LONG") == "1"


def sample(values: Sequence[T], every: int) -> list[T]:
    """Return all values in a long test run. Otherwise return every ``every``-th value, with the first and the last."""
    return list(values) if LONG else [*values[:-1:every], *values[-1:]]
