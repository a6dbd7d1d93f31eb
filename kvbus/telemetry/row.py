"""A row of the table of metrics: what one metric is called, and what it reads.

The table has all metrics but the histograms. A name that ends in ``_total`` is a counter, every other one a gauge. A
row renders the reading of one source, of one output, of a discovery or of the process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

Samples = Iterable[tuple[Sequence[str], float]]
"""Values of a metric, each behind the values of its labels."""


class Row(NamedTuple, Generic[T]):
    """One metric. ``labels`` are its own; the collector puts the name of the source or output before them."""

    name: str
    text: str
    labels: tuple[str, ...]
    read: Callable[[T], Samples]


def one(name: str, text: str, read: Callable[[T], float]) -> Row[T]:
    """A metric with one value for each source, each output or the process."""
    return Row(name, text, (), lambda of: [((), read(of))])


def by(label: str, name: str, text: str, read: Callable[[T], Iterable[tuple[str, float]]]) -> Row[T]:
    """A metric with one value for each value of a label."""
    return Row(name, text, (label,), lambda of: (((key,), value) for key, value in read(of)))


def counts(counter: Counter[str], keys: Iterable[str]) -> Iterable[tuple[str, int]]:
    """Every key with its count: one that was never counted is there from the start, as 0."""
    return ((key, counter[key]) for key in keys)


def known(counter: Counter[str], keys: Iterable[str]) -> Iterable[tuple[str, int]]:
    """These keys, and whatever a driver has counted besides or has put there as a reason of its own."""
    return counts(counter, dict.fromkeys((*keys, *counter)))
